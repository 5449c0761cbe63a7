package undo

import (
	"context"
	"slices"
	"strings"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/netconf"
)

// Begin writes to the journal that a pass over the record's steps begins, and why.
func (w *Worker) Begin(
	ctx context.Context, e *journal.Entry, mode Mode, reason decide.Reason,
) error {
	return w.Journal.Update(ctx, func(tx *journal.Tx) error {
		// not earlier: if the write fails, an ADD may continue, and needs the unchanged record
		w.Mark(e, mode, reason)
		return tx.Put(e)
	})
}

// Mark updates a record for the start of a pass over its steps, with the reason. It reports whether
// it added claims that are not in the journal. Those must be written before the first DEL.
func (w *Worker) Mark(e *journal.Entry, mode Mode, reason decide.Reason) (found bool) {
	found = w.ClaimHeld(e)
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
	return found
}

// Finish writes a record after a pass, unless the verb does not write the journal. If no DEL is
// pending, Finish deletes the record. But if the runtime's own DEL may still come, it keeps an
// undone record (see journal.Undone).
func (w *Worker) Finish(ctx context.Context, job Job) error {
	e := job.Entry
	if w.Journal.Unwritable {
		return nil
	}
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

// MarkKilled marks the steps whose delegates unwind killed: those with the named programs. If none
// matches, for example because a delegate's child was killed, it marks all steps. It reports
// whether any program was killed.
func (w *Worker) MarkKilled(e *journal.Entry, programs []string) bool {
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
