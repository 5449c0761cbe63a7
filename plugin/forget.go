package plugin

import (
	"context"
	"errors"
	"fmt"

	"github.com/containernetworking/cni/pkg/skel"

	"cni-unwind/journal"
)

// Forget gives up an attachment that is dead, with the DELs that it owes: none is run, and what its delegates took stays
// where it is. It is for what can never heal, such as a plugin that is gone for good. The history keeps it, and a tombstone
// has the runtime's DEL succeed, if it comes. An entry that is damaged can be forgotten too.
//
// What is not dead is refused: its DEL would find nothing to go by.
func (p *Plugin) Forget(ctx context.Context, stateDir string, key journal.Key) error {
	conf := defaultConf()
	conf.StateDir = stateDir
	o, closeLog := p.newOp(ctx, &skel.CmdArgs{}, conf)
	defer closeLog()
	lock, err := o.store.TryAcquire(key)
	if errors.Is(err, journal.ErrBusy) {
		return fmt.Errorf("%s: %s", key, reasonLocked)
	}
	if err != nil {
		return err
	}
	defer lock.Release()
	made := lock.Made()
	err = o.update(ctx, func(tx *journal.Tx) error {
		o.notes = nil // this may run twice
		e, err := tx.Get(key)
		var damaged *journal.DamagedError
		switch {
		case errors.As(err, &damaged):
			e = &journal.Entry{Key: key, Generations: []journal.Generation{{}}}
		case err != nil:
			return err
		case e == nil:
			return fmt.Errorf("the journal has no %s", key)
		default:
			if v := decide(o.gather(e, lock)); !v.ends() {
				return fmt.Errorf("%s is not dead but %s (%s); only what is dead can be forgotten", key, v.fate, v.reason)
			}
		}
		event := eventOf(journal.Forgotten, e)
		event.Reason, event.Plugins = "a person gave it up", pendingSteps(e)
		o.tell(event)
		tomb := o.tombstone(e)
		tomb.Reason = event.Reason
		return errors.Join(tx.Delete(key), tx.Bury(*tomb))
	})
	if err == nil || made {
		err = errors.Join(err, lock.Forget())
	}
	return err
}
