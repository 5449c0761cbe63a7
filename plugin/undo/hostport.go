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

// The problem: if a host port of this node still forwards to an address that is released, the next
// pod with that address gets the traffic of the previous one. So no address is released while a
// host port forwards to it.

// ForwardsTo reports whether a host port of this node forwards to an address. Unless the result is
// no, why says why the address must not be released.
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

// forwarded returns why one of the claimed addresses must not be released, or "". It skips an
// address that the attachment no longer holds, because the rule may belong to the next owner. Once
// no rule exists for an address, forwarded does not list the rules again for it in this pass,
// because no new rule can appear.
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

// mayHaveRule reports whether the ADD may have created a rule for its host ports.
func (u *undoing) mayHaveRule() bool {
	return HadPorts(u.Entry) && !slices.ContainsFunc(u.Entry.Steps,
		func(s journal.Step) bool { return s.Type == "portmap" && !decide.MayHaveTaken(&s) })
}

// forwardedBy returns why a step's DEL must not run because it would release an address to which a
// host port forwards, or "".
func (u *undoing) forwardedBy(ctx context.Context, s *journal.Step) string {
	return u.forwarded(ctx, u.mayHaveRule(),
		func(c journal.Claim) bool { return c.Step == s.Index })
}

// leftByPortmap returns which rule a successful portmap DEL has left, or "". portmap's DEL succeeds
// without effect if it cannot use the backend that contains its rules.
func (u *undoing) leftByPortmap(ctx context.Context, s *journal.Step) string {
	if s.Type != "portmap" {
		return ""
	}
	return u.forwarded(ctx, false, func(c journal.Claim) bool { return c.Receives(s.Index) })
}
