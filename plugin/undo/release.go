package undo

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/record"
)

// Outcome is the result of releasing an attachment.
type Outcome struct {
	Entry    *journal.Entry // the record of the newest ADD, after the release; nil if none existed
	State    journal.State  // the state before the release
	Verdict  decide.Verdict // the verdict under the attachment's lock
	Released bool           // nothing is left
	Err      error          // why something is left, unless the verdict says so
}

// Release undoes another attachment if it is dead, and writes the DELs that are still pending. It
// returns nil if nothing is left. ctx limits the wait for the attachment's lock, because the caller
// holds another lock. assigned is the Assigned of the Job.
func (w *Worker) Release(ctx context.Context, key journal.Key, assigned ...netip.Addr) error {
	lock, killed, err := w.Lock(ctx, key, nil)
	if err != nil {
		return err
	}
	defer lock.Release()
	out := w.ReleaseLocked(ctx, lock, killed, key, assigned...)
	switch {
	case out.Released:
		return nil
	case out.Err != nil:
		return out.Err
	}
	return errors.New(out.Verdict.Reason.Text)
}

// ReleaseLocked does the work of Release for a caller that holds the attachment's lock. It decides
// by the current content of the journal. killed names the delegates that held the lock and that
// unwind had to kill. If the newest ADD is live, the DELs of the older ones wait.
func (w *Worker) ReleaseLocked(
	ctx context.Context, lock *journal.Lock, killed []string, key journal.Key,
	assigned ...netip.Addr,
) (out Outcome) {
	var records []*journal.Entry
	if out.Err = w.Journal.Renew(ctx); out.Err == nil {
		records, out.Err = w.Journal.Snapshot(ctx).Pending(key)
	}
	switch {
	case out.Err != nil:
		return out
	case len(records) == 0:
		out.Released, out.Err = true, lock.Remove()
		return out
	}
	for i, e := range records {
		records[i] = e.Clone()
	}
	out.Entry = records[0]
	out.State, out.Verdict = out.Entry.Undo.State, decide.Decide(w.Node.Gather(ctx, out.Entry, lock))
	if !out.Verdict.Releasable() {
		return out
	}
	out.Released = true
	for _, e := range records {
		v := out.Verdict
		if e != out.Entry || e.Undo.State == journal.RollingBack && v.Fate == decide.Dead {
			v.Reason = decide.Recorded(cmp.Or(e.Undo.Cause, v.Reason.Code),
				cmp.Or(e.Undo.Reason, v.Reason.Text))
		}
		if e.Undo.State == journal.Live || e.Undo.State == journal.Adding {
			w.Log.Info("releasing attachment", "attachment", key.String(),
				"verdict", string(v.Fate), "reason", v.Reason.Text)
		}
		job := Job{Entry: e, Lock: lock, Assigned: assigned}
		if e == out.Entry {
			job.Killed = killed
		}
		failures, _, err := w.Undo(ctx, job, v.Reason)
		if err == nil && len(failures) > 0 {
			err = failures[0]
		}
		out.Err = cmp.Or(out.Err, err)
		out.Released = out.Released && err == nil && len(e.Undo.Steps) == 0
	}
	if out.Released {
		w.Log.Info("released", "attachment", key.String(), "reason", out.Verdict.Reason.Text)
	}
	return out
}

// Undo undoes one ADD, for a reason, and returns what Run returns:
//
//  1. Mark the record.
//  2. Write it. The runtime's DEL and a rollback do so only if the next pass could not do without,
//     and they continue after an error.
//  3. Run the DELs that are due.
//  4. Write the DELs that are still pending, and record the event.
//
// For an ADD on another machine, it releases only the host-local reservations on this disk, and
// drops the pending DELs. After an error, or if the verb doesn't write the journal, the journal
// does not contain the pending DELs.
func (w *Worker) Undo(
	ctx context.Context, job Job, reason decide.Reason,
) (failures []*delegate.Failure, ran int, err error) {
	e, foreign := job.Entry, reason.Is(decide.OtherMachine)
	if foreign {
		if err := purge(ctx, e); err != nil {
			return nil, 0, err
		}
		e.Undo.Steps, e.Undo.Cause, e.Undo.Reason = nil, reason.Code, reason.Text
	} else {
		if w.mark(e, job, reason) && w.Journal.Lost == nil {
			err = w.Journal.Save(ctx, e)
		}
		switch {
		case err == nil:
		case job.Mode == Requested:
			w.Degrade("DEL", err)
		case job.Mode != Rollback:
			return nil, 0, err
		}
		failures, ran = w.Run(ctx, job)
	}
	if err = nil; w.Journal.Lost == nil {
		err = w.Finish(ctx, job)
	}
	if err != nil || w.Journal.Lost != nil {
		return failures, ran, err
	}
	event := record.EventOf(journal.Swept, e)
	event.Reason = reason.Text
	switch {
	case job.Mode == Superseding && !foreign:
		event.Kind, event.Plugins = journal.Superseded, PendingSteps(e)
		w.Journal.Event(event)
	case !job.Mode.ofVerb() && len(e.Undo.Steps) == 0 || foreign:
		w.Journal.Event(event, record.CountSwept, reason.Label())
	}
	w.Journal.Flush()
	return failures, ran, nil
}

// purge releases an ADD's host-local reservations on this disk.
func purge(ctx context.Context, e *journal.Entry) error {
	pools := map[string]bool{}
	for _, step := range e.Undo.Steps {
		pools[ipam.Pool(step.Config, e.Network)] = true
	}
	for _, c := range e.Got.Claims {
		pools[c.Pool] = true
	}
	delete(pools, "")
	for _, pool := range slices.Sorted(maps.Keys(pools)) {
		if _, err := ipam.Release(ctx, pool, ownerOf(e.Key)); err != nil {
			return fmt.Errorf("pool %s: %w", pool, err)
		}
	}
	return nil
}

// mark updates a record for the start of a pass over its steps, with the reason. It reports whether
// the record must be written before the first DEL:
//
//   - without the runtime's DEL, always: the next pass must know that this one has begun;
//   - with new claims: once a DEL has freed an address, nothing else names it;
//   - if the journal does not contain the record, or not that its delegates were killed;
//   - if an IPAM plugin stores its addresses outside the node: the next pass must not simply run
//     its DEL again (see decide.Due).
func (w *Worker) mark(e *journal.Entry, job Job, reason decide.Reason) (unwritten bool) {
	mode := job.Mode
	unwritten = w.ClaimHeld(e)
	if mode == Rollback {
		e.Undo.State, e.Undo.Failed = journal.RollingBack, true
	} else {
		unwritten = w.markKilled(e, job.Killed) || unwritten || mode != Requested || e.Number == 0 ||
			slices.ContainsFunc(e.Undo.Steps,
				func(s journal.Step) bool { return known.IPAMOf(s.Config).Elsewhere })
	}
	switch e.Undo.State {
	case journal.Adding:
		e.Undo.State, e.Undo.Failed = journal.RollingBack, true
		Interrupted(e.Undo.Steps)
	case journal.Live:
		e.Undo.State = journal.Deleting
		// unwind may have been killed after it recorded the first result
		if mode == Requested && w.Verb.Conf.NeverAdded() {
			Interrupted(e.Undo.Steps[min(1, len(e.Undo.Steps)):])
		}
	}
	// a recorded text for the same reason stays, because it may contain more details
	if e.Undo.Reason == "" || !decide.Recorded(e.Undo.Cause, e.Undo.Reason).Is(reason) {
		e.Undo.Reason = reason.Text
	}
	e.Undo.Cause = reason.Code
	for i := range e.Undo.Steps {
		s := &e.Undo.Steps[i]
		// without unwind, the runtime's DEL would run too
		s.MayHaveRun = mode != Requested && (s.MayHaveRun || s.Tries == 0 && e.Undo.Begun)
	}
	e.Undo.Begun = true
	return unwritten
}

// Finish writes a record after a pass. If no DEL is pending, Finish deletes the record. But if the
// runtime's own DEL may still come, it keeps an undone record (see journal.Undone).
func (w *Worker) Finish(ctx context.Context, job Job) error {
	e := job.Entry
	last := false // the attachment has no other record
	err := w.Journal.Update(context.WithoutCancel(ctx), func(tx *journal.Tx) (err error) {
		left, err := tx.Pending(e.Key)
		if err := journal.IgnoreDamaged(err); err != nil {
			return err
		}
		last = !slices.ContainsFunc(left, func(o *journal.Entry) bool { return o.Number != e.Number })
		switch {
		case len(e.Undo.Steps) > 0:
			last, err = false, tx.Put(e)
		case !last, job.Mode != Requested: // the runtime's DEL may still come
			err = tx.Put(Buried(e))
		default:
			err = tx.Delete(e)
		}
		return err
	})
	w.Journal.Forget() // the record is not what it was
	if err == nil && last && job.Mode != Superseding {
		err = job.Lock.Remove()
	}
	return err
}

// Buried returns the undone record that replaces a record. It keeps the ADD's namespace, but no
// DELs.
func Buried(e *journal.Entry) *journal.Entry {
	b := e.Clone()
	b.Bury()
	return b
}

// markKilled marks the steps whose delegates unwind killed: those with the named programs. If none
// matches, for example because a delegate's child was killed, it marks all steps. It reports
// whether any program was killed.
func (w *Worker) markKilled(e *journal.Entry, programs []string) bool {
	if len(programs) == 0 {
		return false
	}
	named := func(s journal.Step) bool { return slices.Contains(programs, s.Type) }
	some := slices.ContainsFunc(e.Undo.Steps, named)
	for i := range e.Undo.Steps {
		if !some || named(e.Undo.Steps[i]) {
			e.Undo.Steps[i] = w.killed(e, e.Undo.Steps[i])
		}
	}
	return true
}

func (w *Worker) killed(e *journal.Entry, s journal.Step) journal.Step {
	return decide.Killed(s, journal.BootNanos(), w.Node.GraceOf(e))
}

// Failed marks a step whose delegate's ADD failed.
func (w *Worker) Failed(e *journal.Entry, s *journal.Step, f *delegate.Failure) {
	if f.Killed {
		*s = w.killed(e, *s)
		return
	}
	s.ADD = journal.AddFailed
	s.Refusal = journal.Refusal{Code: max(1, f.Code), Words: wordsOf(f)}
}

// wordsOf returns a delegate's message as a step stores it.
func wordsOf(f *delegate.Failure) string {
	return netconf.Shorten(strings.ToValidUTF8(f.Said(), "�"), 500)
}

// Interrupted marks steps whose ADDs may not have succeeded, because unwind was killed.
func Interrupted(steps []journal.Step) {
	for i := range steps {
		if steps[i].ADD == journal.AddPassed {
			steps[i].ADD = journal.AddUnknown
		}
	}
}
