package plugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"unicode/utf8"

	"github.com/containernetworking/cni/pkg/skel"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/record"
	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/undo"
)

// Forget drops the pending DELs of a dead attachment without running them, so the delegates'
// resources stay allocated. It is for an attachment whose DELs can never succeed, for example
// because a plugin was removed for good. The history records the event, and a record in state
// abandoned makes a later DEL of the runtime succeed. Forget also drops damaged records.
//
// The parameter by is the operator's name for the history. Forget refuses an attachment that is not
// dead, because the DEL of that attachment needs the record.
func (p *Plugin) Forget(ctx context.Context, stateDir string, key journal.Key, by string) error {
	conf := netconf.DefaultConf()
	conf.StateDir = stateDir
	o, closeLog := p.newOp(&skel.CmdArgs{}, conf)
	defer closeLog()
	lock, err := o.Node.Journal.Store.TryAcquire(key)
	if errors.Is(err, journal.ErrBusy) {
		return fmt.Errorf("%s: %s; retry later", key, decide.Locked.Reason)
	}
	if err != nil {
		return err
	}
	defer lock.Release()
	records, err := o.toForget(ctx, lock, key)
	if err == nil {
		event := record.EventOf(journal.Forgotten, records[0])
		event.Reason = "forgotten by " + by
		for _, e := range records {
			event.Plugins = append(event.Plugins, undo.PendingSteps(e)...)
		}
		o.Node.Journal.Event(event) // recorded if Update succeeds
		err = o.Node.Journal.Update(ctx, func(tx *journal.Tx) (err error) {
			put := tx.Put
			if key.Malformed() || !utf8.ValidString(key.Network+key.ContainerID+key.IfName) {
				put = tx.Delete // a damaged key, which no DEL can name
			}
			for _, e := range records {
				forgotten := e.Clone()
				forgotten.Abandon(event.Reason)
				err = errors.Join(err, put(forgotten))
			}
			return err
		})
	}
	return errors.Join(err, lock.Remove())
}

// toForget returns the records of a dead attachment, or one empty record if they are damaged. The
// caller holds the lock, so the records cannot change.
func (o *op) toForget(
	ctx context.Context, lock *journal.Lock, key journal.Key,
) (records []*journal.Record, err error) {
	snapshot := o.Node.Journal.Snapshot(ctx)
	records, err = snapshot.Pending(key)
	var damaged *journal.DamagedError
	switch {
	case errors.As(err, &damaged):
		return []*journal.Record{{Key: key}}, nil
	case cmp.Or(err, snapshot.Err) != nil:
		return nil, cmp.Or(err, snapshot.Err)
	case len(records) == 0:
		return nil, fmt.Errorf("%s is not in the journal", key)
	}
	if v := decide.Decide(o.Node.Gather(ctx, records[0], lock)); !v.Releasable() {
		return nil, fmt.Errorf("%s is %s, not dead (%s); only a dead attachment can be forgotten", key,
			v.Verdict, v.Reason)
	}
	return records, nil
}

// Sweep sweeps the journal in a state directory (see sweep.Sweep).
func (p *Plugin) Sweep(
	ctx context.Context, stateDir string, opts sweep.Options,
) ([]sweep.Finding, error) {
	conf := netconf.DefaultConf()
	conf.StateDir, conf.LogLevel = stateDir, slog.LevelWarn
	o, closeLog := p.newOp(&skel.CmdArgs{}, conf)
	defer closeLog()
	return sweep.New(o.Worker, opts).Run(ctx)
}
