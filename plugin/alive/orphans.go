package alive

import (
	"net/netip"
	"slices"
	"time"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/tristate"
)

// LookAtReservation gathers the evidence on a reservation whose owner the journal does not know.
func (n *Node) LookAtReservation(network string, r ipam.Reservation, grace time.Duration) Orphan {
	made, err := r.Changed()
	if err != nil {
		made = time.Time{}
	}
	return n.lookAtOrphan(network, r.Owner.ContainerID, []netip.Addr{r.Address}, made, grace)
}

// LookAtCached gathers the evidence on an attachment in libcni's cache that the journal does not
// know. It is as young as the youngest of its reservations in some pools: a DEL takes them all.
func (n *Node) LookAtCached(c CacheFile, pools []string, grace time.Duration) Orphan {
	addresses, made := netconf.InterfaceOf(c.Result, c.IfName).Addresses, c.Written
	for _, pool := range pools {
		found, err := ipam.Scan(pool)
		if err != nil {
			made = time.Time{}
		}
		for _, r := range found {
			if r.Ownerless() || !r.Owner.Is(c.ContainerID, c.IfName) {
				continue
			}
			addresses = append(addresses, r.Address)
			if changed, err := r.Changed(); err != nil || !made.IsZero() && changed.After(made) {
				made = changed // zero with an error
			}
		}
	}
	return n.lookAtOrphan(c.Network, c.ContainerID, addresses, made, grace)
}

// lookAtOrphan gathers the evidence on a container with some addresses, of which the youngest thing
// was made at a time by the wall clock; it is zero if that cannot be told.
func (n *Node) lookAtOrphan(
	network, containerID string, addresses []netip.Addr, made time.Time, grace time.Duration,
) Orphan {
	seen := Orphan{SameNamespaces: n.SeesAsRuntime()}
	cache, err := n.CachedAttachments(network, containerID)
	seen.Listed = n.List.HasContainer(network, containerID, cache)
	if seen.Listed == tristate.Yes {
		return seen
	}
	if !made.IsZero() {
		// The wall clock may have been set since, but not before the machine was started.
		age := min(time.Since(made), time.Duration(journal.BootNanos()))
		seen.PastGracePeriod = tristate.Of(age > grace, nil)
	}
	seen.Cached = tristate.Of(false, err)
	for _, c := range cache {
		if _, err := host.Identify(c.NetNS); c.NetNS == "" || err == nil || !host.IsNoNetNS(err) {
			seen.Cached = tristate.Yes
		}
	}
	old := seen.PastGracePeriod == tristate.Yes && seen.Cached == tristate.No
	if old || seen.Listed == tristate.Unknown {
		seen.InUse = tristate.No
		for _, a := range slices.Compact(addresses) {
			used, err := n.InUse(a, nil)
			if used != tristate.No {
				seen.InUse, seen.Doubt = used, Doubt(err)
			}
			if used == tristate.Yes {
				break
			}
		}
	}
	return seen
}
