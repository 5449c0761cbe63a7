package plugin

import (
	"context"

	"github.com/containernetworking/cni/pkg/version"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
)

// check runs CHECK of every delegate that was added, in chain order, with the configuration of the
// ADD. It calls a delegate only if the runtime would call it without unwind. If the attachment has
// no journal entry, check logs a warning and does not fail, because Nomad destroys a network
// namespace on a failed CHECK.
//
// check does not take the lock. Delegates do not change anything in CHECK, so other verbs need not
// wait for it.
func (o *op) check(ctx context.Context) error {
	if o.bad != nil {
		o.log.Warn("ignoring invalid configuration keys; their defaults apply", "err", o.bad)
	}
	chain, err := o.Chain()
	if err == nil && chain.DisableCheck {
		return nil
	}
	e, _ := o.Journal.Snapshot(ctx).Get(o.Key)
	if e == nil || e.Undo.State != journal.Live {
		if err != nil {
			return badConfig(err)
		}
		o.log.Warn("the attachment is not in the journal; running CHECK with the chain that the " +
			"runtime passed")
		e = o.newEntry(journal.Live, chain)
	}
	if has, err := version.GreaterThanOrEqualTo(e.Added.CNIVersion, "0.4.0"); err != nil || !has {
		return nil //nolint:nilerr // an invalid version has no CHECK
	}
	result := e.Got.Result
	if o.Conf.PrevResult != nil {
		result = o.Conf.PrevResult
	}
	prevResult, err := netconf.ConvertResult(result, e.Added.CNIVersion)
	if err != nil {
		return badConfig(err)
	}
	for _, step := range e.Undo.Steps {
		c := o.call("CHECK", step.Type)
		c.Args, c.Stdin = e.Added.Args, netconf.WithPrevResult(step.Config, prevResult)
		if _, f := o.Runner.Run(ctx, c, o.Stderr); f != nil {
			return cniError(f.Code, f.Error(), f.Details)
		}
	}
	return nil
}
