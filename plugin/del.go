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
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/tristate"
	"cni-unwind/plugin/undo"
)

// del runs a DEL.
//
//  1. Take the attachment's lock. An ADD of it that still runs is ended: its runtime is dead.
//  2. Find what to undo: the entry; or nothing, if a tombstone shows that everything is already
//     undone; or the chain on stdin, if the journal has no such attachment. Write the entry, unless
//     the journal already has it in this form.
//  3. Undo, and write what is left, if anything.
//  4. Run the DELs of other attachments that were parked for an address of this one.
//
// No error of the journal or of the configuration keeps a pod from its DEL.
func (o *op) del(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), o.Budgets.Undo)
	defer cancel()
	if o.bad != nil {
		o.log.Warn("invalid keys ignored, using defaults", "err", o.bad)
	}
	d := &deleting{op: o}
	d.w.Verb.DEL = true
	killed, err := d.takeLock(ctx, func(err error) error { d.degrade("DEL", err); return nil })
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

// find sets d.entry to what has to be undone, or nil for nothing. It uses the journal's records,
// else what the runtime sends.
func (d *deleting) find(ctx context.Context, killed []string) error {
	d.fromJournal(ctx, killed)
	if d.entry != nil {
		return nil
	}
	if done := d.answered(ctx); done != nil {
		d.succeedIdle(cmp.Or(done.Reason, "already released"), nil, done.Failed)
		return nil
	}
	if err := d.fromStdin(); err != nil || d.entry == nil || d.rec.Unwritable {
		return err
	}
	if err := d.w.Begin(ctx, d.entry, decide.Requested); err != nil {
		d.log.Error("cannot record the start of a DEL", "err", err)
	}
	return nil
}

// fromJournal reads the attachment's records. It writes the newest first if the pass changes it;
// otherwise a kill after the address is free would leave the next pass without the claims. It also
// writes it first for an IPAM plugin whose DEL must not run again unasked: see decide.Due.
func (d *deleting) fromJournal(ctx context.Context, killed []string) {
	look := func(tx *journal.Tx) error {
		d.entry, d.older, d.undone = nil, nil, nil
		records, err := tx.Records(d.key)
		for _, e := range records {
			switch {
			case e.State == journal.Undone:
				d.undone = append(d.undone, e)
			case d.entry == nil:
				d.entry = e
			default:
				d.older = append(d.older, e)
			}
		}
		if d.entry != nil {
			d.others, _ = undo.Others(tx, d.key, d.entry.Addresses()) // else the pass looks again
		}
		return journal.IgnoreDamaged(err)
	}
	err := d.rec.Store.View(ctx, look)
	if errors.Is(err, journal.ErrDamaged) {
		err = d.rec.Update(ctx, look) // begins a new one
	}
	if err != nil {
		d.degrade("DEL", err)
	}
	if d.entry == nil {
		return
	}
	amended := d.amend(killed)
	found := d.w.Mark(d.entry, decide.Requested)
	for _, e := range d.older {
		if e.State == journal.Live || e.State == journal.Adding {
			d.w.Mark(e, decide.Requested)
		}
	}
	if amended || found {
		d.others = nil // there may be more
	}
	if (amended || found || keptElsewhere(d.entry)) && !d.rec.Unwritable {
		if err := d.rec.Save(ctx, d.entry); err != nil {
			d.degrade("DEL", err)
		}
	}
}

// keptElsewhere says whether a step's IPAM plugin keeps its addresses on another machine.
func keptElsewhere(e *journal.Entry) bool {
	return slices.ContainsFunc(e.Steps,
		func(s journal.Step) bool { return known.IPAMOf(s.Config).Elsewhere })
}

// answered returns the undone record of the ADD that the runtime means, or nil. It is nil if the
// runtime has another result than those undone, or if something that was undone exists again: an
// address that host-local assigned to the attachment, or its interface.
func (d *deleting) answered(ctx context.Context) *journal.Entry {
	given := d.given()
	i := slices.IndexFunc(d.undone, func(e *journal.Entry) bool {
		return !given.Known() || facts.SameADD(e.Interface, given) != tristate.No
	})
	if i < 0 {
		return nil
	}
	done := d.undone[i]
	if done.Abandoned {
		return done
	}
	if done.Failed && d.conf.PrevResult != nil || d.holdsAddress() {
		return nil
	}
	seen, err := facts.Look(d.args.Netns, d.key.IfName)
	if err != nil || !seen.There() {
		return done
	}
	ours := done.Host.BootID == d.node.Host.BootID && seen.Netns.Same(done.NetNS) || seen.Is(given)
	if !ours || d.node.IsHost(seen.Netns) || d.node.Anothers(ctx, d.key, seen) {
		return done
	}
	return nil
}

// holdsAddress says whether host-local has given an address to the attachment.
func (d *deleting) holdsAddress() bool {
	chain, err := d.w.Verb.Chain()
	if err != nil {
		return false
	}
	return slices.ContainsFunc(sweep.PoolsOf(chain, d.conf), func(p sweep.Pool) bool {
		held, err := ipam.HeldBy(p.Dir, d.key.ContainerID, d.key.IfName)
		return err == nil && len(held) > 0
	})
}

// undo undoes the records, newest first, writes what is left, and runs the DELs of others that
// wait for one of the addresses. durable reports whether the journal has what is left.
func (d *deleting) undo(ctx context.Context) (failures []*delegate.Failure, durable bool) {
	durable = true
	ran, later := 0, 0
	for _, e := range d.older {
		later += len(e.Steps)
	}
	for _, e := range append([]*journal.Entry{d.entry}, d.older...) {
		job := undo.Job{Entry: e, Lock: d.lock}
		if e == d.entry {
			job.Others = d.others
		} else {
			later -= len(e.Steps)
		}
		job.Later = later
		failed, n := d.w.Run(ctx, job)
		failures, ran = append(failures, failed...), ran+n
		others, err := d.w.Finish(ctx, job)
		if err != nil {
			d.rec.Degraded("DEL", err)
			d.log.Error("cannot record the outcome of a DEL", "err", err)
		}
		durable = durable && err == nil && !d.rec.Unwritable
		d.w.RetryWaiting(ctx, others)
	}
	if ran == 0 && len(failures) == 0 && len(d.entry.Steps) > 0 {
		d.noteIdle("pending: "+strings.Join(undo.PendingSteps(d.entry), ", "), nil, false)
	}
	return failures, durable
}

// report returns the error for the runtime. It omits a DEL that the plain chain would not have run.
func (d *deleting) report(failures []*delegate.Failure, durable bool) error {
	if durable {
		failures = slices.DeleteFunc(failures, func(f *delegate.Failure) bool {
			if f.PutRight {
				d.log.Warn("a DEL stays pending without an error for the runtime: its ADD failed too, "+
					"with a configuration that is no longer in the chain", "plugin", f.Plugin, "code", f.Code)
			}
			return f.PutRight
		})
	}
	if len(failures) == 0 || d.conf.OnDelFailure == "defer" && durable {
		return nil
	}
	return delError(d.key, failures, durable)
}
