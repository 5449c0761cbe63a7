package plugin

import (
	"context"
	"errors"

	"cni-unwind/journal"
)

// settle undoes another attachment, if it is dead, and writes what is left of it. It returns nil if nothing is left. The
// wait for its lock is bounded by ctx: we hold a lock ourselves.
func (o *op) settle(ctx context.Context, key journal.Key) error {
	lock, killed, err := o.lock(ctx, key)
	if err != nil {
		return err
	}
	defer lock.Release()
	var e *journal.Entry
	err = o.store.View(ctx, func(tx *journal.Tx) (err error) {
		e, err = tx.Get(key)
		return err
	})
	if err != nil {
		return err
	}
	if e == nil {
		return lock.Forget()
	}
	v := o.judge(e, lock)
	if !v.dead {
		if lock.Made() {
			_ = lock.Forget() // as it was
		}
		return errors.New(v.reason)
	}
	if killed {
		markKilled(e, o.conf.GracePeriod)
	}
	o.log.Info("settling an attachment that is dead", "attachment", key.String(), "reason", v.reason)
	if err := o.begin(ctx, e, v.reason); err != nil {
		return err
	}
	tomb := o.tombstone(e)
	failures := o.undo(ctx, lock, e, "")
	if err := o.finish(ctx, lock, e, tomb); err != nil {
		return err
	}
	if len(failures) > 0 {
		return failures[0]
	}
	return nil
}

// begin writes that a pass over the entry's steps begins, and why.
func (o *op) begin(ctx context.Context, e *journal.Entry, reason string) error {
	return o.store.Update(ctx, func(tx *journal.Tx) error { return mark(tx, e, reason) })
}

func mark(tx *journal.Tx, e *journal.Entry, reason string) error {
	switch e.State {
	case journal.Adding:
		e.State = journal.Unwinding
	case journal.Live:
		e.State = journal.Removing
	}
	e.Reason = reason
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
	err := o.store.Update(ctx, func(tx *journal.Tx) error {
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
