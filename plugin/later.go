package plugin

import (
	"context"
	"errors"
	"net/netip"
	"slices"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/internal/tristate"
	"cni-unwind/plugin/netconf"
)

// A container ID, a path, a namespace and a static address may come again, and the journal may not
// have seen it: unwind was switched off, or the journal could not be written. later looks for such
// an ADD before unwind undoes anything without the runtime's DEL. shows asks whose the interface in
// a namespace is before a delegate gets the namespace.

// later says whether an ADD that is not in the journal added the attachment again and lives. unwind
// then does not undo the old ADD: its DELs go by container ID and interface, and would take what
// the delegates took for the later one.
//
// Something has to speak for a later ADD before later searches the namespaces: libcni's cache has
// another result, host-local has given the attachment another address or the same one again, or an
// address is of an IPAM plugin that names no owner. The interface of that ADD also has to be there:
// without one in any namespace, the later ADD is as dead as the old one. An error says why the
// answer is unknown.
func (o *op) later(ctx context.Context, e *journal.Entry) (tristate.Value, error) {
	cachedInterface, err := o.cachedInterface(e)
	if err != nil {
		return tristate.Unknown, err
	}
	if o.laterInOwnNetNS(ctx, e, cachedInterface) {
		return tristate.Yes, nil
	}
	suspects, err := o.suspects(e, cachedInterface)
	if err != nil {
		return tristate.Unknown, err
	}
	if len(suspects) == 0 {
		return tristate.No, nil
	}
	all, err := o.view.All(o.log)
	for _, seen := range all {
		if seen.Name != e.IfName || o.isOwn(e, seen.Netns) || o.isHost(seen.Netns) {
			continue
		}
		for _, s := range suspects {
			if seen.Is(s.Interface) && !(s.anybody && o.anothers(ctx, e.Key, seen)) {
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

// cachedInterface returns the interface of the ADD in libcni's cache, or none if the journal has
// that ADD.
func (o *op) cachedInterface(e *journal.Entry) (journal.Interface, error) {
	c, err := o.cachedADD(e.Key)
	if c == nil || err != nil {
		return journal.Interface{}, err
	}
	found := netconf.InterfaceOf(c.Result, e.IfName)
	if anySameADD(interfacesOf(e), found) == tristate.Yes {
		return journal.Interface{}, nil
	}
	return found, nil
}

// takeCached adds the ADD in libcni's cache, if the journal does not have it, so that it is undone
// as well: it is as dead as the others. The cache has its chain too. For an ADD through unwind,
// takeCached assumes the delegates of the newest ADD, with unknown outcomes.
func (o *op) takeCached(e *journal.Entry) {
	newest := e.Newest()
	found, err := o.cachedInterface(e)
	if err != nil || !found.Known() || o.sameBoot(newest) != tristate.Yes ||
		anySameADD(e.Undone, found) == tristate.Yes {
		return
	}
	c, err := o.cachedADD(e.Key)
	if c == nil || err != nil {
		return
	}
	gen := journal.Generation{
		NetNS: journal.NetNS{Path: c.NetNS}, Args: newest.Args, Path: newest.Path,
		CNIVersion: newest.CNIVersion, RuntimeConfig: newest.RuntimeConfig,
		Host: newest.Host, Created: journal.Now(), GracePeriod: newest.GracePeriod,
		AWSCheckpoint: newest.AWSCheckpoint,
	}
	conf := netconf.DefaultConf()
	conf.Name, conf.RuntimeConfig = e.Network, c.RuntimeConfig
	if chain, err := conf.ParseChain(c.Config, ""); err == nil {
		gen.CNIVersion, gen.Steps = chain.CNIVersion, chain.Steps(conf)
		gen.RuntimeConfig = netconf.Marshal(c.RuntimeConfig)
	} else {
		for _, s := range newest.Steps {
			gen.Steps = append(gen.Steps, journal.Step{
				Index: s.Index, Type: s.Type, Config: s.Config, ADD: journal.AddCutOff,
			})
		}
	}
	if gen.Result, err = netconf.ConvertResult(c.Result, gen.CNIVersion); err != nil {
		o.log.Warn("the result in libcni's cache cannot be used", "attachment", e.Key.String(), "err", err)
		return
	}
	by := broughtBy(e, gen.Steps)
	for _, address := range found.Addresses {
		gen.Claims = append(gen.Claims, journal.Claim{Address: address, Step: by.Step, Pool: by.Pool})
	}
	e.Generations = append(e.Generations, gen)
}

// broughtBy returns a claim without an address, of the delegate that brings the addresses of an ADD
// with these steps. If none of them does, that delegate's step is undone: it is the one of the newest
// ADD, or one before all.
func broughtBy(e *journal.Entry, steps []journal.Step) journal.Claim {
	for _, s := range steps {
		if pool := ipam.Pool(s.Config, e.Network); pool != "" {
			return journal.Claim{Step: s.Index, Pool: pool}
		}
	}
	if claims := e.Newest().Claims; len(claims) > 0 {
		return claims[0]
	}
	return journal.Claim{Step: -1}
}

// laterInOwnNetNS says whether a later ADD has its interface in the namespace of the newest ADD in
// the journal.
func (o *op) laterInOwnNetNS(ctx context.Context, e *journal.Entry, cachedInterface journal.Interface) bool {
	g := e.Newest()
	if o.sameBoot(g) != tristate.Yes || !g.NetNS.Known() {
		return false
	}
	place, _ := host.Find(g.NetNS)
	defer place.Close()
	seen, err := host.Look(place.Path, e.IfName)
	if err != nil || !seen.Netns.Same(g.NetNS) || !seen.There() || o.isHost(seen.Netns) {
		return false
	}
	if seen.Is(cachedInterface) {
		return true
	}
	own := netconf.InterfaceOf(g.Result, e.IfName)
	return seen.HasMAC(own) == tristate.No && seen.HasAny(own) != tristate.Yes && !o.anothers(ctx, e.Key, seen)
}

// suspects returns the interfaces that speak for a later ADD.
func (o *op) suspects(e *journal.Entry, cachedInterface journal.Interface) ([]suspect, error) {
	var all []suspect
	if cachedInterface.Known() {
		all = append(all, suspect{Interface: cachedInterface})
	}
	var pools []string
	for _, g := range e.Generations {
		for _, c := range g.Claims {
			one := journal.Interface{Addresses: []netip.Addr{c.Address}}
			switch {
			case c.Pool == "":
				all = append(all, suspect{one, true})
			case !slices.Contains(pools, c.Pool):
				pools = append(pools, c.Pool)
			}
		}
	}
	for _, pool := range pools {
		again, err := o.reservedAgain(pool, e)
		if err != nil {
			return nil, err
		}
		if len(again) > 0 {
			all = append(all, suspect{Interface: journal.Interface{Addresses: again}})
		}
	}
	return all, nil
}

// reservedAgain returns the addresses that host-local has given to an attachment since the
// journal's last write of it: unclaimed ones, or claimed ones at a later time.
func (o *op) reservedAgain(pool string, e *journal.Entry) ([]netip.Addr, error) {
	found, err := o.pools.reservations(pool)
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

// isOwn says whether an ADD of the attachment in the journal ran in a namespace.
func (o *op) isOwn(e *journal.Entry, netns journal.NetNS) bool {
	return slices.ContainsFunc(e.Generations, func(g journal.Generation) bool {
		return o.sameBoot(&g) == tristate.Yes && g.NetNS.Same(netns)
	})
}

// isHost says whether a namespace is that of this process.
func (o *op) isHost(netns journal.NetNS) bool {
	return o.host.NetNS != "" && host.LinkOf(netns) == o.host.NetNS
}

// anothers says whether an interface is another attachment's, by the journal or libcni's cache.
func (o *op) anothers(ctx context.Context, key journal.Key, seen host.Interface) (is bool) {
	o.read(context.WithoutCancel(ctx), func(tx *journal.Tx) error { // in doubt it would be nobody's
		var candidates []journal.Key // inodes come again; only the entry tells namespaces apart
		err := tx.Outlines(func(other journal.Outline, err error) error {
			if err == nil && other.Key != key && other.IfName == key.IfName &&
				other.State == journal.Live && other.BootID == o.host.BootID &&
				other.NetNS.Ino == seen.Netns.Ino {
				candidates = append(candidates, other.Key)
			}
			return nil
		})
		for _, k := range candidates {
			other, getErr := readable(tx.Get(k))
			is = is || other != nil && other.Newest().NetNS.Same(seen.Netns)
			err = errors.Join(err, getErr)
		}
		return err
	})
	if is {
		return true
	}
	all, err := o.readCache("")
	if err != nil {
		o.log.Warn("looking for the owner of an interface", "attachment", key.String(), "err", err)
	}
	return slices.ContainsFunc(all, func(c cached) bool {
		return c.key() != key && c.IfName == key.IfName && seen.Is(netconf.InterfaceOf(c.Result, c.IfName))
	})
}
