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

// owner is a container that the journal does not know, with what may show that it lives.
type owner struct {
	network, containerID string
	cache                []Cached // its files in libcni's cache
	cacheErr             error
	addresses            []netip.Addr
	made                 time.Time // the youngest it has, by the wall clock; zero if unknown
	grace                time.Duration
	skip                 func(host.Interface) bool // interfaces of others; nil: none
}

// LookAtReservation gathers the evidence on a reservation whose owner the journal does not know.
func (n *Node) LookAtReservation(network string, r ipam.Reservation, grace time.Duration) Orphan {
	made, err := r.Changed()
	if err != nil {
		made = time.Time{}
	}
	o := owner{network: network, containerID: r.Owner.ContainerID,
		addresses: []netip.Addr{r.Address}, made: made, grace: grace}
	o.cache, o.cacheErr = n.CachedAttachments(o.network, o.containerID)
	return n.lookAtOwner(o)
}

// LookAtCached gathers the evidence on an attachment in libcni's cache that the journal does not
// know. It is as young as the youngest of its reservations in some pools: a DEL takes them all.
func (n *Node) LookAtCached(c CacheFile, pools []string, grace time.Duration) Orphan {
	o := owner{network: c.Network, containerID: c.ContainerID,
		addresses: netconf.InterfaceOf(c.Result, c.IfName).Addresses, made: c.Written, grace: grace}
	for _, pool := range pools {
		found, err := ipam.Scan(pool)
		if err != nil {
			o.made = time.Time{}
		}
		for _, r := range found {
			if r.Ownerless() || !r.Owner.Is(c.ContainerID, c.IfName) {
				continue
			}
			o.addresses = append(o.addresses, r.Address)
			if changed, err := r.Changed(); err != nil || !o.made.IsZero() && changed.After(o.made) {
				o.made = changed // zero with an error
			}
		}
	}
	o.cache, o.cacheErr = n.CachedAttachments(o.network, o.containerID)
	return n.lookAtOwner(o)
}

// LookAtLeft gathers the evidence on a container that has left rules with some addresses, files of
// libcni's cache (own), or both. It is as young as the youngest of these files: an ADD that has
// made rules is known by its interface, which has the address before. An interface does not count
// if it is in the network namespace of another container that has the address by a file of others.
func (n *Node) LookAtLeft(
	k journal.Key, addresses []netip.Addr, grace time.Duration, own, others []CacheFile,
) Orphan {
	o := owner{network: k.Network, containerID: k.ContainerID, addresses: addresses,
		made: time.Unix(0, 0), grace: grace}
	o.cache, o.cacheErr = n.CachedAttachments(o.network, o.containerID)
	for _, c := range own {
		o.cache = append(o.cache, c.Cached)
		if c.Written.After(o.made) {
			o.made = c.Written
		}
	}
	var theirs []journal.NetNS
	for _, c := range others {
		if id, err := host.Identify(c.NetNS); err == nil && c.ContainerID != o.containerID {
			theirs = append(theirs, id)
		}
	}
	o.skip = func(s host.Interface) bool { return slices.ContainsFunc(theirs, s.Netns.Same) }
	return n.lookAtOwner(o)
}

func (n *Node) lookAtOwner(o owner) Orphan {
	seen := Orphan{SameNamespaces: n.SeesAsRuntime()}
	seen.Listed = n.List.HasContainer(o.network, o.containerID, o.cache)
	if seen.Listed == tristate.Yes {
		return seen
	}
	if !o.made.IsZero() {
		// The wall clock may have been set since, but not before the machine was started.
		age := min(time.Since(o.made), time.Duration(journal.BootNanos()))
		seen.PastGracePeriod = tristate.Of(age > o.grace, nil)
	}
	seen.Cached = tristate.Of(false, o.cacheErr)
	for _, c := range o.cache {
		if _, err := host.Identify(c.NetNS); c.NetNS == "" || err == nil || !host.IsNoNetNS(err) {
			seen.Cached = tristate.Yes
		}
	}
	old := seen.PastGracePeriod == tristate.Yes && seen.Cached == tristate.No
	if old || seen.Listed == tristate.Unknown {
		seen.InUse = tristate.No
		for _, a := range slices.Compact(o.addresses) {
			used, err := n.InUse(a, o.skip)
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
