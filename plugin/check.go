package plugin

import (
	"context"
	"encoding/json"

	"github.com/containernetworking/cni/pkg/version"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
)

// check runs CHECK of every delegate that was added, in chain order, with the configuration of the
// ADD. It calls no delegate that the plain chain would not call. An attachment without a journal
// entry is a warning, never an error: Nomad destroys a network namespace on a failed CHECK.
//
// The delegates hold the attachment's lock, if CHECK could take it. A DEL, or a sweep that finds
// the attachment dead, waits for them for a while and then kills them, whether the CHECK's unwind
// lives or not.
func (o *op) check(ctx context.Context) error {
	if o.bad != nil {
		o.log.Warn("invalid keys ignored, using defaults", "err", o.bad)
	}
	chain, err := o.conf.LoadChain()
	if err == nil && chain.DisableCheck {
		return nil
	}
	gen := o.recorded(ctx)
	if gen == nil {
		if err != nil {
			return badConfig(err)
		}
		o.log.Warn("CHECK of an attachment without a journal entry")
		sent := o.generation(chain)
		gen = &sent
	}
	if has, err := version.GreaterThanOrEqualTo(gen.CNIVersion, "0.4.0"); err != nil || !has {
		return nil // not a version: it has no CHECK
	}
	prevResult, err := o.finalResult(gen)
	if err != nil {
		return badConfig(err)
	}
	o.share(ctx)
	defer o.lock.Release()
	for _, step := range gen.Steps {
		c := o.call("CHECK", step.Type)
		c.Args, c.Stdin = gen.Args, netconf.WithPrevResult(step.Config, prevResult)
		if _, f := o.w.Runner.Run(ctx, c, nil, o.Stderr); f != nil {
			return cniError(f.Code, f.Error(), f.Details)
		}
	}
	return nil
}

// share takes the attachment's lock, shared with other CHECKs. CHECK continues without the lock if
// there is no lock file (the journal has no such attachment), if the journal cannot be used, or if
// another unwind holds the lock for too long.
func (o *op) share(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, o.Budgets.Orphans)
	defer cancel()
	var err error
	if o.lock, err = o.rec.Store.Share(ctx, o.key); err != nil {
		o.log.Debug("CHECK runs without the attachment's lock", "err", err)
	}
}

// finalResult returns the result of an ADD for its CHECK, in the chain's version. It is the last
// delegate's, unless the runtime's differs. Fields that the runtime's version lacks do not count as
// a difference.
func (o *op) finalResult(gen *journal.Generation) (json.RawMessage, error) {
	result := gen.Result
	if o.conf.PrevResult != nil {
		printed, err := netconf.ConvertResult(result, o.conf.CNIVersion)
		if err != nil || !netconf.SameMeaning(printed, o.conf.PrevResult) {
			if result != nil {
				o.log.Warn("the runtime's prevResult differs from the result of the ADD")
			}
			result = o.conf.PrevResult
		}
	}
	return netconf.ConvertResult(result, gen.CNIVersion)
}

// recorded returns the attachment's ADD from the journal, or nil.
func (o *op) recorded(ctx context.Context) (gen *journal.Generation) {
	o.rec.Read(ctx, func(tx *journal.Tx) error {
		e, err := tx.Get(o.key)
		if e != nil && e.State == journal.Live {
			gen = e.Newest()
		}
		return err
	})
	return gen
}
