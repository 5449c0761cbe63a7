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

// attempt is the DEL of one step in a pass.
type attempt struct {
	*undoing
	*journal.Step
}

// delPresent repeats a failed DEL of a step with the chain's current configuration of its delegate.
// If there is none, or it fails too, delPresent returns the first failure.
func (a *attempt) delPresent(ctx context.Context, f *delegate.Failure) *delegate.Failure {
	config := a.current()
	if config == nil || bytes.Equal(config, a.Config) {
		return f
	}
	if again := a.delWith(ctx, config); again != nil {
		f.Killed = again.Killed
		return f
	}
	a.Log.Info("DEL passed with the chain's current configuration; the delegate rejected that of the "+
		"ADD", "plugin", a.Type, "rejected", netconf.Shorten(f.Msg, 200))
	a.Config = config
	return nil
}

// current returns the configuration of a step's delegate in the verb's chain, with the runtime's
// arguments of the ADD. It returns nil if there is no such chain or delegate.
func (a *attempt) current() json.RawMessage {
	chain, conf := a.present()
	if chain == nil {
		return nil
	}
	i := chain.Only(a.Type)
	if i < 0 || slices.ContainsFunc(a.gen.Steps,
		func(s journal.Step) bool { return s.Type == a.Type && s.Index != a.Index }) {
		return nil
	}
	return chain.Config(i, conf)
}

// present returns the verb's chain, and a configuration with the runtime's arguments of the ADD of
// a step. The chain is nil if it belongs to another network than the entry.
func (a *attempt) present() (*netconf.Chain, *netconf.Conf) {
	if a.Verb.Conf.Name != a.Entry.Network {
		return nil, nil
	}
	chain, err := a.Verb.Chain()
	if err != nil {
		return nil, nil
	}
	conf := *a.Verb.Conf
	conf.RuntimeConfig, conf.Injected = netconf.ObjectOf(a.gen.RuntimeConfig),
		netconf.ObjectOf(a.Config)
	maps.DeleteFunc(conf.Injected, func(key string, _ json.RawMessage) bool {
		return !slices.Contains(netconf.InjectedKeys, key)
	})
	return chain, &conf
}

// delWith runs the DEL of one step with a configuration. A plugin that finds what it made by the
// container's interface gets that interface, or one like it in a scratch namespace.
func (a *attempt) delWith(ctx context.Context, config json.RawMessage) *delegate.Failure {
	c := a.callOf(config)
	prevResult, err := a.prevResult(config)
	if err != nil {
		return c.Failed(0, "prevResult: "+err.Error())
	}
	if prevResult != nil {
		c.Stdin = netconf.WithPrevResult(config, prevResult)
	}
	switch facts := known.Of(a.Type); {
	case a.place.Path == "" && getsEmpty(a.Step):
		return a.delInScratch(ctx, c, "")
	case facts.LeftTo != "" && a.place.gone:
		return a.delLeft(ctx, c, facts.LeftTo)
	case facts.NetNS != known.Scratch:
		return a.callDEL(ctx, c)
	}
	if remove, shown := a.showInterface(ctx); shown {
		f := a.callDEL(ctx, c)
		remove()
		// The namespace may be removed meanwhile. A plugin that no longer finds it succeeds and
		// leaves the rest.
		if f != nil || ns.IsNSorErr(a.place.Path) == nil {
			return f
		}
	}
	return a.delInScratch(ctx, c, a.Entry.IfName)
}

// callOf returns the DEL of a step in the namespace that was found.
func (a *attempt) callOf(config json.RawMessage) *delegate.Call {
	g := a.gen
	c := &delegate.Call{
		Command: "DEL", Plugin: a.Type, Path: g.Path, ContainerID: a.Entry.ContainerID,
		Ifname: a.Entry.IfName, Netns: a.shown(), Args: g.Args, Stdin: config,
		Lock: a.Job.Lock.File(),
	}
	if _, err := netconf.FindPlugin(a.Type, c.Path); err != nil {
		c.Path = a.Verb.Path // the runtime's directory of plugins may have moved
	}
	return c
}

// nextCall returns the DEL of a step if its process may start while another one runs, or nil. A
// step that gets a scratch namespace has to wait for the path of the namespace.
func (a *attempt) nextCall() *delegate.Call {
	if a.place.Path == "" && (known.Of(a.Type).NetNS == known.Scratch || getsEmpty(a.Step)) {
		return nil
	}
	return a.Early(a.callOf(nil))
}

// callDEL runs a DEL. It drops the stderr of a delegate that failed before, because the log already
// has it.
func (a *attempt) callDEL(ctx context.Context, c *delegate.Call) *delegate.Failure {
	stderr := a.Stderr
	if a.State == journal.StepFailed {
		stderr = io.Discard
	}
	_, f := a.Runner.Run(ctx, c, a.next, stderr)
	return f
}

// delInScratch runs a DEL in a scratch namespace with an interface that has the addresses of the
// container's, or without one if ifname is "".
func (a *attempt) delInScratch(
	ctx context.Context, c *delegate.Call, ifname string,
) *delegate.Failure {
	path, remove, err := host.ScratchNetNS(ifname, a.addressesHad(ctx))
	if err != nil {
		a.Log.Warn("cannot create a scratch network namespace; the plugin may leave rules behind",
			"plugin", a.Type, "err", err)
	} else {
		defer remove()
		c.Netns = path
	}
	return a.callDEL(ctx, c)
}

// prevResult returns the prevResult for a DEL with a configuration: the final result of the ADD, or
// the last known one, in the version of the configuration and without the withheld addresses. Like
// libcni, it returns none before version 0.4.0.
func (a *attempt) prevResult(config json.RawMessage) (json.RawMessage, error) {
	if a.gen.Result == nil {
		return nil, nil
	}
	conf := types.PluginConf{CNIVersion: a.gen.CNIVersion}
	_ = json.Unmarshal(config, &conf)
	if has, err := version.GreaterThanOrEqualTo(conf.CNIVersion, "0.4.0"); err != nil || !has {
		return nil, err
	}
	withheld := a.withheld
	if known.Of(a.Type).RemovesByAddress {
		withheld = slices.Concat(withheld, a.Verb.JustAssigned)
	}
	result, err := netconf.ConvertResult(a.gen.Result, conf.CNIVersion)
	if err != nil || len(withheld) == 0 {
		return result, err
	}
	return netconf.WithoutAddresses(result, withheld)
}

// showInterface reports whether the container's interface is, or may be, in the namespace that the
// delegates get. It is missing, for example, at the second DEL of a bridge that removed it and then
// failed to remove its rules. If only the interface is gone, a plugin that finds its rules by the
// interface (sbr) gets a temporary one until remove is called.
func (a *attempt) showInterface(ctx context.Context) (remove func(), shown bool) {
	if a.place.Path == "" {
		return nil, false
	}
	if seen, err := host.Look(a.place.Path, a.Entry.IfName); seen.There() || err != nil {
		return func() {}, true
	}
	if !known.Of(a.Type).BorrowsInterface {
		return nil, false
	}
	remove, err := host.LendInterface(a.place.Path, a.Entry.IfName, a.addressesHad(ctx))
	if err != nil {
		a.Log.Warn("cannot lend the plugin an interface; it may leave rules behind",
			"plugin", a.Type, "err", err)
	}
	return remove, err == nil
}

// addressesHad returns the addresses that the container's interface had, from the best known
// result, else from the claims, else from the delegate's rules.
func (a *attempt) addressesHad(ctx context.Context) []netip.Prefix {
	if a.stray.IsValid() {
		return []netip.Prefix{a.stray}
	}
	if r, err := netconf.ParseResult(a.gen.Result); err == nil && len(r.Prefixes()) > 0 {
		return r.Prefixes()
	}
	var prefixes []netip.Prefix
	for _, c := range a.gen.Claims {
		prefixes = append(prefixes, netip.PrefixFrom(c.Address, c.Address.BitLen()))
	}
	if len(prefixes) == 0 && known.Of(a.Type).MasqueradesBy(a.Config) {
		return a.masqueraded(ctx, a.Entry.Key, a.Type)
	}
	return prefixes
}

// delNetNS is the namespace in which the DELs of a generation run. Its path is "" if there is none
// that may be shown, see shown.
type delNetNS struct {
	host.Place
	gone bool // the namespace is proven gone
}
