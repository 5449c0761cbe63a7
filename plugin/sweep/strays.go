package sweep

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/netconf"
)

// owner is an attachment that is not in the journal. It has addresses in a host-local pool, a file
// in libcni's cache, or both.
type owner struct {
	journal.Key
	Pod     journal.Pod // from the runtime's list or libcni's cache
	held    []ipam.Reservation
	cached  *facts.Cached  // its file in the cache, if from this boot, or nil
	chain   *netconf.Chain // the chain of the cached ADD, or else of the first pool
	conf    *netconf.Conf
	written []time.Time // when its files were written, by the wall clock
	grace   decide.Grace
}

// addresses returns the owner's addresses in host-local and in libcni's cache, without duplicates.
func (o *owner) addresses() (all []netip.Addr) {
	if o.cached != nil {
		all = netconf.AddressesOf(o.cached.Result)
	}
	for _, r := range o.held {
		all = append(all, r.Address)
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all)
}

// getsDELs reports whether the sweep runs DELs for an owner. DELs need the chain, and the interface
// name, which host-local before 0.8 did not write. An owner of an earlier boot gets no DELs: the
// kernel keeps nothing across a boot, and the disk may be a copy of another machine's, so a DEL
// could release an address that the other machine uses. If the clock does not show the owner's
// boot, the DELs run only if no IPAM plugin except host-local can have assigned an address.
func (o *owner) getsDELs() bool {
	if o.chain == nil || o.IfName == "" || o.grace.SameBoot == decide.False {
		return false
	}
	return o.grace.SameBoot == decide.True ||
		!slices.ContainsFunc(o.chain.Steps(o.conf), func(s journal.Step) bool { return s.MayAllocate })
}

// path returns the path of one of the owner's files.
func (o *owner) path() string {
	if o.cached != nil {
		return o.cached.Path
	}
	return o.held[0].Path()
}

// planOwners returns the verdict on each owner that is not in the journal. Without the runtime's
// list, no owner can be proven dead. So if there is no list, planOwners judges owners only if a
// command asks for it (Options.Cache).
func (s *Sweep) planOwners(ctx context.Context) (findings []Finding, err error) {
	if s.List == nil && !s.Cache || s.Attachment != nil {
		return nil, nil
	}
	known, damaged := s.w.Node.Journal.Snapshot(ctx).Containers()
	g := &gathering{Sweep: s, byKey: map[journal.Key]*owner{}, noChain: map[string][]string{},
		inJournal: known}
	for _, p := range s.Pools {
		g.addPool(p)
	}
	cache, cacheErr := s.w.Node.Cache()
	for i := range cache {
		g.addCached(&cache[i])
	}
	if s.Cache {
		g.errs = append(g.errs, cacheErr)
		for _, why := range slices.Sorted(maps.Keys(g.noChain)) {
			files := g.noChain[why]
			g.errs = append(g.errs, fmt.Errorf("skipped %d of the files in libcni's cache, such as %s: %s",
				len(files), files[0], why))
		}
	}
	for _, o := range g.all {
		findings = append(findings, s.findingOn(o, damaged))
	}
	return findings, errors.Join(g.errs...)
}

// gathering collects the owners that are not in the journal: the owners of addresses, and of files
// in libcni's cache.
type gathering struct {
	*Sweep
	all       []*owner
	byKey     map[journal.Key]*owner
	inJournal map[string]bool // container IDs
	// noChain contains, by error, the files of libcni's cache whose chain is unusable because of that
	// error. If a chainFile is missing, all files of its network have the same error.
	noChain map[string][]string
	errs    []error
}

// add returns the owner with a key, and adds it if it is new.
func (g *gathering) add(key journal.Key) *owner {
	o := g.byKey[key]
	if o == nil {
		o = &owner{Key: key}
		if g.List != nil {
			o.Pod = g.List.Named[key.ContainerID]
		}
		g.all, g.byKey[key] = append(g.all, o), o
	}
	return o
}

// addPool adds the owners of the addresses in a pool.
func (g *gathering) addPool(p Pool) {
	found, err := ipam.Scan(p.Dir)
	g.errs = append(g.errs, err)
	for _, r := range found {
		if r.Empty() || g.inJournal[r.Owner.ContainerID] {
			continue
		}
		o := g.add(journal.Key{Network: p.Network, ContainerID: r.Owner.ContainerID,
			IfName: r.Owner.IfName})
		if len(o.held) == 0 {
			o.chain, o.conf = p.chain, p.conf
		}
		g.hold(o, r)
	}
}

func (g *gathering) hold(o *owner, r ipam.Reservation) {
	o.held, o.written = append(o.held, r), append(o.written, r.Made())
}

// addCached adds an attachment from libcni's cache. If addPool has already added it, addCached
// completes it, for example with the chain if that is usable and from this boot. Otherwise,
// addCached skips the attachment in four cases: without Options.Cache; without such a chain; if it
// has no address, because it cannot be judged; and if its ADD ran through unwind, because the
// journal is responsible for it. (If addPool has added an attachment whose ADD ran through unwind,
// the journal must have been lost.)
func (g *gathering) addCached(c *facts.Cached) {
	if g.inJournal[c.ContainerID] || g.Network != "" && g.Network != c.Network {
		return
	}
	key := c.Key()
	o := g.byKey[key]
	if written := []time.Time{c.Written}; g.w.Node.GraceOfOwner(written, 0).SameBoot != decide.True {
		if o != nil {
			o.written, o.Pod = append(o.written, c.Written), c.Pod()
		}
		return
	}
	chain, conf, through, err := c.Chain()
	switch {
	case err != nil:
		g.noChain[err.Error()] = append(g.noChain[err.Error()], c.Path)
		return
	case o == nil && (through || !g.Cache ||
		len(netconf.AddressesOf(c.Result)) == 0):
		return
	}
	o = g.add(key)
	o.Pod, o.cached, o.chain, o.conf = c.Pod(), c, chain, conf
	o.written = append(o.written, c.Written)
	g.addHeld(o)
}

// addHeld adds the attachment's addresses in pools of its chain that the sweep does not cover, for
// example because the conflist was deleted.
func (g *gathering) addHeld(o *owner) {
	for _, step := range o.chain.Steps(o.conf) {
		dir := ipam.Pool(known.IPAMOf(step.Config).Name, step.Config, o.Network)
		if dir == "" || slices.ContainsFunc(g.Pools, func(p Pool) bool { return p.Dir == dir }) {
			continue
		}
		found, err := ipam.Scan(dir)
		g.errs = append(g.errs, err)
		for _, r := range found {
			if r.Owner.Is(o.ContainerID, o.IfName) {
				g.hold(o, r)
			}
		}
	}
}

// findingOn returns the verdict on an owner, with the DELs that it would get.
func (s *Sweep) findingOn(o *owner, damaged bool) Finding {
	f := Finding{Key: o.Key, Pod: o.Pod, Addresses: o.addresses(), Cached: o.cached != nil, owner: o}
	f.Judgment = s.judge(o, damaged)
	f.Left = o.grace.Left
	if f.Releasable() && o.getsDELs() {
		for _, d := range slices.Backward(o.chain.Delegates) {
			f.Pending = append(f.Pending, d.Type)
		}
	}
	return f
}

// judge returns the verdict on an owner, and sets its grace period. Without Force, it returns
// Unknown instead of Dead in two cases: if the list is empty, because a node usually runs a pod, or
// if a record is damaged, because that record may be the owner's.
func (s *Sweep) judge(o *owner, damaged bool) (v decide.Judgment) {
	v, o.grace = s.w.Node.JudgeOwner(facts.Owner{Network: o.Network, ContainerID: o.ContainerID,
		Addresses: o.addresses(), Written: o.written, Grace: s.graceOf(o)})
	switch {
	case v.Verdict != decide.Dead || s.Force:
	case damaged:
		v = decide.Undecided("a damaged journal record may belong to it; remove that "+
			"record with unwindctl forget, or run unwindctl sweep --force", "")
	case len(s.List.Valid) == 0:
		v = decide.Undecided("the runtime's list is empty, but a node usually has pods; "+
			"if this one has none, run unwindctl sweep --force", "")
	}
	return v
}

// graceOf returns the grace period of an owner's network, from its conflist, or else the default.
func (s *Sweep) graceOf(o *owner) time.Duration {
	for _, p := range s.Pools {
		if p.Network == o.Network {
			return p.conf.GracePeriod
		}
	}
	return s.w.Node.GracePeriod
}
