package undo

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/netconf"
)

// Outcome is the result of releasing an attachment.
type Outcome struct {
	Record   *journal.Record // the record of the newest ADD, after the release; nil if none existed
	State    journal.State   // the state before the release
	Judgment decide.Judgment // the verdict under the attachment's lock
	Released bool            // nothing remains
	Err      error           // why something remains, unless the verdict is the reason
}

// Release undoes a dead attachment other than the verb's own, and records the DELs that are still
// pending. It returns nil if nothing remains. ctx limits the wait for the attachment's lock: each
// caller holds a lock of its own, so two callers could wait for each other.
func (w *Worker) Release(ctx context.Context, key journal.Key) error {
	lock, err := w.Node.Journal.Store.Acquire(ctx, key,
		journal.Patience{Children: w.Env.Budgets.Children})
	if err != nil {
		return err
	}
	defer lock.Release()
	out := w.ReleaseLocked(ctx, lock, key)
	switch {
	case out.Released:
		return nil
	case out.Err != nil:
		return out.Err
	}
	return errors.New(out.Judgment.Reason.Text)
}

// ReleaseLocked does the work of Release for a caller that holds the attachment's lock. It decides
// by the current content of the journal. If the newest ADD is live, the DELs of the older ones
// wait.
func (w *Worker) ReleaseLocked(
	ctx context.Context, lock *journal.Lock, key journal.Key,
) (out Outcome) {
	var records []*journal.Record
	if out.Err = w.Node.Journal.Renew(ctx); out.Err == nil {
		records, out.Err = w.Node.Journal.Snapshot(ctx).Pending(key)
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
	out.Record = records[0]
	out.State, out.Judgment = out.Record.State, decide.Decide(w.Node.Gather(ctx, out.Record, lock))
	if !out.Judgment.Releasable() {
		return out
	}
	out.Released = true
	for _, e := range records {
		v := out.Judgment
		if v.Verdict == decide.Dead && (e != out.Record || e.State == journal.RollingBack) {
			v.Reason = decide.Recorded(cmp.Or(e.Cause, v.Reason.Code),
				cmp.Or(e.Reason, v.Reason.Text))
		}
		if e.State == journal.Live || e.State == journal.Adding {
			w.Node.Log.Info("releasing attachment", "attachment", key.String(),
				"verdict", string(v.Verdict), "reason", v.Reason.Text)
		}
		failures, _, err := w.Undo(ctx, Request{Record: e, Lock: lock}, v.Reason)
		for _, f := range failures { // prefer a failure that the runtime would get
			if err == nil && !f.Unreported {
				err = f
			}
		}
		if err == nil && len(failures) > 0 {
			err = failures[0]
		}
		out.Err = cmp.Or(out.Err, err)
		out.Released = out.Released && err == nil && len(e.Steps) == 0
	}
	if out.Released {
		w.Node.Log.Info("released", "attachment", key.String(), "reason", out.Judgment.Reason.Text)
	}
	return out
}

// purge releases only the host-local reservations of an ADD that may have run on another machine
// (see decide.Foreign).
func purge(ctx context.Context, e *journal.Record) error {
	pools := map[string]bool{}
	for _, step := range e.Steps {
		pools[ipam.Pool(known.IPAMOf(step.Config).Name, step.Config, e.Network)] = true
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

// Failed marks a step whose delegate's ADD failed, or was killed.
func Failed(s *journal.Step, f *delegate.Failure) {
	s.ADD = journal.AddFailed
	if f.Killed {
		s.ADD = journal.AddUnknown
	}
}

// wordsOf returns a delegate's message as a step stores it.
func wordsOf(f *delegate.Failure) string {
	return netconf.Shorten(strings.ToValidUTF8(f.Said(), "�"), 500)
}

// Interrupted marks the steps of an ADD that may have failed or been interrupted: AddPassed becomes
// AddUnknown.
func Interrupted(steps []journal.Step) {
	for i := range steps {
		if steps[i].ADD == journal.AddPassed {
			steps[i].ADD = journal.AddUnknown
		}
	}
}

// dropCached removes a record's ADD from libcni's cache. If that fails, unwind deletes the record
// anyway: if the runtime sends a DEL later, a delegate still gets only addresses that certainly
// belong to the attachment (see decide.Gets).
func (w *Worker) dropCached(e *journal.Record) {
	c, err := w.Node.CachedOf(e)
	if c != nil && err == nil {
		err = os.Remove(c.Path)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		w.Node.Log.Warn("cannot remove a released attachment from libcni's cache", "attachment",
			e.Key.String(), "err", err)
	}
}
