package undo

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/internal/delegate"
)

// Begin records that a pass over the entry's steps begins, and why.
func (w *Worker) Begin(ctx context.Context, e *journal.Entry, reason alive.Reason) error {
	return w.Journal.Update(ctx, func(tx *journal.Tx) error {
		// not before: an ADD may go on without the journal, and needs the entry as it was
		w.Mark(e, reason)
		return tx.Put(e)
	})
}

// Mark notes in an entry that a pass over its steps begins, and why. It reports whether it found
// claims that the journal does not have; they must be written before the first DEL.
func (w *Worker) Mark(e *journal.Entry, reason alive.Reason) (found bool) {
	found = w.ClaimHeld(e)
	asked := e.Key == w.Verb.Key && reason == alive.Requested // the plain chain runs that DEL too
	switch e.State {
	case journal.Adding:
		e.State = journal.Unwinding
		CutOff(e.Newest().Steps)
	case journal.Live:
		e.State = journal.Removing
		// unwind may have been killed after its first result
		if g := e.Newest(); asked && w.Verb.Conf.NeverAdded() {
			CutOff(g.Steps[min(1, len(g.Steps)):])
		}
	}
	// else the recorded text may say more
	if e.Reason == "" || !alive.Recorded(e.Cause, e.Reason).Is(reason) {
		e.Reason = reason.Text
	}
	e.Cause = reason.Code
	for i := range e.Generations {
		g := &e.Generations[i]
		for j := range g.Steps {
			s := &g.Steps[j]
			s.MayHaveRun = !asked && (s.MayHaveRun || s.State == journal.StepUntried && g.Begun)
		}
		g.Begun = true
	}
	return found
}

// markAfter is how long a pass may take before its start is written to the journal. Sweeps finish a
// pass that is interrupted later than this.
const markAfter = 500 * time.Millisecond

// RunUnmarked is Run for an entry whose mark is not written yet. It writes the mark if the pass
// takes longer than markAfter; most passes are faster and need only one transaction.
func (w *Worker) RunUnmarked(ctx context.Context, job Job) []*delegate.Failure {
	if w.Journal.Unwritable {
		return w.Run(ctx, job)
	}
	marked, done := job.Entry.Clone(), make(chan struct{})
	for i := range marked.Generations {
		marked.Generations[i].Begun = true
	}
	timer := time.AfterFunc(markAfter, func() {
		defer close(done)
		err := w.Journal.Store.Update(context.WithoutCancel(ctx),
			func(tx *journal.Tx) error { return tx.Put(marked) })
		if err != nil {
			w.Log.Debug("cannot record the start of a DEL", "attachment", marked.Key.String(), "err", err)
		}
	})
	defer func() {
		if !timer.Stop() {
			<-done
		}
	}()
	return w.Run(ctx, job)
}

// Finish writes what is left of an entry after a pass. If nothing is left, it deletes the entry and
// writes the tombstone, if any, because the runtime's own DEL is still to come. It returns the
// other entries that claim one of the addresses in freed.
func (w *Worker) Finish(
	ctx context.Context, job Job, tomb *journal.Tombstone, freed ...netip.Addr,
) (others []*journal.Entry, err error) {
	e := job.Entry
	err = w.Journal.Update(context.WithoutCancel(ctx), func(tx *journal.Tx) (err error) {
		switch {
		case len(e.Generations) > 0:
			err = tx.Put(e)
		case tomb != nil:
			err = errors.Join(tx.Delete(e.Key), tx.PutTombstone(*tomb))
		default:
			err = tx.Delete(e.Key)
		}
		if err == nil {
			others, err = Others(tx, e.Key, freed)
		}
		return err
	})
	if err == nil && len(e.Generations) == 0 {
		err = job.Lock.Remove()
	}
	return others, err
}

// Tombstone returns the Tombstone of an entry that is released without the runtime's DEL.
func (w *Worker) Tombstone(e *journal.Entry) *journal.Tombstone {
	return &journal.Tombstone{Key: e.Key, NetNS: e.Newest().NetNS, Reason: e.Reason,
		BootID:     w.Node.Host.BootID,
		Interfaces: append(alive.InterfacesOf(e), e.Undone...), NoResult: e.State == journal.Unwinding}
}

// MarkKilled records that unwind killed delegates of an entry: those with the named programs, or
// all if none matches, for example because a child of a delegate was killed. It reports whether any
// was killed.
func MarkKilled(e *journal.Entry, programs []string, grace time.Duration) bool {
	if len(programs) == 0 {
		return false
	}
	steps := e.Newest().Steps
	named := func(s journal.Step) bool { return slices.Contains(programs, s.Type) }
	some := slices.ContainsFunc(steps, named)
	for i := range steps {
		if !some || named(steps[i]) {
			steps[i].RepeatAt = journal.BootNanos() + int64(grace)
		}
	}
	return true
}

// FailedADD notes that the ADD of a step's delegate failed. If it was killed, its agent may
// continue, so the delegate gets a second DEL after the grace period.
func FailedADD(step *journal.Step, killed bool, grace time.Duration) {
	step.ADD = journal.AddFailed
	if killed {
		step.ADD, step.RepeatAt = journal.AddCutOff, journal.BootNanos()+int64(grace)
	}
}

// CutOff notes that the ADDs of some steps may not have succeeded, because unwind was killed.
func CutOff(steps []journal.Step) {
	for i := range steps {
		steps[i].ADD = journal.AddCutOff
	}
}
