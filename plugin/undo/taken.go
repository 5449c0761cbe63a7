package undo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/internal/delegate"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/tristate"
)

// An invalid configuration makes a delegate fail its ADD and every DEL, although it took nothing.
// To find out whether it took anything, unwind inspects the places that its DEL would clean up; the
// error code is not enough. This file has those places.

// undoMistake handles a step whose ADD did not succeed and whose DEL failed too:
//
//  1. If the ADD left nothing that its DEL would remove, the step is undone.
//  2. Otherwise unwind runs the DEL with the chain's current configuration. If that succeeds, and
//     nothing of the ADD is found afterwards, the step is undone.
//  3. Otherwise the DEL stays pending. The runtime gets no second error for it if it is unknown
//     whether the ADD left something, and the chain no longer has a delegate with this
//     configuration: the plain chain's DEL would not call it. Sweeps continue to retry the step.
//
// A delegate that was killed may have an agent that continued, so undoMistake handles it only at
// its second DEL.
func (a *attempt) undoMistake(ctx context.Context, f *delegate.Failure) *delegate.Failure {
	look := func() tristate.Value {
		return a.Taken(ctx, a.Entry, a.gen, a.Step, a.place.Path, a.place.gone)
	}
	taken := look()
	if taken == tristate.No {
		a.Log.Info("failed DEL has nothing to undo: the delegate's ADD failed and left nothing",
			"plugin", a.Type, "code", f.Code, "err", netconf.Shorten(f.Said(), 200))
		if a.Attempts > 0 { // a rollback has its own event
			a.record(journal.Untaken, netconf.Shorten(f.Words(), 500))
		}
		return nil
	}
	before := *a.Step
	if a.delPresent(ctx, f) == nil {
		if look() != tristate.Yes {
			return nil
		}
		*a.Step = before
	}
	again := a.State == journal.StepFailed && a.LastCode == f.Code
	f.PutRight = taken == tristate.Unknown && again && a.putRight()
	return f
}

// putRight says whether the verb's chain no longer has a delegate with the configuration of a
// step's ADD.
func (a *attempt) putRight() bool {
	chain, conf := a.present()
	return chain != nil && !slices.ContainsFunc(chain.Steps(conf), func(s journal.Step) bool {
		return bytes.Equal(s.Config, a.Config)
	})
}

// looks has, for each place where plugins leave something, the function that inspects it: yes if
// the ADD of a step's delegate left something there, no if it did not.
var looks = map[known.Trace]func(*attempt, context.Context) tristate.Value{
	known.Reservation:      (*attempt).reserved,
	known.Interface:        (*attempt).interfaceThere,
	known.RulesOfContainer: (*attempt).rulesOfContainer,
	known.RulesOfAddresses: (*attempt).rulesOfAddresses,
	known.IFB:              (*attempt).ifbThere,
	known.Backup:           (*attempt).backupThere,
	known.RoutingRules:     (*attempt).routingRules,
}

// Taken reports whether the ADD of a step's delegate left something that its DEL would remove, on
// the host and in the container's network namespace at the path netns; gone says that there is
// none. The result is unknown if one place cannot be inspected and no other has anything.
func (w *Worker) Taken(
	ctx context.Context, e *journal.Entry, g *journal.Generation, step *journal.Step, netns string,
	gone bool,
) tristate.Value {
	a := &attempt{&undoing{Worker: w, Job: Job{Entry: e}, gen: g,
		place: delNetNS{host.Place{Path: netns}, gone}}, step}
	facts := known.Of(step.Type)
	if len(facts.Traces) == 0 && !facts.LeavesNothing {
		return tristate.Unknown
	}
	taken := tristate.No
	for _, place := range facts.Traces {
		switch looks[place](a, ctx) {
		case tristate.Yes:
			return tristate.Yes
		case tristate.Unknown:
			taken = tristate.Unknown
		}
	}
	return taken
}

// reserved looks into the store of the delegate's IPAM plugin. dataDir and the network alone name
// host-local's store, so a mistake in its ranges does not matter. static keeps nothing. A plugin
// that keeps its state elsewhere (a daemon, a cluster) is unknown.
func (a *attempt) reserved(_ context.Context) tristate.Value {
	if known.IPAMOf(a.Config).LeavesNothing {
		return tristate.No
	}
	pool := ipam.Pool(a.Config, a.Entry.Network)
	if pool == "" {
		return tristate.Unknown
	}
	held, err := ipam.HeldBy(pool, a.Entry.ContainerID, a.Entry.IfName)
	return tristate.Of(len(held) > 0, err)
}

// interfaceThere looks for CNI_IFNAME in the container's network namespace. If the namespace is
// gone, so is the interface.
func (a *attempt) interfaceThere(context.Context) tristate.Value {
	if a.place.Path == "" {
		return tristate.Equal(a.place.gone, false)
	}
	seen, err := host.Look(a.place.Path, a.Entry.IfName)
	return tristate.Of(seen.There(), err)
}

// rulesOfContainer looks for iptables and nftables rules and chains that the delegate labels with
// the attachment.
func (a *attempt) rulesOfContainer(ctx context.Context) tristate.Value {
	rules, err := host.Rules(ctx)
	labels := known.Of(a.Type).Labels(a.Entry.Network, a.Entry.ContainerID, a.Entry.IfName)
	return tristate.Of(slices.ContainsFunc(rules,
		func(rule string) bool { return labelled(rule, labels) }), err)
}

// rulesOfAddresses looks for rules with an address that the delegate was given, and without a label
// of another delegate.
func (a *attempt) rulesOfAddresses(ctx context.Context) tristate.Value {
	var given []netip.Addr
	for _, c := range a.gen.Claims {
		if c.Receives(a.Index) {
			given = append(given, c.Address)
		}
	}
	if len(given) == 0 {
		return tristate.Unknown
	}
	rules, err := host.Rules(ctx)
	labels := known.AllLabels(a.Entry.Network, a.Entry.ContainerID, a.Entry.IfName)
	has := anyOf(given)
	return tristate.Of(slices.ContainsFunc(rules,
		func(rule string) bool { return !labelled(rule, labels) && has.MatchString(rule) }), err)
}

// ifbThere looks for the interface that bandwidth makes on the host.
func (a *attempt) ifbThere(context.Context) tristate.Value {
	_, err := netlink.LinkByName(known.IFBName(a.Entry.Network, a.Entry.ContainerID))
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return tristate.No
	}
	return tristate.Of(true, err)
}

// backupThere looks for tuning's backup file of the interface.
func (a *attempt) backupThere(_ context.Context) tristate.Value {
	var conf struct {
		DataDir string `json:"dataDir"`
	}
	if json.Unmarshal(a.Config, &conf) != nil {
		return tristate.Unknown
	}
	if conf.DataDir == "" {
		conf.DataDir = "/run/cni/tuning"
	}
	_, err := os.Lstat(filepath.Join(conf.DataDir, a.Entry.ContainerID+"_"+a.Entry.IfName+".json"))
	if errors.Is(err, fs.ErrNotExist) {
		return tristate.No
	}
	return tristate.Of(true, err)
}

// routingRules looks for routing rules in the container's network namespace, besides those of every
// namespace.
func (a *attempt) routingRules(context.Context) tristate.Value {
	if a.place.Path == "" {
		return tristate.Equal(a.place.gone, false)
	}
	netns, err := ns.GetNS(a.place.Path)
	if err != nil {
		return tristate.Unknown
	}
	defer netns.Close()
	var rules []netlink.Rule
	err = host.In(netns, func() (err error) {
		rules, err = netlink.RuleList(netlink.FAMILY_ALL)
		return err
	})
	initial := []int{unix.RT_TABLE_LOCAL, unix.RT_TABLE_MAIN, unix.RT_TABLE_DEFAULT}
	return tristate.Of(slices.ContainsFunc(rules, func(r netlink.Rule) bool {
		return !slices.Contains(initial, r.Table)
	}), err)
}
