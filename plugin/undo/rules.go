package undo

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"regexp"
	"slices"
	"strings"

	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/internal/delegate"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/known"
)

// labelled reports whether a rule has one of the labels by which DELs find rules.
func labelled(rule string, labels []string) bool {
	return slices.ContainsFunc(labels, func(l string) bool { return strings.Contains(rule, l) })
}

// anyOf matches a text with one of some addresses that is not part of a longer number or word.
func anyOf(addresses []netip.Addr) *regexp.Regexp {
	var texts []string
	for _, a := range addresses {
		texts = append(texts, regexp.QuoteMeta(a.String()))
	}
	return regexp.MustCompile(
		`(^|[^[:alnum:]])(` + strings.Join(texts, "|") + `)($|[^[:alnum:]])`)
}

// No container has these addresses (RFC 5737, RFC 3849). They represent an unknown address.
const (
	unknownIPv4 = "192.0.2.1/32"
	unknownIPv6 = "2001:db8::1/128"
)

// masqueraded returns the addresses in the masquerading rules of an attachment, since a DEL removes
// the rules for the addresses of the interface. A plugin that was interrupted after it created its
// chain, and before the rule that jumps to it, left no address. Any address will do then, and also
// for nftables rules, which ptp removes only if it finds some address.
func (w *Worker) masqueraded(
	ctx context.Context, k journal.Key, plugin string,
) (addresses []netip.Prefix) {
	facts := known.Of(plugin)
	chain := facts.Chain(k.Network, k.ContainerID)
	for _, family := range []struct{ save, unknown string }{
		{"iptables-save", unknownIPv4}, {"ip6tables-save", unknownIPv6},
	} {
		rules, err := host.Printed(ctx, family.save, "-t", "nat")
		w.warnOfRules(k, err)
		found := masqueradedBy(rules, chain, k.Network, k.ContainerID)
		if len(found) == 0 && slices.ContainsFunc(rules, func(rule string) bool {
			return strings.HasPrefix(rule, ":"+chain+" ")
		}) {
			found = []netip.Prefix{netip.MustParsePrefix(family.unknown)}
		}
		addresses = append(addresses, found...)
	}
	if len(addresses) > 0 {
		return addresses
	}
	rules, err := host.Printed(ctx, "nft", "list", "ruleset")
	w.warnOfRules(k, err)
	labels := facts.Labels(k.Network, k.ContainerID, k.IfName)
	if slices.ContainsFunc(rules, func(rule string) bool { return labelled(rule, labels) }) {
		return []netip.Prefix{netip.MustParsePrefix(unknownIPv4)}
	}
	return nil
}

func (w *Worker) warnOfRules(k journal.Key, err error) {
	if err != nil && !errors.Is(err, exec.ErrNotFound) {
		w.Log.Warn("cannot list firewall rules", "attachment", k.String(), "err", err)
	}
}

// masqueradedBy reads the rules that lead to a container's chain from the output of iptables-save.
// It ignores a rule that is not exactly as bridge and ptp make it.
func masqueradedBy(rules []string, chain, network, containerID string) (addresses []netip.Prefix) {
	rest := fmt.Sprintf(` -m comment --comment "name: \"%s\" id: \"%s\"" -j %s`,
		network, containerID, chain)
	for _, rule := range rules {
		source, is := strings.CutPrefix(strings.TrimSpace(rule), "-A POSTROUTING -s ")
		if source, is2 := strings.CutSuffix(source, rest); is && is2 {
			if prefix, err := netip.ParsePrefix(source); err == nil && prefix.IsSingleIP() {
				addresses = append(addresses, prefix)
			}
		}
	}
	return addresses
}

// delStrayRules repeats a failed DEL of bridge or ptp for each address with a rule that jumps to
// the container's chain, in a scratch namespace whose interface has that address. An unrecorded ADD
// may have left such a rule; the kernel removes no chain that is in use, and the plugin gives up at
// its first address. delStrayRules does nothing if another interface of the container shares the
// chain. If the last DEL fails too, it returns the first failure.
func (a *attempt) delStrayRules(ctx context.Context, f *delegate.Failure) *delegate.Failure {
	stray := a.masqueraded(ctx, a.Entry.Key, a.Type)
	if len(stray) == 0 || a.sharesChain(ctx) {
		return f
	}
	defer func() { a.stray = netip.Prefix{} }()
	again := f
	for _, a.stray = range stray {
		again = a.delWith(ctx, a.Config)
	}
	if again != nil {
		return f
	}
	a.Log.Info("DEL passed after removing rules of unrecorded ADDs", "plugin", a.Type,
		"addresses", stray)
	return nil
}

// sharesChain reports whether the container has, or may have, another interface in the network.
func (u *undoing) sharesChain(ctx context.Context) bool {
	all, err := u.Node.CachedAttachments(u.Entry.Network, u.Entry.ContainerID)
	shared := err != nil || slices.ContainsFunc(all, func(c alive.Cached) bool {
		return c.Key() != u.Entry.Key && c.ContainerID == u.Entry.ContainerID
	})
	u.Journal.Read(ctx, func(tx *journal.Tx) error {
		return tx.Outlines(func(o journal.Outline, _ error) error {
			shared = shared || o.Network == u.Entry.Network && o.Key != u.Entry.Key &&
				o.ContainerID == u.Entry.ContainerID
			return nil
		})
	})
	return shared
}
