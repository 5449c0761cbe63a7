package undo

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/record"
)

// Outcome is the result of releasing an attachment.
type Outcome struct {
	Entry    *journal.Entry // the newest ADD as it is now; nil if the journal had none
	State    journal.State  // before
	Verdict  decide.Verdict // under the attachment's lock
	Released bool           // nothing is left
	Err      error          // why something is left, other than the verdict
}

// Release undoes another attachment, if it is dead, and writes what is left of it. It returns nil
// if nothing is left. ctx limits the wait for its lock, because the caller holds a lock itself.
func (w *Worker) Release(ctx context.Context, key journal.Key) error {
	lock, killed, err := w.Lock(ctx, key)
	if err != nil {
		return err
	}
	defer lock.Release()
	out := w.ReleaseLocked(ctx, lock, killed, key)
	switch {
	case out.Released:
		return nil
	case out.Err != nil:
		return out.Err
	}
	return errors.New(out.Verdict.Reason.Text)
}

// ReleaseLocked is Release for a caller that holds the attachment's lock. It decides on the current
// content of the journal. killed names the delegates that held the lock and that unwind had to
// kill. If the newest ADD lives, the DELs of the older ones wait for it.
func (w *Worker) ReleaseLocked(
	ctx context.Context, lock *journal.Lock, killed []string, key journal.Key,
) (out Outcome) {
	var records []*journal.Entry
	out.Err = w.Journal.Store.View(ctx, func(tx *journal.Tx) (err error) {
		records, err = tx.Pending(key)
		return err
	})
	switch {
	case out.Err != nil:
		return out
	case len(records) == 0:
		out.Released, out.Err = true, lock.Remove()
		return out
	}
	out.Entry = records[0]
	out.State, out.Verdict = out.Entry.State, decide.Decide(w.Node.Gather(ctx, out.Entry, lock))
	if !out.Verdict.Releasable() {
		if lock.Made() {
			_ = lock.Remove() // restores the state before
		}
		return out
	}
	w.MarkKilled(out.Entry, killed)
	out.Released = true
	for _, e := range records {
		reason, end := out.Verdict.Reason, w.undoDead
		if e != out.Entry {
			reason = decide.Recorded(e.Cause, e.Reason)
		}
		if e.State == journal.Live || e.State == journal.Adding {
			w.Log.Info("releasing attachment", "attachment", key.String(),
				"verdict", string(out.Verdict.Fate), "reason", reason.Text)
		}
		if out.Verdict.Fate == decide.Foreign {
			end = w.Purge
		}
		err := end(ctx, Job{Entry: e, Lock: lock}, reason)
		out.Err = cmp.Or(out.Err, err)
		out.Released = out.Released && err == nil && len(e.Steps) == 0
	}
	if out.Released {
		w.Log.Info("released", "attachment", key.String(), "reason", out.Verdict.Reason.Text)
	}
	return out
}

// undoDead runs the DELs of a dead ADD. It keeps a recorded reason of a failed or interrupted one.
func (w *Worker) undoDead(ctx context.Context, job Job, reason decide.Reason) error {
	e := job.Entry
	if e.State == journal.RollingBack {
		reason = decide.Recorded(cmp.Or(e.Cause, reason.Code), cmp.Or(e.Reason, reason.Text))
	}
	if err := w.Begin(ctx, e, reason); err != nil {
		return err
	}
	return w.finishRelease(ctx, job, reason, func(ctx context.Context, j Job) []*delegate.Failure {
		failures, _ := w.Run(ctx, j)
		return failures
	})
}

// Purge releases what host-local keeps for an ADD on this disk, and abandons the rest.
func (w *Worker) Purge(ctx context.Context, job Job, reason decide.Reason) error {
	e := job.Entry
	pools := map[string]bool{}
	for _, step := range e.Steps {
		pools[ipam.Pool(step.Config, e.Network)] = true
	}
	for _, c := range e.Claims {
		pools[c.Pool] = true
	}
	delete(pools, "")
	for _, pool := range slices.Sorted(maps.Keys(pools)) {
		owner := ipam.Owner{ContainerID: e.ContainerID, IfName: e.IfName}
		if _, err := ipam.Release(ctx, pool, owner); err != nil {
			return fmt.Errorf("pool %s: %w", pool, err)
		}
	}
	e.Cause, e.Reason = reason.Code, reason.Text
	return w.finishRelease(ctx, job, reason, func(context.Context, Job) []*delegate.Failure {
		e.Steps = nil
		return nil
	})
}

// finishRelease undoes an ADD without the runtime's DEL, and writes what is left. It records the
// release if it is complete.
func (w *Worker) finishRelease(
	ctx context.Context, job Job, reason decide.Reason,
	undo func(context.Context, Job) []*delegate.Failure,
) error {
	drop, event := w.Journal.Undoable(), record.EventOf(journal.Swept, job.Entry)
	failures := undo(ctx, job)
	if len(job.Entry.Steps) == 0 {
		event.Reason = reason.Text
		w.Journal.Event(event, record.CountSwept, reason.Label())
	}
	if _, err := w.Finish(ctx, job, true); err != nil {
		drop() // the journal does not have it as released; the next sweep reports it
		return err
	}
	if len(failures) > 0 {
		return failures[0]
	}
	return nil
}

// RetryWaiting runs the DELs of other attachments that wait or have failed, after addresses have
// become free. others claim one of these addresses.
func (w *Worker) RetryWaiting(ctx context.Context, others []*journal.Entry) {
	ctx, cancel := context.WithTimeout(ctx, w.Budgets.Release)
	defer cancel()
	for _, other := range others {
		if other.State == journal.Live || !w.Ready(ctx, other, true) {
			continue
		}
		if other.State == journal.Adding && !w.Node.Judge(ctx, other).Releasable() {
			continue // its ADD may be waiting for this DEL, see claim
		}
		if err := w.Release(ctx, other.Key); err != nil {
			w.Log.Debug("deferred", "attachment", other.Key.String(), "err", err)
		}
	}
}

// RetryFreed is RetryWaiting for a verb that could not write the journal, but may be able to read
// it.
func (w *Worker) RetryFreed(ctx context.Context, freed []netip.Addr) {
	w.RetryWaiting(ctx, w.othersOf(ctx, w.Verb.Key, freed))
}
