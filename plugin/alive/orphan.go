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

// Orphan is the evidence on a reservation, or on an attachment in libcni's cache, whose owner is
// not in the journal. A list covers it by container, regardless of the interface.
type Orphan struct {
	SameNamespaces  tristate.Value // this process sees what the runtime sees
	Listed          tristate.Value // a list has the container; unknown if none covers it
	PastGracePeriod tristate.Value // the reservation is older than the grace period
	Cached          tristate.Value // libcni's cache has it with an existing network namespace
	InUse           tristate.Value // an interface in some network namespace has the address
	Doubt           string         // for people: why the look for that interface failed, or ""
}

// DecideOrphan returns the verdict on a reservation whose owner is not in the journal. The owner is
// a pod from before the installation or, after a loss of the journal, any pod (antrea#8239). The
// reservation is dead only if all evidence agrees. No list of pods covers a container of nerdctl or
// podman: it is live if its address is there, else unknown.
func DecideOrphan(o Orphan) Verdict {
	switch {
	case o.SameNamespaces != tristate.Yes:
		return unknown("this process does not see what the runtime sees; run this on the host, or with "+
			"--cri", "")
	case o.Listed == tristate.Unknown && o.InUse == tristate.Yes:
		return live("no list of the runtime covers its owner, but an interface has the address")
	case o.Listed == tristate.Unknown:
		return unknown("its owner is not in the journal, and no list of the runtime covers it", o.Doubt)
	case o.Listed == tristate.Yes:
		return live("the runtime lists its owner")
	case o.PastGracePeriod == tristate.Unknown:
		return unknown("its age is unknown", "")
	case o.PastGracePeriod == tristate.No:
		return Verdict{Fate: Live, Reason: Reason{WithinGrace.Code,
			"the runtime does not list its owner, but the grace period has not expired"}}
	case o.Cached == tristate.Unknown:
		return unknown("libcni's cache cannot be read", "")
	case o.Cached == tristate.Yes:
		return live("libcni's cache has its owner, and the owner's network namespace exists")
	case o.InUse == tristate.Unknown:
		return unknown("some network namespaces cannot be inspected", o.Doubt)
	case o.InUse == tristate.Yes:
		return live("an interface has the address")
	}
	return dead(Reason{"orphan", "its owner is neither in the journal nor in the runtime's list, " +
		"and no interface has the address"})
}

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
