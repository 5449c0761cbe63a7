package plugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/containernetworking/cni/pkg/skel"

	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/record"
	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/undo"
)

// Forget abandons a dead attachment with its pending DELs. It runs no DEL, so whatever the
// delegates took stays allocated. It is for an attachment that can never recover, for instance
// because a plugin was removed for good. The history keeps the attachment, and a tombstone makes a
// later DEL of the runtime succeed. Forget also abandons a damaged entry.
//
// It refuses an attachment that is not dead, because the DEL of that attachment needs the entry.
func (p *Plugin) Forget(ctx context.Context, stateDir string, key journal.Key) error {
	conf := netconf.DefaultConf()
	conf.StateDir = stateDir
	o, closeLog := p.newOp(&skel.CmdArgs{}, conf)
	defer closeLog()
	lock, err := o.rec.Store.TryAcquire(key)
	if errors.Is(err, journal.ErrBusy) {
		return fmt.Errorf("%s: %s", key, alive.Locked.Reason)
	}
	if err != nil {
		return err
	}
	defer lock.Release()
	made, drop := lock.Made(), o.rec.Undoable()
	e, err := o.toForget(ctx, lock, key)
	if err == nil {
		err = o.rec.Update(ctx, func(tx *journal.Tx) error {
			drop() // this may run twice
			event := record.EventOf(journal.Forgotten, e)
			event.Reason, event.Plugins = "given up by an operator", undo.PendingSteps(e)
			o.rec.Event(event)
			tomb := o.w.Tombstone(e)
			tomb.Reason, tomb.Abandoned = event.Reason, true
			return errors.Join(tx.Delete(key), tx.PutTombstone(*tomb))
		})
	}
	if err == nil || made {
		err = errors.Join(err, lock.Remove())
	}
	return err
}

// toForget returns the entry of a dead attachment, or an empty one if the entry is damaged. The
// caller holds the lock, so nobody changes the entry.
func (o *op) toForget(
	ctx context.Context, lock *journal.Lock, key journal.Key,
) (e *journal.Entry, err error) {
	err = o.rec.Store.View(ctx, func(tx *journal.Tx) (err error) {
		e, err = tx.Get(key)
		return err
	})
	var damaged *journal.DamagedError
	switch {
	case errors.As(err, &damaged):
		return &journal.Entry{Key: key, Generations: []journal.Generation{{}}}, nil
	case err != nil:
		return nil, err
	case e == nil:
		return nil, fmt.Errorf("%s is not in the journal", key)
	}
	if v := alive.Decide(o.node.Gather(ctx, e, lock)); !v.Releasable() {
		return nil, fmt.Errorf("%s is %s, not dead (%s); only a dead attachment can be forgotten", key,
			v.Fate, v.Reason)
	}
	return e, nil
}

// Sweep searches the journal in a state directory: see sweep.Sweep.
func (p *Plugin) Sweep(
	ctx context.Context, stateDir string, job sweep.Job,
) ([]sweep.Finding, error) {
	conf := netconf.DefaultConf()
	conf.StateDir, conf.LogLevel = stateDir, slog.LevelWarn
	o, closeLog := p.newOp(&skel.CmdArgs{}, conf)
	defer closeLog()
	return sweep.New(o.w, job).Run(ctx)
}
