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

// mayHavePorts reports whether a host port may forward to the record's addresses.
func (u *undoing) mayHavePorts() bool { return u.Unrecorded || HadPorts(u.Entry) }

// stillForwarded returns what a DEL of portmap that passed has left, or "". It passes without
// effect if it cannot use the backend that has its rules. To an address that the attachment does
// not hold any more, a rule may be the next owner's.
func (u *undoing) stillForwarded(ctx context.Context, s *journal.Step) string {
	if s.Type != "portmap" || !u.mayHavePorts() {
		return ""
	}
	for _, c := range u.Entry.Claims {
		if !c.Receives(s.Index) || c.Pool != "" && !u.holds(c) {
			continue
		}
		if why := u.ForwardedTo(ctx, c.Address, false); why != "" {
			return why
		}
	}
	return ""
}

// heldBack returns why a claimed address must not be given back, or "".
func (u *undoing) heldBack(ctx context.Context, c journal.Claim) string {
	if !u.mayHavePorts() {
		return ""
	}
	mayHaveRule := HadPorts(u.Entry) && !slices.ContainsFunc(u.Entry.Steps,
		func(s journal.Step) bool { return s.Type == "portmap" && !decide.MayHaveTaken(&s) })
	return u.ForwardedTo(ctx, c.Address, mayHaveRule)
}

// forwarded returns why the DEL of a step would give back an address that must not be, or "".
func (u *undoing) forwarded(ctx context.Context, s *journal.Step) string {
	for _, c := range u.Entry.Claims {
		if c.Step != s.Index || c.Pool != "" && !u.holds(c) {
			continue
		}
		if why := u.heldBack(ctx, c); why != "" {
			return why
		}
	}
	return ""
}
