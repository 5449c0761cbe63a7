package plugin

import (
	"encoding/json"

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
		gen = &journal.Generation{CNIVersion: chain.CNIVersion, Args: o.args.Args, Steps: chain.steps(o.conf)}
	}
	if has, err := version.GreaterThanOrEqualTo(gen.CNIVersion, "0.4.0"); err != nil || !has {
		return nil //nolint:nilerr // a version that is none has no CHECK
	}
	prevResult, err := o.finalResult(gen)
	if err != nil {
		return badConfig(err)
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

// finalResult returns the result of an ADD for its CHECK: as the delegates printed it, unless the runtime has one that says
// something else. That the runtime's version can say less is no difference.
func (o *op) finalResult(gen *journal.Generation) (json.RawMessage, error) {
	if o.conf.PrevResult == nil {
		return gen.Result, nil
	}
	if gen.Result != nil {
		printed, err := convertResult(gen.Result, o.conf.CNIVersion)
		if err == nil && sameMeaning(printed, o.conf.PrevResult) {
			return gen.Result, nil
		}
		o.log.Warn("the runtime's prevResult is not what the ADD returned", "attachment", o.key.String())
	}
	return convertResult(o.conf.PrevResult, gen.CNIVersion)
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
