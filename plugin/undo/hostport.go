package undo

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/tristate"
)

// No address is given back while a host port of this node forwards to it: the next pod would get
// the traffic of the last one.

// ForwardsTo reports whether a host port of this node forwards to an address, and why the address
// must not be given back unless the result is no.
func ForwardsTo(ctx context.Context, a netip.Addr) (is tristate.Value, why string) {
	is, err := facts.ForwardsTo(ctx, a)
	if err != nil {
		return is, fmt.Sprintf("it is unknown whether a host port forwards to %s: %v", a, err)
	}
	return is, fmt.Sprintf("a host port of this node still forwards to %s", a)
}

// HadPorts reports whether an ADD had port mappings.
func HadPorts(e *journal.Entry) bool {
	var conf struct {
		PortMappings []json.RawMessage `json:"portMappings"`
	}
	return json.Unmarshal(e.RuntimeConfig, &conf) == nil && len(conf.PortMappings) > 0
}

// forwarded returns why one of the claimed addresses must not be given back, or "". An address that
// the attachment does not hold any more does not count: the rule may be the next owner's. The rules
// are listed until there is none for the address: during the pass nobody makes another one.
func (u *undoing) forwarded(
	ctx context.Context, mayHaveRule bool, concerns func(journal.Claim) bool,
) string {
	if !u.Unrecorded && !HadPorts(u.Entry) {
		return ""
	}
	for _, c := range u.Entry.Claims {
		if slices.Contains(u.noRule, c.Address) || !concerns(c) || c.Pool != "" && !u.holds(c) {
			continue
		}
		is, why := ForwardsTo(ctx, c.Address)
		if decide.HoldBack(is, mayHaveRule) {
			return why
		}
		if is == tristate.No {
			u.noRule = append(u.noRule, c.Address)
		}
	}
	return ""
}

// mayHaveRule reports whether the ADD may have made a rule for its host ports.
func (u *undoing) mayHaveRule() bool {
	return HadPorts(u.Entry) && !slices.ContainsFunc(u.Entry.Steps,
		func(s journal.Step) bool { return s.Type == "portmap" && !decide.MayHaveTaken(&s) })
}

// forwardedBy returns why the DEL of a step would give back an address that must not be, or "".
func (u *undoing) forwardedBy(ctx context.Context, s *journal.Step) string {
	return u.forwarded(ctx, u.mayHaveRule(),
		func(c journal.Claim) bool { return c.Step == s.Index })
}

// leftByPortmap returns which rule a DEL of portmap that passed has left, or "". It passes without
// effect if it cannot use the backend that has its rules.
func (u *undoing) leftByPortmap(ctx context.Context, s *journal.Step) string {
	if s.Type != "portmap" {
		return ""
	}
	return u.forwarded(ctx, false, func(c journal.Claim) bool { return c.Receives(s.Index) })
}
