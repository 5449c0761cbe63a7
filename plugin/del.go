package plugin

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/undo"
)

// del runs a DEL.
//
//  1. Take the attachment's lock. If an ADD of the attachment still runs, end it, because the
//     runtime that started it is dead.
//  2. Find the entries to undo. If only a tombstone (an undone record) of this ADD exists, there is
//     nothing to do. If the journal does not have this ADD, create an entry from the chain on
//     stdin. Write the newest entry if it has changed.
//  3. Undo the entry, and write the DELs that are still pending.
//
// No error in the journal or in the configuration stops a pod's DEL. After a crash, the entry still
// contains every DEL that may not have run.
func (o *op) del(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), o.Budgets.Undo)
	defer cancel()
	if o.bad != nil {
		o.log.Warn("ignoring invalid configuration keys; their defaults apply", "err", o.bad)
	}
	d := &deleting{op: o}
	killed, err := d.takeLock(ctx, d.Stop(d.Key),
		func(err error) error { d.degrade("DEL", err); return nil })
	if err != nil {
		return err
	}
	defer d.lock.Release()
	if err := d.find(ctx, killed); err != nil || d.entry == nil {
		return err
	}
	failures, durable := d.undo(ctx)
	return d.report(failures, durable)
}

// find sets d.entry to the entry to undo, or to nil if there is nothing to undo. It uses the
// journal's records, or else the runtime's input.
func (d *deleting) find(ctx context.Context, killed []string) error {
	d.lookAtPath(ctx)
	d.fromJournal(ctx, killed)
	if d.entry != nil {
		return nil
	}
	if done := d.answered(); done != nil {
		d.succeedIdle(cmp.Or(done.Undo.Reason, "already released"), nil, done.Undo.Failed)
		return nil
	}
	if err := d.fromStdin(); err != nil || d.entry == nil || d.Journal.Unwritable {
		return err
	}
	if err := d.Begin(ctx, d.entry, undo.Requested, decide.Requested); err != nil {
		d.log.Error("cannot record the start of a DEL", "err", err)
	}
	return nil
}

// fromJournal reads the attachment's records. If it changes the newest one, it writes that record
// before any DEL runs. Otherwise, if unwind is killed after the address is free, the next pass
// would not know the claims. fromJournal also writes the record first if an IPAM plugin stores
// addresses outside the node, because the DEL of such a plugin must not simply run again (see
// decide.Due).
func (d *deleting) fromJournal(ctx context.Context, killed []string) {
	err := d.Journal.Renew(ctx)
	if errors.Is(err, journal.ErrDamaged) {
		err = d.Journal.Store.Update(ctx, d.Journal.Look) // starts a new journal
	}
	if err != nil {
		d.degrade("DEL", err)
	}
	records, _ := d.Journal.Snapshot(ctx).Records(d.Key) // the DEL deletes a damaged one
	for _, e := range records {
		switch e = e.Clone(); {
		case e.Undo.State == journal.Undone:
			d.undone = append(d.undone, e)
		case d.entry == nil:
			d.entry = e
		default:
			d.older = append(d.older, e)
		}
	}
	if d.entry == nil {
		return
	}
	changed := d.MarkKilled(d.entry, killed)
	changed = d.addUnrecorded() || d.complete() || changed
	changed = d.Mark(d.entry, undo.Requested, decide.Requested) || changed
	for _, e := range d.older {
		if e.Undo.State == journal.Live || e.Undo.State == journal.Adding {
			d.Mark(e, undo.Requested, decide.Requested)
		}
	}
	if (changed || keptElsewhere(d.entry)) && !d.Journal.Unwritable {
		if err := d.Journal.Save(ctx, d.entry); err != nil {
			d.degrade("DEL", err)
		}
	}
}

// keptElsewhere reports whether a step's IPAM plugin stores its addresses outside the node.
func keptElsewhere(e *journal.Entry) bool {
	return slices.ContainsFunc(e.Undo.Steps,
		func(s journal.Step) bool { return known.IPAMOf(s.Config).Elsewhere })
}

// answered returns the undone record of the ADD that the runtime's DEL refers to, or nil. It is nil
// if host-local has assigned an address to the attachment again, or if the record's ADD failed and
// the runtime has a result. An operator's decision to forget the attachment stands.
func (d *deleting) answered() *journal.Entry {
	i := slices.IndexFunc(d.undone, d.isOf)
	if i < 0 {
		return nil
	}
	done := d.undone[i]
	if !done.Undo.Abandoned && (done.Undo.Failed && d.Conf.PrevResult != nil || d.holdsAddress()) {
		return nil
	}
	return done
}

// holdsAddress reports whether host-local has assigned an address to the attachment.
func (d *deleting) holdsAddress() bool {
	chain, err := d.Chain()
	if err != nil {
		return false
	}
	return slices.ContainsFunc(sweep.PoolsOf(chain, d.Conf), func(p sweep.Pool) bool {
		held, err := ipam.HeldBy(p.Dir, d.Key.ContainerID, d.Key.IfName)
		return err == nil && len(held) > 0
	})
}

// undo undoes the records, newest first, and writes the DELs that are still pending. durable
// reports whether the journal contains all pending DELs.
func (d *deleting) undo(ctx context.Context) (failures []*delegate.Failure, durable bool) {
	durable = true
	ran, later := 0, 0
	for _, e := range d.older {
		later += len(e.Undo.Steps)
	}
	for _, e := range append([]*journal.Entry{d.entry}, d.older...) {
		job := undo.Job{Entry: e, Mode: undo.Requested, Lock: d.lock}
		if d.isOf(e) {
			job.Netns = d.args.Netns
		}
		if e != d.entry {
			later -= len(e.Undo.Steps)
		}
		job.Later = later
		failed, n := d.Run(ctx, job)
		failures, ran = append(failures, failed...), ran+n
		err := d.Finish(ctx, job)
		if err != nil {
			d.Journal.Degraded("DEL", err)
			d.log.Error("cannot record the outcome of a DEL; a later pass may run it again", "err", err)
		}
		durable = durable && err == nil && !d.Journal.Unwritable
	}
	if ran == 0 && len(failures) == 0 && len(d.entry.Undo.Steps) > 0 {
		d.noteIdle("pending: "+strings.Join(undo.PendingSteps(d.entry), ", "), nil, false)
	}
	return failures, durable
}

// report returns the error for the runtime. It omits the failure of a DEL that would not have run
// without unwind.
func (d *deleting) report(failures []*delegate.Failure, durable bool) error {
	if durable {
		failures = slices.DeleteFunc(failures, func(f *delegate.Failure) bool {
			if f.PutRight {
				d.log.Warn("a DEL failed and stays pending, but the runtime gets no error: the "+
					"plugin's ADD had also failed, and its configuration is no longer in the chain",
					"plugin", f.Plugin, "code", f.Code)
			}
			return f.PutRight
		})
	}
	if len(failures) == 0 || d.Conf.OnDelFailure == "defer" && durable {
		return nil
	}
	return delError(d.Key, failures, durable)
}
