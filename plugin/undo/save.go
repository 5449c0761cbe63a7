package undo

import (
	"context"
	"slices"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/netconf"
)

// Begin records that a pass over the record's steps begins, and why.
func (w *Worker) Begin(ctx context.Context, e *journal.Entry, reason decide.Reason) error {
	return w.Journal.Update(ctx, func(tx *journal.Tx) error {
		// not before: an ADD may go on without the journal, and needs the record as it was
		w.Mark(e, reason)
		return tx.Put(e)
	})
}

// Mark notes in a record that a pass over its steps begins, and why. It reports whether it found
// claims that the journal does not have; they must be written before the first DEL.
func (w *Worker) Mark(e *journal.Entry, reason decide.Reason) (found bool) {
	found = w.ClaimHeld(e)
	asked := w.asksFor(e) // without unwind that DEL runs too
	switch e.State {
	case journal.Adding:
		e.State, e.Failed = journal.RollingBack, true
		Interrupted(e.Steps)
	case journal.Live:
		e.State = journal.Deleting
		// unwind may have been killed after its first result
		if asked && w.Verb.Conf.NeverAdded() {
			Interrupted(e.Steps[min(1, len(e.Steps)):])
		}
	}
	// else the recorded text may say more
	if e.Reason == "" || !decide.Recorded(e.Cause, e.Reason).Is(reason) {
		e.Reason = reason.Text
	}
	e.Cause = reason.Code
	for i := range e.Steps {
		s := &e.Steps[i]
		s.MayHaveRun = !asked && (s.MayHaveRun || s.Tries == 0 && e.Begun)
	}
	e.Begun = true
	return found
}

// Finish writes what is left of a record after a pass, unless the verb does not write the journal.
// If nothing is left, it deletes the record, or makes it an undone one if the runtime's own DEL is
// still to come (see journal.Undone). For the runtime's DEL it returns the records of others that
// claim one of its addresses.
func (w *Worker) Finish(ctx context.Context, job Job) (others []*journal.Entry, err error) {
	e, asked := job.Entry, w.asksFor(job.Entry)
	if w.Journal.Unwritable {
		return w.othersOf(ctx, e), nil
	}
	last := false // no other record of the attachment is left
	err = w.Journal.Update(context.WithoutCancel(ctx), func(tx *journal.Tx) (err error) {
		left, err := tx.Pending(e.Key)
		if err := journal.IgnoreDamaged(err); err != nil {
			return err
		}
		last = !slices.ContainsFunc(left, func(o *journal.Entry) bool { return o.Number != e.Number })
		switch {
		case len(e.Steps) > 0:
			last, err = false, tx.Put(e)
		case !last, !asked && !e.Unnamed: // the runtime's DEL may come
			err = tx.Put(w.Buried(e))
		default:
			err = tx.Delete(e)
		}
		if err == nil && asked {
			others, err = Others(tx, e.Key, e.Addresses())
		}
		return err
	})
	switch {
	case err != nil && asked:
		others = w.othersOf(ctx, e)
	case err == nil && last && !job.Superseded:
		err = job.Lock.Remove()
	}
	return others, err
}

// Buried returns an undone record in place of one: it has the interface of the ADD, and no DELs.
func (w *Worker) Buried(e *journal.Entry) *journal.Entry {
	b := e.Clone()
	if !b.Interface.Known() {
		b.Interface = netconf.InterfaceOf(e.Result, e.IfName)
	}
	b.Bury()
	b.Host.BootID = w.Node.Host.BootID // of its time
	return b
}

// MarkKilled records that unwind killed delegates of an ADD: those with the named programs, or all
// if none matches, for example because a child of a delegate was killed. It reports whether any was
// killed.
func (w *Worker) MarkKilled(e *journal.Entry, programs []string) bool {
	if len(programs) == 0 {
		return false
	}
	named := func(s journal.Step) bool { return slices.Contains(programs, s.Type) }
	some := slices.ContainsFunc(e.Steps, named)
	for i := range e.Steps {
		if !some || named(e.Steps[i]) {
			e.Steps[i] = w.killed(e, e.Steps[i])
		}
	}
	return true
}

func (w *Worker) killed(e *journal.Entry, s journal.Step) journal.Step {
	return decide.Killed(s, journal.BootNanos(), w.Node.GraceOf(e))
}

// Failed notes in a step of a record that the ADD of its delegate failed.
func (w *Worker) Failed(e *journal.Entry, s *journal.Step, killed bool) {
	if s.ADD = journal.AddFailed; killed {
		*s = w.killed(e, *s)
	}
}

// Interrupted notes that the ADDs of some steps may not have succeeded, because unwind was killed.
func Interrupted(steps []journal.Step) {
	for i := range steps {
		if steps[i].ADD == journal.AddPassed {
			steps[i].ADD = journal.AddUnknown
		}
	}
}
