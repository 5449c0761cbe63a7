package plugin

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/internal/delegate"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/record"
	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/tristate"
	"cni-unwind/plugin/undo"
)

// del runs a DEL.
//
//  1. Take the attachment's lock.
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
	killed, err := d.takeLock(ctx, func(err error) error { d.degrade("DEL", err); return nil })
	if err != nil {
		return err
	}
	defer d.lock.Release()
	defer d.w.Runner.Drop()
	if err := d.find(ctx, killed); err != nil || d.entry == nil {
		return err
	}
	d.w.StartFirst(d.lock, d.entry)
	failures, durable := d.undo(ctx)
	return d.report(failures, durable)
}

// find sets d.entry to what has to be undone, or nil for nothing. It uses the entry of the journal,
// else a tombstone, else what the runtime sends.
func (d *deleting) find(ctx context.Context, killed []string) error {
	tomb := d.fromJournal(ctx, killed)
	if d.entry != nil {
		return nil
	}
	if tomb != nil && d.answers(ctx, tomb) {
		d.succeedIdle(cmp.Or(tomb.Reason, "already released"), nil, tomb.NoResult)
		return nil
	}
	if err := d.fromStdin(); err != nil || d.entry == nil || d.rec.Unwritable {
		return err
	}
	if err := d.w.Begin(ctx, d.entry, alive.Requested); err != nil {
		d.log.Error("cannot record the start of a DEL", "err", err)
	}
	return nil
}

// fromJournal sets d.entry to the journal's entry, or returns the tombstone in its place. It writes
// the entry first if the pass changes it; otherwise a kill after the address is free would leave
// the next pass without the claims. It also writes it first for an IPAM plugin whose DEL must not
// run again unasked: see freesByContainer.
func (d *deleting) fromJournal(ctx context.Context, killed []string) (tomb *journal.Tombstone) {
	look := func(tx *journal.Tx) (err error) {
		switch d.entry, err = record.Readable(tx.Get(d.key)); {
		case err != nil:
		case d.entry == nil:
			tomb, err = tx.Tombstone(d.key)
		default:
			if d.others, err = undo.Others(tx, d.key, d.entry.Addresses()); err != nil {
				d.others, err = nil, nil // the pass looks again
			}
		}
		return err
	}
	err := d.rec.Store.View(ctx, look)
	if errors.Is(err, journal.ErrDamaged) {
		err = d.rec.Update(ctx, look) // begins a new one
	}
	if err != nil {
		d.degrade("DEL", err)
	}
	if d.entry == nil {
		return tomb
	}
	amended := d.amend(killed)
	found := d.w.Mark(d.entry, alive.Requested)
	if amended || found {
		d.others = nil // there may be more
	}
	if (amended || found || keptElsewhere(d.entry)) && !d.rec.Unwritable {
		if err := d.rec.Save(ctx, d.entry); err != nil {
			d.degrade("DEL", err)
		}
	}
	return nil
}

// keptElsewhere says whether a step's IPAM plugin keeps its addresses on another machine.
func keptElsewhere(e *journal.Entry) bool {
	return slices.ContainsFunc(e.Generations, func(g journal.Generation) bool {
		return slices.ContainsFunc(g.Steps,
			func(s journal.Step) bool { return known.IPAMOf(s.Config).Elsewhere })
	})
}

// answers reports whether a tombstone covers the DEL, that is, whether it is for the ADD that the
// runtime means. It is not if the runtime has another result than those undone, or if something
// that was undone exists again: an address that host-local assigned to the attachment, or its
// interface.
func (d *deleting) answers(ctx context.Context, tomb *journal.Tombstone) bool {
	given := d.given()
	if given.Known() && len(tomb.Interfaces) > 0 &&
		alive.AnySameADD(tomb.Interfaces, given) == tristate.No {
		return false
	}
	if tomb.Abandoned {
		return true
	}
	if tomb.NoResult && d.conf.PrevResult != nil || d.holdsAddress() {
		return false
	}
	seen, err := host.Look(d.args.Netns, d.key.IfName)
	if err != nil || !seen.There() {
		return true
	}
	ours := tomb.BootID == d.node.Host.BootID && seen.Netns.Same(tomb.NetNS) || seen.Is(given)
	return !ours || d.node.IsHost(seen.Netns) || d.node.Anothers(ctx, d.key, seen)
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

// undo undoes the entry, writes what is left, and runs the DELs that were parked for one of its
// addresses. durable reports whether the journal has what is left.
func (d *deleting) undo(ctx context.Context) (failures []*delegate.Failure, durable bool) {
	job := undo.Job{Entry: d.entry, Lock: d.lock, Netns: d.args.Netns, Others: d.others}
	freed := d.entry.Addresses()
	failures = d.w.RunUnmarked(ctx, job)
	if !d.rec.Unwritable {
		others, err := d.w.Finish(ctx, job, nil, freed...)
		if err == nil {
			d.w.ReplayParked(ctx, others)
			return failures, true
		}
		d.rec.Degraded("DEL", err)
		d.log.Error("cannot record the outcome of a DEL", "err", err)
	}
	d.w.ReplayFreed(ctx, freed)
	return failures, false
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
	return delError(failures, durable)
}
