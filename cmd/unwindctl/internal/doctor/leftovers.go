package doctor

import (
	"context"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"time"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/pools"
	"cni-unwind/journal"
)

// leftovers reports free addresses that rules of the reference plugins still contain. The container
// that leaked such a rule no longer owns the address, so a sweep has no owner to judge.
func (e *examination) leftovers(ctx context.Context, found *inspect.Node) {
	free := freeOf(found, inRules(ctx))
	if len(free) == 0 {
		return
	}
	again := inRules(ctx) // an ADD or a DEL may have run meanwhile
	attachments, _ := inspect.ReadJournal(ctx, &journal.Store{Dir: e.StateDir})
	free = slices.DeleteFunc(free, func(a netip.Addr) bool {
		inUse := func(o inspect.Attachment) bool { // such as after its network was renamed
			return slices.Contains(o.Addresses, a)
		}
		return !slices.Contains(again, a) || slices.ContainsFunc(attachments, inUse)
	})
	if len(free) == 0 {
		return
	}
	e.add("rules", Warning, "a reboot removes these rules",
		"bridge, ptp, portmap or firewall left rules for %s "+
			"that no container uses: %s", term.Plural(len(free), "address", "addresses"),
		term.Join(term.Addresses(free)))
}

// freeOf returns those of the given addresses that host-local can assign now.
func freeOf(found *inspect.Node, all []netip.Addr) (free []netip.Addr) {
	for _, p := range found.Pools {
		taken, err := pools.Taken(p.Dir)
		for _, a := range all {
			if err == nil && p.InRange(a) && !slices.Contains(taken, a) {
				free = append(free, a)
			}
		}
	}
	return free
}

// inRules returns the addresses in rules of the reference plugins, sorted, as far as the rules can
// be listed. Plugins have the same PATH, so they created no rules with a program that is missing.
func inRules(ctx context.Context) (all []netip.Addr) {
	var rules []string
	for _, program := range [][]string{
		{"iptables-save"}, {"ip6tables-save"}, {"nft", "list", "ruleset"},
	} {
		rules = append(rules, printed(ctx, program...)...)
	}
	table := ""
	for _, rule := range rules {
		if name, is := strings.CutPrefix(rule, "table "); is {
			table = name
		}
		if !strings.Contains(rule, "CNI-") && !strings.Contains(table, " cni_") {
			continue
		}
		for _, word := range strings.Fields(rule) {
			if a, is := addressOf(word); is {
				all = append(all, a)
			}
		}
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all)
}

// printed runs a program and returns the lines of its standard output, or none if it fails. A node
// with many services has about ten thousand rules.
func printed(ctx context.Context, program ...string) []string {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, program[0], program[1:]...)
	cmd.WaitDelay = time.Second / 2
	out, err := cmd.Output()
	if err != nil {
		return nil
	}
	return slices.Collect(strings.Lines(string(out)))
}

// addressOf parses a word of a rule as an address, also with a port or as a single-address prefix.
func addressOf(word string) (netip.Addr, bool) {
	if to, err := netip.ParseAddrPort(word); err == nil {
		return to.Addr(), true
	}
	if p, err := netip.ParsePrefix(word); err == nil && p.IsSingleIP() {
		return p.Addr(), true
	}
	a, err := netip.ParseAddr(word)
	return a, err == nil
}
