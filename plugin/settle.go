package plugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/internal/delegate"
	"cni-unwind/plugin/internal/verdict"
)

// releaseIfDead undoes another attachment, if it is dead, and writes what is left of it. It returns
// nil if nothing is left. ctx bounds the wait for its lock, since the caller holds a lock itself.
func (o *op) releaseIfDead(ctx context.Context, key journal.Key) error {
	lock, killed, err := o.lock(ctx, key)
	if err != nil {
		return err
	}
	defer lock.Release()
	f := Finding{Key: key}
	o.releaseLocked(ctx, lock, killed, &f)
	switch {
	case f.Released:
		return nil
	case f.Err != nil:
		return f.Err
	}
	return errors.New(f.Reason.Text)
}

// releaseLocked is releaseIfDead with the attachment's lock taken. It decides on what the journal
// says now. killed names the delegates that held the lock and that unwind had to kill.
func (o *op) releaseLocked(ctx context.Context, lock *journal.Lock, killed []string, f *Finding) {
	var e *journal.Entry
	f.Err = o.store.View(ctx, func(tx *journal.Tx) (err error) {
		e, err = tx.Get(f.Key)
		return err
	})
	if f.Err != nil {
		return
	}
	if e == nil {
		f.Released, f.Err = true, lock.Remove()
		return
	}
	v := verdict.Decide(o.gather(ctx, e, lock))
	f.Pod, f.State, f.Fate, f.Reason = e.Pod, e.State, v.Fate, v.Reason
	if !v.Releasable() {
		if lock.Made() {
			_ = lock.Remove() // restores the state before
		}
		return
	}
	markKilled(e, killed, o.gracePeriod(e))
	if e.State == journal.Live || e.State == journal.Adding {
		o.log.Info("releasing an attachment", "attachment", f.Key.String(), "verdict", string(v.Fate), "reason", v.Reason.Text)
	}
	if v.Fate == verdict.Foreign {
		f.Err = o.purge(ctx, lock, e, v.Reason)
	} else {
		f.Err = o.undoDead(ctx, lock, e, v.Reason)
	}
	f.Pending, f.failing = pendingSteps(e), failingPlugins(e)
	f.Released = f.Err == nil && len(f.Pending) == 0
	if f.Released {
		o.log.Info("released", "attachment", f.Key.String(), "reason", v.Reason.Text)
	}
}

// undoDead runs the DELs of a dead attachment. The recorded reason why its ADD failed, or was cut
// off, stays.
func (o *op) undoDead(ctx context.Context, lock *journal.Lock, e *journal.Entry, reason verdict.Reason) error {
	if e.State == journal.Unwinding {
		reason = verdict.Recorded(cmp.Or(e.Cause, reason.Code), cmp.Or(e.Reason, reason.Text))
	}
	o.takeCached(e)
	if err := o.begin(ctx, e, reason); err != nil {
		return err
	}
	tomb := o.tombstone(e)
	event := eventOf(journal.Swept, e)
	failures := o.undo(ctx, lock, e, "")
	o.recordRelease(event, e, reason)
	if err := o.finish(ctx, lock, e, tomb); err != nil {
		o.events = nil // the journal does not have it as released; the next sweep reports it
		return err
	}
	if len(failures) > 0 {
		return failures[0]
	}
	return nil
}

// purge releases what host-local keeps for an attachment on this disk, and abandons the rest.
func (o *op) purge(ctx context.Context, lock *journal.Lock, e *journal.Entry, reason verdict.Reason) error {
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
	e.Cause, e.Reason = reason.Code, reason.Text
	tomb, event := o.tombstone(e), eventOf(journal.Swept, e)
	e.Generations = nil
	before := o.events
	o.recordRelease(event, e, reason)
	err := o.finish(ctx, lock, e, tomb)
	if err != nil && len(o.events) > 0 {
		o.events = before
	}
	return err
}

// recordRelease records that an attachment was released in full without the runtime's DEL.
func (o *op) recordRelease(event journal.Event, e *journal.Entry, reason verdict.Reason) {
	if len(e.Generations) == 0 {
		event.Reason = reason.Text
		o.recordEvent(event, CountSwept, reason.Label())
	}
}

// begin records that a pass over the entry's steps begins, and why.
func (o *op) begin(ctx context.Context, e *journal.Entry, reason verdict.Reason) error {
	return o.update(ctx, func(tx *journal.Tx) error {
		o.mark(e, reason) // not before: an ADD may go on without the journal, and needs the entry as it was
		return tx.Put(e)
	})
}

// mark notes in an entry that a pass over its steps begins, and why. It says whether it found claims
// that the journal does not have: they must be on record before the first DEL.
func (o *op) mark(e *journal.Entry, reason verdict.Reason) (found bool) {
	found = o.claimHeld(e)
	asked := e.Key == o.key && reason == verdict.Requested // the plain chain runs that DEL too
	switch e.State {
	case journal.Adding:
		e.State = journal.Unwinding
		g := e.Newest()
		for i := range g.Steps {
			g.Steps[i].ADD = journal.AddCutOff
		}
	case journal.Live:
		e.State = journal.Removing
		if g := e.Newest(); asked && o.neverAdded() { // unwind may have been killed after its first result
			for i := 1; i < len(g.Steps); i++ {
				g.Steps[i].ADD = journal.AddCutOff
			}
		}
	}
	if e.Reason == "" || !verdict.Recorded(e.Cause, e.Reason).Is(reason) { // else the recorded text may say more
		e.Reason = reason.Text
	}
	e.Cause = reason.Code
	for i := range e.Generations {
		g := &e.Generations[i]
		for j := range g.Steps {
			s := &g.Steps[j]
			s.MayHaveRun = !asked && (s.MayHaveRun || s.Attempts == 0 && g.Begun)
		}
		g.Begun = true
	}
	return found
}

// markAfter is how long a pass may take before the journal has to know that it began: a pass that is
// cut off later than this does not begin with the same delegate again.
const markAfter = 500 * time.Millisecond

// undoUnmarked is undo for an entry whose mark is not on record. It writes the mark once the pass
// takes longer than markAfter; most end before, with one transaction.
func (o *op) undoUnmarked(ctx context.Context, lock *journal.Lock, e *journal.Entry, cniNetns string) []*delegate.Failure {
	if o.unwritable {
		return o.undo(ctx, lock, e, cniNetns)
	}
	marked, done := e.Clone(), make(chan struct{})
	for i := range marked.Generations {
		marked.Generations[i].Begun = true
	}
	timer := time.AfterFunc(markAfter, func() {
		defer close(done)
		err := o.store.Update(context.WithoutCancel(ctx), func(tx *journal.Tx) error { return tx.Put(marked) })
		if err != nil {
			o.log.Debug("the journal cannot be told that a DEL began", "attachment", marked.Key.String(), "err", err)
		}
	})
	defer func() {
		if !timer.Stop() {
			<-done
		}
	}()
	return o.undo(ctx, lock, e, cniNetns)
}

// finish writes what a pass left of an entry. If nothing is left, it deletes the entry and puts the
// tombstone, if any, in its place: the runtime's own DEL is still to come.
func (o *op) finish(ctx context.Context, lock *journal.Lock, e *journal.Entry, tomb *journal.Tombstone) error {
	err := o.update(context.WithoutCancel(ctx), func(tx *journal.Tx) error {
		if len(e.Generations) > 0 {
			return tx.Put(e)
		}
		if err := tx.Delete(e.Key); err != nil || tomb == nil {
			return err
		}
		return tx.PutTombstone(*tomb)
	})
	if err == nil && len(e.Generations) == 0 && lock != nil {
		err = lock.Remove()
	}
	return err
}

// tombstone returns the tombstone of an entry that is released without the runtime's DEL.
func (o *op) tombstone(e *journal.Entry) *journal.Tombstone {
	return &journal.Tombstone{Key: e.Key, NetNS: e.Newest().NetNS, Reason: e.Reason, BootID: o.host.BootID,
		Interfaces: append(interfacesOf(e), e.Undone...), NoResult: e.State == journal.Unwinding}
}

// replayParked runs pending DELs of other attachments for addresses that have become free: those
// that were parked, and those that failed.
func (o *op) replayParked(ctx context.Context, freed []netip.Addr) {
	ctx, cancel := context.WithTimeout(ctx, o.Budgets.Release)
	defer cancel()
	for _, address := range freed {
		for _, other := range o.othersWith(ctx, o.key, address) {
			if other.State == journal.Live || !o.readyToRetry(ctx, other, true) {
				continue
			}
			if other.State == journal.Adding && !o.judge(ctx, other).Releasable() {
				continue // its ADD may be waiting for this DEL, see claim
			}
			if err := o.releaseIfDead(ctx, other.Key); err != nil {
				o.log.Debug("left for later", "attachment", other.Key.String(), "err", err)
			}
		}
	}
}
