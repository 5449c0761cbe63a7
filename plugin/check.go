package plugin

import (
	"github.com/containernetworking/cni/pkg/version"

	"cni-unwind/journal"
)

// check asks every delegate, in the order of the chain, whether the attachment is as it should be: those that were added,
// with the configuration they were added with. A delegate that the plain chain would not ask is not asked. What the
// journal does not know is a warning, never an error: Nomad destroys a network namespace on a failed CHECK.
func (o *op) check() error {
	if o.bad != nil {
		o.log.Warn("the configuration is wrong; what is wrong in it has its default", "err", o.bad)
	}
	chain, err := o.conf.LoadChain()
	if err == nil && chain.DisableCheck {
		return nil
	}
	gen := o.recorded()
	if gen == nil {
		if err != nil {
			return badConfig(err)
		}
		o.log.Warn("CHECK of an attachment that the journal does not know", "attachment", o.key.String())
		gen = &journal.Generation{CNIVersion: chain.CNIVersion, Result: o.conf.PrevResult, Args: o.args.Args, Steps: chain.steps(o.conf)}
	}
	if has, err := version.GreaterThanOrEqualTo(gen.CNIVersion, "0.4.0"); err != nil || !has {
		return nil
	}
	prevResult := gen.Result
	if o.conf.PrevResult != nil {
		if prevResult, err = convertResult(o.conf.PrevResult, gen.CNIVersion); err != nil {
			return badConfig(err)
		}
		if !sameMeaning(prevResult, gen.Result) {
			o.log.Warn("the runtime's prevResult is not what the ADD returned", "attachment", o.key.String())
		}
	}
	for _, step := range gen.Steps {
		c := &call{
			command: "CHECK", plugin: step.Type, path: o.args.Path, containerID: o.args.ContainerID, netns: o.args.Netns,
			ifname: o.args.IfName, args: gen.Args, stdin: withPrevResult(step.Config, prevResult),
		}
		if _, f := c.run(o.ctx, o.Stderr); f != nil {
			return cniError(f.code, f.Error(), f.details)
		}
	}
	return nil
}

// recorded returns the attachment's ADD as the journal has it, or nil.
func (o *op) recorded() (gen *journal.Generation) {
	o.read(o.ctx, func(tx *journal.Tx) error {
		e, err := tx.Get(o.key)
		if e != nil && e.State == journal.Live {
			gen = e.Newest()
		}
		return err
	})
	return gen
}
