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
	addresses            []netip.Addr
	made                 time.Time // the youngest it has, by the wall clock; zero if unknown
	grace                time.Duration
	files                []Cached                  // of libcni's cache, beside those of the network
	skip                 func(host.Interface) bool // interfaces of others; nil: none
}

// JudgeReservation judges a reservation whose owner the journal does not know.
func (n *Node) JudgeReservation(network string, r ipam.Reservation, grace time.Duration) Verdict {
	made, _ := r.Changed() // zero with an error
	return DecideOrphan(n.lookAtOwner(owner{network: network, containerID: r.Owner.ContainerID,
		addresses: []netip.Addr{r.Address}, made: made, grace: grace}))
}

// JudgeCached judges an attachment in libcni's cache that the journal does not know. It is as young
// as the youngest of its reservations in the pools of its chain: a DEL takes them all.
func (n *Node) JudgeCached(c *Cached, grace time.Duration) Verdict {
	o := owner{network: c.Network, containerID: c.ContainerID,
		addresses: netconf.InterfaceOf(c.Result, c.IfName).Addresses, made: c.Written, grace: grace}
	chain, conf, err := c.Chain()
	if err != nil || chain == nil {
		return unknown("its chain cannot be read", Doubt(err))
	}
	for _, step := range chain.Steps(conf) {
		found, err := ipam.Scan(ipam.Pool(step.Config, c.Network))
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
	return DecideOrphan(n.lookAtOwner(o))
}

// JudgeLeft judges a container that has left rules with some addresses, files of libcni's cache
// (own), or both. It is as young as the youngest of these files: an ADD that has made rules is
// known by its interface, which has the address before. An interface does not count if it is in the
// network namespace of another container that has the address by a file of others.
func (n *Node) JudgeLeft(
	k journal.Key, addresses []netip.Addr, grace time.Duration, own, others []Cached,
) Verdict {
	o := owner{network: k.Network, containerID: k.ContainerID, addresses: addresses,
		made: time.Unix(0, 0), grace: grace, files: own}
	for _, c := range own {
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
	return DecideOrphan(n.lookAtOwner(o))
}

func (n *Node) lookAtOwner(o owner) Orphan {
	cache, cacheErr := n.CachedAttachments(o.network, o.containerID)
	cache = append(cache, o.files...)
	seen := Orphan{SameNamespaces: n.SeesAsRuntime()}
	seen.Listed = n.List.HasContainer(o.network, o.containerID, cache)
	if seen.Listed == tristate.Yes {
		return seen
	}
	if !o.made.IsZero() {
		// The wall clock may have been set since, but not before the machine was started.
		age := min(time.Since(o.made), time.Duration(journal.BootNanos()))
		seen.PastGracePeriod = tristate.Of(age > o.grace, nil)
	}
	seen.Cached = tristate.Of(false, cacheErr)
	for _, c := range cache {
		if _, err := host.Identify(c.NetNS); c.NetNS == "" || err == nil || !host.IsNoNetNS(err) {
			seen.Cached = tristate.Yes
		}
	}
	old := seen.PastGracePeriod == tristate.Yes && seen.Cached == tristate.No
	if old || seen.Listed == tristate.Unknown {
		seen.InUse = tristate.No
		if len(o.addresses) > 0 {
			var err error
			seen.InUse, err = n.InUse(o.addresses, o.skip)
			seen.Doubt = Doubt(err)
		}
	}
	return seen
}
