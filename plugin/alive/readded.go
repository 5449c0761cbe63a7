package alive

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"slices"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/record"
	"cni-unwind/plugin/tristate"
)

// Later reports whether an ADD without a journal entry added the attachment again and is live:
// unwind was disabled, or the journal could not be written. unwind then does not undo the old ADD:
// its DELs go by container ID and interface, and would release what the delegates took for the
// later one.
//
// Later searches the namespaces only if something indicates a later ADD: libcni's cache has another
// result, host-local has assigned the attachment another address or the same one again, or an
// address comes from an IPAM plugin that records no owner. The interface of that ADD must also
// exist: without one in any namespace, the later ADD is as dead as the old one. An error says why
// the result is unknown.
func (n *Node) Later(ctx context.Context, e *journal.Entry) (tristate.Value, error) {
	c, err := n.CachedUnseen(e)
	if err != nil {
		return tristate.Unknown, err
	}
	var cachedInterface journal.Interface
	if c != nil {
		cachedInterface = netconf.InterfaceOf(c.Result, e.IfName)
	}
	if n.laterInOwnNetNS(ctx, e, cachedInterface) {
		return tristate.Yes, nil
	}
	suspects, err := n.suspects(e, cachedInterface)
	if err != nil {
		return tristate.Unknown, err
	}
	if len(suspects) == 0 {
		return tristate.No, nil
	}
	all, err := n.View.All(n.Log)
	for _, seen := range all {
		if seen.Name != e.IfName || n.IsOwn(e, seen.Netns) || n.IsHost(seen.Netns) {
			continue
		}
		for _, s := range suspects {
			if seen.Is(s.Interface) && !(s.anybody && n.Anothers(ctx, e.Key, seen)) {
				return tristate.Yes, nil
			}
		}
	}
	return tristate.Of(false, err), err
}

// suspect is an interface that a later ADD of an attachment may have.
type suspect struct {
	journal.Interface
	anybody bool // an ADD of another attachment may have the interface as well
}

// CachedUnseen returns the ADD in libcni's cache, or nil if there is none or the journal has it.
func (n *Node) CachedUnseen(e *journal.Entry) (*Cached, error) {
	c, err := n.CachedADD(e.Key)
	if c == nil || err != nil ||
		AnySameADD(InterfacesOf(e), netconf.InterfaceOf(c.Result, e.IfName)) == tristate.Yes {
		return nil, err
	}
	return c, nil
}

// laterInOwnNetNS reports whether a later ADD has its interface in the namespace of the newest
// recorded ADD.
func (n *Node) laterInOwnNetNS(
	ctx context.Context, e *journal.Entry, cachedInterface journal.Interface,
) bool {
	g := e.Newest()
	if n.SameBoot(g) != tristate.Yes || !g.NetNS.Known() {
		return false
	}
	place, _ := host.Find(g.NetNS)
	defer place.Close()
	seen, err := host.Look(place.Path, e.IfName)
	if err != nil || !seen.Netns.Same(g.NetNS) || !seen.There() || n.IsHost(seen.Netns) {
		return false
	}
	if seen.Is(cachedInterface) {
		return true
	}
	own := netconf.InterfaceOf(g.Result, e.IfName)
	return seen.HasMAC(own) == tristate.No && seen.HasAny(own) != tristate.Yes &&
		!n.Anothers(ctx, e.Key, seen)
}

// suspects returns the interfaces that would indicate a later ADD.
func (n *Node) suspects(e *journal.Entry, cachedInterface journal.Interface) ([]suspect, error) {
	var all []suspect
	if cachedInterface.Known() {
		all = append(all, suspect{Interface: cachedInterface})
	}
	for _, g := range e.Generations {
		for _, c := range g.Claims {
			if c.Pool == "" {
				one := journal.Interface{Addresses: []netip.Addr{c.Address}}
				all = append(all, suspect{one, true})
				continue
			}
			again, err := n.reservedAgain(c.Pool, e)
			if err != nil {
				return nil, err
			}
			if len(again) > 0 {
				all = append(all, suspect{Interface: journal.Interface{Addresses: again}})
			}
		}
	}
	return all, nil
}

// reservedAgain returns the addresses that host-local has assigned to an attachment since its entry
// was last written: unclaimed ones, or claimed ones with a later timestamp.
func (n *Node) reservedAgain(pool string, e *journal.Entry) ([]netip.Addr, error) {
	found, err := n.Pools.reservations(pool)
	if err != nil {
		return nil, err
	}
	claimed := e.Addresses()
	var again []netip.Addr
	for _, r := range found {
		if r.Ownerless() || !r.Owner.Is(e.ContainerID, e.IfName) {
			continue
		}
		changed, err := r.Changed()
		if !slices.Contains(claimed, r.Address) || err == nil && changed.After(e.Updated.Wall) {
			again = append(again, r.Address)
		}
	}
	return again, nil
}

// InterfacesOf returns the known interfaces of the ADDs that an entry still has.
func InterfacesOf(e *journal.Entry) []journal.Interface {
	var all []journal.Interface
	for i := range e.Generations {
		if named := netconf.InterfaceOf(e.Generations[i].Result, e.IfName); named.Known() {
			all = append(all, named)
		}
	}
	return all
}

// sameADD reports whether two results can come from the same ADD. A conversion to an old version of
// the specification drops the interfaces and all but one address per family, so the addresses of
// one may be a subset of the other's.
func sameADD(a, b journal.Interface) tristate.Value {
	if a.MAC != "" && b.MAC != "" && a.MAC != b.MAC {
		return tristate.No
	}
	if len(a.Addresses) > len(b.Addresses) {
		a, b = b, a
	}
	for _, address := range a.Addresses {
		if !slices.Contains(b.Addresses, address) {
			return tristate.No
		}
	}
	return tristate.Equal(a.MAC != "" && b.MAC != "" || len(a.Addresses) > 0, true)
}

// AnySameADD reports whether any of several interfaces can come from the same ADD as another one.
func AnySameADD(all []journal.Interface, one journal.Interface) tristate.Value {
	found := tristate.No
	for _, i := range all {
		switch same := sameADD(i, one); {
		case same == tristate.Yes:
			return tristate.Yes
		case same == tristate.Unknown:
			found = tristate.Unknown
		}
	}
	return found
}

// Passed reports whether the DEL of an attachment has succeeded although the journal still has it
// as live, because the journal could not be written. It needs both pieces of evidence: an operator
// may have cleared host-local's files, and the runtime may have no cache.
func (n *Node) Passed(e *journal.Entry) bool {
	return OwnsClaim(e) == tristate.No && n.IsCached(e.Key) == tristate.No
}

// OwnsClaim reports whether host-local's files have one of the claimed addresses for the
// attachment.
func OwnsClaim(e *journal.Entry) tristate.Value {
	owns := tristate.Unknown
	owner := ipam.Owner{ContainerID: e.ContainerID, IfName: e.IfName}
	for _, g := range e.Generations {
		for _, c := range g.Claims {
			if c.Pool == "" {
				continue
			}
			lost, err := ipam.Lost(c.Pool, owner, c.Address)
			if owns = tristate.Of(!lost, err); owns != tristate.No {
				return owns
			}
		}
	}
	return owns
}

// IsCached reports whether libcni's cache has an attachment. Without a cache the result is unknown.
func (n *Node) IsCached(k journal.Key) tristate.Value {
	c, err := n.CachedADD(k)
	if c == nil && err == nil {
		_, err = os.Stat(n.cacheDir())
	}
	return tristate.Of(c != nil, err)
}

// Anothers reports whether an interface belongs to another attachment, according to the journal or
// libcni's cache.
func (n *Node) Anothers(ctx context.Context, key journal.Key, seen host.Interface) (is bool) {
	// in doubt it would be nobody's
	n.Journal.Read(context.WithoutCancel(ctx), func(tx *journal.Tx) error {
		var unread error
		err := tx.Outlines(func(other journal.Outline, _ error) error { // a damaged one is not live
			if is || other.Key == key || other.IfName != key.IfName ||
				other.State != journal.Live || other.BootID != n.Host.BootID ||
				other.NetNS.Ino != seen.Netns.Ino {
				return nil
			}
			// Inodes come again; only the entry tells namespaces apart.
			e, err := record.Readable(tx.Get(other.Key))
			is = e != nil && e.Newest().NetNS.Same(seen.Netns)
			unread = errors.Join(unread, err)
			return nil
		})
		return errors.Join(err, unread)
	})
	if is {
		return true
	}
	all, err := n.readCache("", 0)
	if err != nil {
		n.Log.Warn("cannot read libcni's cache for the owner of an interface", "attachment", key.String(),
			"err", err)
	}
	return slices.ContainsFunc(all, func(c Cached) bool {
		return c.Key() != key && c.IfName == key.IfName &&
			seen.Is(netconf.InterfaceOf(c.Result, c.IfName))
	})
}
