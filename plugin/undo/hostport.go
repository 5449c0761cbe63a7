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
)

// No address is given back while a host port of this node forwards to it: the next pod would get
// the traffic of the last one.

// ForwardedTo returns why an address must not be given back, or "". mayHaveRule says that the ADD
// may have made a rule, which decides if the rules cannot be listed.
func (w *Worker) ForwardedTo(ctx context.Context, a netip.Addr, mayHaveRule bool) string {
	switch is, err := facts.ForwardsTo(ctx, a); {
	case !decide.HoldBack(is, mayHaveRule):
		return ""
	case err != nil:
		return fmt.Sprintf("it is unknown whether a host port forwards to %s: %v", a, err)
	}
	return fmt.Sprintf("a host port of this node still forwards to %s", a)
}

// HadPorts reports whether an ADD had port mappings.
func HadPorts(e *journal.Entry) bool {
	var conf struct {
		PortMappings []json.RawMessage `json:"portMappings"`
	}
	return json.Unmarshal(e.RuntimeConfig, &conf) == nil && len(conf.PortMappings) > 0
}

// forwarded returns why one of the claimed addresses must not be given back, or "". An address that
// the attachment does not hold any more does not count: the rule may be the next owner's.
func (u *undoing) forwarded(
	ctx context.Context, mayHaveRule bool, concerns func(journal.Claim) bool,
) (why string) {
	if !u.Unrecorded && !HadPorts(u.Entry) {
		return ""
	}
	for _, c := range u.Entry.Claims {
		if why == "" && concerns(c) && (c.Pool == "" || u.holds(c)) {
			why = u.ForwardedTo(ctx, c.Address, mayHaveRule)
		}
	}
	return why
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
