package plugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"cni-unwind/ipam"
	"cni-unwind/journal"
)

// Finding is what was found of an attachment, or of a reservation of host-local that no attachment in the journal has, and
// what came of it.
type Finding struct {
	journal.Key
	Address  netip.Addr // of a reservation; its owner, as far as it has one, is the Key's
	Pod      journal.Pod
	State    journal.State // as it was
	Fate     Fate
	Reason   string
	Busy     bool     // it is being worked on: live for now
	Waits    bool     // it is dead, and it is not yet time for the next try
	Released bool     // nothing of it is left
	Pending  []string // the delegates that are still owed a DEL, each with why
	Err      error    // what kept it from being released

	evidence evidence
	thisBoot bool // it was made in this boot
	orphaned bool // delegates that outlived their unwind hold its lock
}

// Ends says whether the attachment is to be released.
func (f *Finding) Ends() bool { return f.Fate == Dead || f.Fate == Foreign }

// settle undoes another attachment, if it is dead, and writes what is left of it. It returns nil if nothing is left. The
// wait for its lock is bounded by ctx: we hold a lock ourselves.
func (o *op) settle(ctx context.Context, key journal.Key) error {
	lock, killed, err := o.lock(ctx, key)
	if err != nil {
		return err
	}
	defer lock.Release()
	f := Finding{Key: key}
	o.settleLocked(ctx, lock, killed, &f)
	switch {
	case f.Released:
		return nil
	case f.Err != nil:
		return f.Err
	}
	return errors.New(f.Reason)
}

// settleLocked is settle with the attachment's lock taken. What it decides, it decides on what the journal says now. killed
// says that delegates which held the lock had to be ended.
func (o *op) settleLocked(ctx context.Context, lock *journal.Lock, killed bool, f *Finding) {
	var e *journal.Entry
	f.Err = o.store.View(ctx, func(tx *journal.Tx) (err error) {
		e, err = tx.Get(f.Key)
		return err
	})
	if f.Err != nil {
		return
	}
	if e == nil {
		f.Released, f.Err = true, lock.Forget()
		return
	}
	v := decide(o.gather(e, lock))
	f.Pod, f.State, f.Fate, f.Reason = e.Pod, e.State, v.fate, v.reason
	switch {
	case !v.ends():
		if lock.Made() {
			_ = lock.Forget() // as it was
		}
		return
	case killed:
		markKilled(e, o.conf.GracePeriod)
	}
	if e.State == journal.Live || e.State == journal.Adding {
		o.log.Info("releasing an attachment", "attachment", f.Key.String(), "verdict", string(v.fate), "reason", v.reason)
	}
	if v.fate == Foreign {
		f.Err = o.purge(ctx, lock, e, v.reason)
	} else {
		f.Err = o.replay(ctx, lock, e, v.reason)
	}
	f.Pending = pendingSteps(e)
	f.Released = f.Err == nil && len(f.Pending) == 0
	if f.Released {
		o.log.Info("released", "attachment", f.Key.String(), "reason", v.reason)
	}
}

// replay runs the DELs of an attachment that is dead. Why its ADD failed, or was cut off, stays on record.
func (o *op) replay(ctx context.Context, lock *journal.Lock, e *journal.Entry, reason string) error {
	if e.State == journal.Unwinding {
		reason = cmp.Or(e.Reason, reason)
	}
	if err := o.begin(ctx, e, reason); err != nil {
		return err
	}
	tomb := o.tombstone(e)
	event := eventOf(journal.Swept, e)
	failures := o.undo(ctx, lock, e, "")
	o.tellReleased(event, e, reason)
	if err := o.finish(ctx, lock, e, tomb); err != nil {
		o.notes = nil // it is not released by the journal, whose next sweep will tell
		return err
	}
	if len(failures) > 0 {
		return failures[0]
	}
	return nil
}

// purge releases what host-local keeps for an attachment on this disk, and forgets the rest of it.
func (o *op) purge(ctx context.Context, lock *journal.Lock, e *journal.Entry, reason string) error {
	var pools []string
	for _, g := range e.Generations {
		for _, step := range g.Steps {
			pools = append(pools, ipam.Pool(step.Config, e.Network))
		}
		for _, c := range g.Claims {
			pools = append(pools, c.Pool)
		}
	}
	slices.Sort(pools)
	for _, pool := range slices.Compact(pools) {
		if pool == "" {
			continue
		}
		if err := ipam.Release(ctx, pool, e.ContainerID, e.IfName); err != nil {
			return fmt.Errorf("pool %s: %w", pool, err)
		}
	}
	e.Reason = reason
	tomb, event := o.tombstone(e), eventOf(journal.Swept, e)
	e.Generations = nil
	before := o.notes
	o.tellReleased(event, e, reason)
	err := o.finish(ctx, lock, e, tomb)
	if err != nil && len(o.notes) > 0 {
		o.notes = before
	}
	return err
}

// tellReleased notes that nothing is left of an attachment that was released without the runtime's DEL.
func (o *op) tellReleased(event journal.Event, e *journal.Entry, reason string) {
	if len(e.Generations) == 0 {
		event.Reason = reason
		o.tell(event, CountSwept, cause(reason))
	}
}

// begin writes that a pass over the entry's steps begins, and why.
func (o *op) begin(ctx context.Context, e *journal.Entry, reason string) error {
	return o.update(ctx, func(tx *journal.Tx) error { return o.mark(tx, e, reason) })
}

func (o *op) mark(tx *journal.Tx, e *journal.Entry, reason string) error {
	o.claimHeld(e)
	switch e.State {
	case journal.Adding:
		e.State = journal.Unwinding
	case journal.Live:
		e.State = journal.Removing
	}
	if !strings.HasPrefix(e.Reason, reason) { // what is on record may say more
		e.Reason = reason
	}
	for i := range e.Generations {
		e.Generations[i].Undo.Began++
	}
	return tx.Put(e)
}

// finish writes what a pass left of an entry. If nothing is left the entry goes, and the tombstone, if there is one, takes
// its place: the runtime's own DEL is still to come.
func (o *op) finish(ctx context.Context, lock *journal.Lock, e *journal.Entry, tomb *journal.Tombstone) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), journal.MaxWait)
	defer cancel()
	err := o.update(ctx, func(tx *journal.Tx) error {
		if len(e.Generations) > 0 {
			return tx.Put(e)
		}
		if err := tx.Delete(e.Key); err != nil || tomb == nil {
			return err
		}
		return tx.Bury(*tomb)
	})
	if err == nil && len(e.Generations) == 0 && lock != nil {
		err = lock.Forget()
	}
	return err
}

// tombstone returns what is left of an entry if it is settled now, without the runtime's DEL.
func (o *op) tombstone(e *journal.Entry) *journal.Tombstone {
	return &journal.Tombstone{Key: e.Key, NetNS: e.Newest().NetNS, Reason: e.Reason, BootID: o.host.BootID}
}
