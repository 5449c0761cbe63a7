package plugin

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/netconf"
)

// check runs the CHECK of each recorded delegate that is still in the chain, in chain order. The
// delegate gets the recorded configuration. If its CHECK fails, check repeats the CHECK with the
// present configuration and CNI_ARGS. As without unwind, no delegate runs if the chain sets
// disableCheck, or if the ADD's CNI version is older than 0.4.0. If the attachment is not live in
// the journal, check logs a warning and uses the current chain. It does not fail for that reason,
// because Nomad destroys the network namespace after a failed CHECK.
//
// check does not acquire the attachment's lock. Delegates change nothing in CHECK, so other verbs
// need not wait for it.
func (o *op) check(ctx context.Context) error {
	if o.bad != nil {
		o.log.Warn("ignoring invalid configuration keys; their defaults apply", "err", o.bad)
	}
	chain, err := o.Verb.Chain()
	if err == nil && chain.DisableCheck {
		return nil
	}
	e, _ := o.Node.Journal.Snapshot(ctx).Get(o.Verb.Key)
	if e != nil {
		e = e.Clone()
	}
	if e == nil || e.State != journal.Live {
		if err != nil {
			return badConfig(err)
		}
		o.log.Warn("the journal has no live record of the attachment; running CHECK with the " +
			"current chain")
		e = o.newRecord(journal.Live, chain)
	}
	if has, err := version.GreaterThanOrEqualTo(e.Added.CNIVersion, "0.4.0"); err != nil || !has {
		return nil //nolint:nilerr // an invalid version has no CHECK
	}
	if o.Verb.Conf.PrevResult != nil {
		e.Got.Result = o.Verb.Conf.PrevResult
	}
	for i := range e.Steps {
		step := &e.Steps[i]
		if o.HasLeft(e, step) == decide.True {
			continue
		}
		if f := o.checkStep(ctx, e, step); f != nil {
			return cniError(f.Code, f.Error(), f.Details)
		}
	}
	return nil
}

// checkStep runs CHECK with the recorded configuration. If that fails, checkStep runs CHECK again,
// with the present configuration (see undo.Worker.Present). If the two configurations differ
// and the first CHECK hangs, it is killed in time for the second.
func (o *op) checkStep(
	ctx context.Context, e *journal.Record, s *journal.Step,
) *delegate.Failure {
	present, recorded := o.Present(e, s, decide.Present, o.Verb.Conf.RuntimeConfig), ctx
	if present != nil && !bytes.Equal(present, s.Config) {
		var cancel context.CancelFunc
		recorded, cancel = context.WithTimeout(ctx, o.Env.Budgets.Recorded)
		defer cancel()
	}
	f := o.checkWith(recorded, e, s.Type, s.Config, e.Added.Args)
	args := cmp.Or(o.args.Args, e.Added.Args)
	if f != nil && present != nil && o.checkWith(ctx, e, s.Type, present, args) == nil {
		f = nil
	}
	return f
}

func (o *op) checkWith(
	ctx context.Context, e *journal.Record, plugin string, config json.RawMessage, args string,
) *delegate.Failure {
	c := o.call("CHECK", plugin)
	conf := types.PluginConf{CNIVersion: e.Added.CNIVersion}
	_ = json.Unmarshal(config, &conf)
	prevResult, err := netconf.ConvertResult(e.Got.Result, conf.CNIVersion)
	if err != nil {
		return c.Failed(types.ErrInvalidNetworkConfig, "prevResult: "+err.Error())
	}
	c.Args, c.Stdin = args, netconf.WithPrevResult(config, prevResult)
	_, f := o.Env.Runner.Run(ctx, c, o.Env.Stderr)
	return f
}
