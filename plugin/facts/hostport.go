package facts

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"time"

	"cni-unwind/plugin/tristate"
)

// ForwardsTo reports whether a host port of this node forwards to an address, whichever container
// the rule was created for. It checks portmap's rules (plugins 1.9.1) in iptables and in nftables.
// If the rules cannot be listed, the result is unknown, and the error says why. If only one of the
// two programs is missing, its rules do not exist.
func ForwardsTo(ctx context.Context, address netip.Addr) (tristate.Value, error) {
	save, family := "iptables-save", "ip"
	if address = address.Unmap(); address.Is6() {
		save, family = "ip6tables-save", "ip6"
	}
	rules, err := Printed(ctx, save, "-t", "nat")
	for _, rule := range rules {
		if strings.HasPrefix(rule, "-A CNI-DN-") && hasTarget(rule, "--to-destination", address) {
			return tristate.Yes, nil
		}
	}
	rules, nftErr := hostPortsTable(ctx, family)
	for _, rule := range rules {
		if hasTarget(rule, "dnat to", address) {
			return tristate.Yes, nil
		}
	}
	missing, nftMissing := errors.Is(err, exec.ErrNotFound), errors.Is(nftErr, exec.ErrNotFound)
	switch {
	case missing && nftMissing, err != nil && !missing:
		return tristate.Unknown, fmt.Errorf("cannot list host ports: %w", err)
	case nftErr != nil && !nftMissing:
		return tristate.Unknown, fmt.Errorf("cannot list host ports: %w", nftErr)
	}
	return tristate.No, nil
}

// hostPortsTable returns the lines of portmap's own nftables table. It returns none if there is no
// such table.
func hostPortsTable(ctx context.Context, family string) ([]string, error) {
	table := "table " + family + " cni_hostport"
	tables, err := Printed(ctx, "nft", "list", "tables", family)
	for _, line := range tables {
		if strings.TrimSpace(line) == table {
			return Printed(ctx, "nft", "list", "table", family, "cni_hostport")
		}
	}
	return nil, err
}

// hasTarget reports whether the address, with a port, directly follows the text after in a rule.
func hasTarget(rule, after string, address netip.Addr) bool {
	_, rest, _ := strings.Cut(rule, " "+after+" ")
	word, _, _ := strings.Cut(strings.TrimSpace(rest), " ")
	to, err := netip.ParseAddrPort(word)
	return err == nil && to.Addr() == address
}

// rulesTime is the timeout of each program that prints rules. A node with many services has about
// ten thousand rules.
const rulesTime = 3 * time.Second

// Printed runs a program and returns the lines of its standard output.
func Printed(ctx context.Context, program ...string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, rulesTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, program[0], program[1:]...)
	cmd.WaitDelay = time.Second / 2
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", program[0], err)
	}
	return slices.Collect(strings.Lines(string(bytes.TrimSpace(out)))), nil
}
