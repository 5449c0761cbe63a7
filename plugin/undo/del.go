package undo

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"maps"
	"net/netip"
	"slices"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
	"github.com/containernetworking/plugins/pkg/ns"

	"cni-unwind/journal"
	"cni-unwind/plugin/internal/delegate"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/netconf"
)

// undoing is one pass over the steps of one generation.
type undoing struct {
	*Worker
	Job
	gen      *journal.Generation
	left     int // steps in this generation and in the generations after it
	cutOff   int // passes that were cut off, see undoOrder
	place    delNetNS
	next     *delegate.Call // of the next step, to be started early; nil if it must not be
	withheld []netip.Addr   // claimed addresses that another attachment owns
	stray    netip.Prefix   // the one address of the interface to show, see delStrayRules
}

// delPresent repeats a failed DEL of a step with the chain's current configuration of its delegate.
// If there is none, or it fails too, delPresent returns the first failure.
func (u *undoing) delPresent(
	ctx context.Context, step *journal.Step, f *delegate.Failure,
) *delegate.Failure {
	config := u.current(step)
	if config == nil || bytes.Equal(config, step.Config) {
		return f
	}
	if again := u.delWith(ctx, step, config); again != nil {
		f.Killed = again.Killed
		return f
	}
	u.Log.Info("DEL passed with the chain's current configuration; the delegate rejected that of the "+
		"ADD", "plugin", step.Type, "rejected", netconf.Shorten(f.Msg, 200))
	step.Config, step.Replaced = config, true
	return nil
}

// current returns the configuration of a step's delegate in the verb's chain, with the runtime's
// arguments of the ADD. It returns nil if there is no such chain or delegate.
func (u *undoing) current(step *journal.Step) json.RawMessage {
	chain, conf := u.present(step)
	if chain == nil {
		return nil
	}
	i := chain.Only(step.Type)
	if i < 0 || slices.ContainsFunc(u.gen.Steps,
		func(s journal.Step) bool { return s.Type == step.Type && s.Index != step.Index }) {
		return nil
	}
	return chain.Config(i, conf)
}

// present returns the verb's chain, and a configuration with the runtime's arguments of the ADD of
// a step. The chain is nil if it belongs to another network than the entry.
func (u *undoing) present(step *journal.Step) (*netconf.Chain, *netconf.Conf) {
	if u.Verb.Conf.Name != u.Entry.Network {
		return nil, nil
	}
	chain, err := u.Verb.Chain()
	if err != nil {
		return nil, nil
	}
	conf := *u.Verb.Conf
	conf.RuntimeConfig, conf.Injected = netconf.ObjectOf(u.gen.RuntimeConfig),
		netconf.ObjectOf(step.Config)
	maps.DeleteFunc(conf.Injected, func(key string, _ json.RawMessage) bool {
		return !slices.Contains(netconf.InjectedKeys, key)
	})
	return chain, &conf
}

// delWith runs the DEL of one step with a configuration. A plugin that finds what it made by the
// container's interface gets that interface, or one like it in a scratch namespace.
func (u *undoing) delWith(
	ctx context.Context, step *journal.Step, config json.RawMessage,
) *delegate.Failure {
	c := u.callOf(step, config)
	withheld := u.withheld
	if known.Of(step.Type).RemovesByAddress {
		withheld = slices.Concat(withheld, u.Verb.JustAssigned)
	}
	prevResult, err := u.prevResult(config, withheld)
	if err != nil {
		return c.Failed(0, "prevResult: "+err.Error())
	}
	if prevResult != nil {
		c.Stdin = netconf.WithPrevResult(config, prevResult)
	}
	switch facts := known.Of(step.Type); {
	case u.place.Path == "" && getsEmpty(step):
		return u.delInScratch(ctx, step, c, "")
	case facts.LeftTo != "" && u.place.gone:
		return u.delLeft(ctx, step, c, facts.LeftTo)
	case facts.NetNS != known.Scratch:
		return u.callDEL(ctx, step, c)
	}
	if remove, shown := u.showInterface(ctx, step); shown {
		f := u.callDEL(ctx, step, c)
		remove()
		// The namespace may be removed meanwhile. A plugin that no longer finds it succeeds and
		// leaves the rest.
		if f != nil || ns.IsNSorErr(u.place.Path) == nil {
			return f
		}
	}
	return u.delInScratch(ctx, step, c, u.Entry.IfName)
}

// callOf returns the DEL of a step in the namespace that was found.
func (u *undoing) callOf(step *journal.Step, config json.RawMessage) *delegate.Call {
	g := u.gen
	c := &delegate.Call{
		Command: "DEL", Plugin: step.Type, Path: g.Path, ContainerID: u.Entry.ContainerID,
		Ifname: u.Entry.IfName, Netns: u.shown(step), Args: g.Args, Stdin: config,
		Lock: u.Job.Lock.File(),
	}
	if _, err := netconf.FindPlugin(step.Type, c.Path); err != nil {
		c.Path = u.Verb.Path // the runtime's directory of plugins may have moved
	}
	return c
}

// nextCall returns the DEL of a step if its process may start while another one runs, or nil. A
// step that gets a scratch namespace has to wait for the path of the namespace.
func (u *undoing) nextCall(step *journal.Step) *delegate.Call {
	if u.place.Path == "" && (known.Of(step.Type).NetNS == known.Scratch || getsEmpty(step)) {
		return nil
	}
	return u.Early(u.callOf(step, nil))
}

// callDEL runs a DEL. It drops the stderr of a delegate that failed before, because the log already
// has it.
func (u *undoing) callDEL(
	ctx context.Context, step *journal.Step, c *delegate.Call,
) *delegate.Failure {
	stderr := u.Stderr
	if step.State == journal.StepFailed {
		stderr = io.Discard
	}
	_, f := u.Runner.Run(ctx, c, u.next, stderr)
	return f
}

// delInScratch runs a DEL in a scratch namespace with an interface that has the addresses of the
// container's, or without one if ifname is "".
func (u *undoing) delInScratch(
	ctx context.Context, step *journal.Step, c *delegate.Call, ifname string,
) *delegate.Failure {
	path, remove, err := host.ScratchNetNS(ifname, u.addressesHad(ctx, step))
	if err != nil {
		u.Log.Warn("cannot create a scratch network namespace; the plugin may leave rules behind",
			"plugin", step.Type, "err", err)
	} else {
		defer remove()
		c.Netns = path
	}
	return u.callDEL(ctx, step, c)
}

// prevResult returns the prevResult for a DEL with a configuration: the final result of the ADD, or
// the last known one, in the version of the configuration and without the withheld addresses. Like
// libcni, it returns none before version 0.4.0.
func (u *undoing) prevResult(
	config json.RawMessage, withheld []netip.Addr,
) (json.RawMessage, error) {
	if u.gen.Result == nil {
		return nil, nil
	}
	conf := types.PluginConf{CNIVersion: u.gen.CNIVersion}
	_ = json.Unmarshal(config, &conf)
	if has, err := version.GreaterThanOrEqualTo(conf.CNIVersion, "0.4.0"); err != nil || !has {
		return nil, err
	}
	result, err := netconf.ConvertResult(u.gen.Result, conf.CNIVersion)
	if err != nil || len(withheld) == 0 {
		return result, err
	}
	return netconf.WithoutAddresses(result, withheld)
}

// showInterface reports whether the container's interface is, or may be, in the namespace that the
// delegates get. It is missing, for example, at the second DEL of a bridge that removed it and then
// failed to remove its rules. If only the interface is gone, a plugin that finds its rules by the
// interface (sbr) gets a temporary one until remove is called.
func (u *undoing) showInterface(
	ctx context.Context, step *journal.Step,
) (remove func(), shown bool) {
	if u.place.Path == "" {
		return nil, false
	}
	if seen, err := host.Look(u.place.Path, u.Entry.IfName); seen.There() || err != nil {
		return func() {}, true
	}
	if !known.Of(step.Type).BorrowsInterface {
		return nil, false
	}
	remove, err := host.LendInterface(u.place.Path, u.Entry.IfName, u.addressesHad(ctx, step))
	if err != nil {
		u.Log.Warn("cannot lend the plugin an interface; it may leave rules behind",
			"plugin", step.Type, "err", err)
	}
	return remove, err == nil
}

// addressesHad returns the addresses that the container's interface had, from the best known
// result, else from the claims, else from the delegate's rules.
func (u *undoing) addressesHad(ctx context.Context, step *journal.Step) []netip.Prefix {
	if u.stray.IsValid() {
		return []netip.Prefix{u.stray}
	}
	if r, err := netconf.ParseResult(u.gen.Result); err == nil && len(r.Prefixes()) > 0 {
		return r.Prefixes()
	}
	var prefixes []netip.Prefix
	for _, c := range u.gen.Claims {
		prefixes = append(prefixes, netip.PrefixFrom(c.Address, c.Address.BitLen()))
	}
	if len(prefixes) == 0 && known.Of(step.Type).MasqueradesBy(step.Config) {
		return u.masqueraded(ctx, u.Entry.Key, step.Type)
	}
	return prefixes
}

// delNetNS is the namespace in which the DELs of a generation run. Its path is "" if there is none
// that may be shown, see shown.
type delNetNS struct {
	host.Place
	gone bool // the namespace is proven gone
}
