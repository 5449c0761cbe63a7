package undo

import (
	"cmp"
	"context"
	"errors"
	"net/netip"
	"slices"
	"time"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/tristate"
)

// addressesOfOthers returns the addresses of a generation that have another owner: a live
// attachment in the journal, or the owner in host-local's own file. They are removed from the
// prevResult of a DEL (cni#924). If the file cannot be read, or it is unknown whether the other
// attachment is live, the address counts as another owner's: a DEL without it can be repeated
// later, a DEL with it cannot be undone. An address that was just assigned to this ADD does not
// count, because this ADD has nothing yet that a DEL with the address could remove.
func (u *undoing) addressesOfOthers(ctx context.Context, claiming []*journal.Entry) []netip.Addr {
	var othersOwn []netip.Addr
	for _, c := range u.gen.Claims {
		justAssigned := slices.Contains(u.Verb.JustAssigned, c.Address)
		named, own := tristate.No, false // host-local's file names another owner, or this one
		if c.Pool != "" {
			owner, given, err := ipam.OwnerOf(c.Pool, c.Address)
			ours := justAssigned && owner.Is(u.Verb.Key.ContainerID, u.Verb.Key.IfName)
			own = given && owner.Is(u.Entry.ContainerID, u.Entry.IfName)
			named = tristate.Of(given && !ours && !own, err)
		}
		var others []alive.OtherOwner
		if named == tristate.No {
			if claiming == nil {
				claiming = u.othersOf(ctx, u.Entry.Key, u.Entry.Addresses())
			}
			for _, other := range claiming {
				if !slices.Contains(other.Addresses(), c.Address) {
					continue
				}
				if ours := justAssigned && other.Key == u.Verb.Key; !ours {
					others = append(others, alive.OtherOwner{
						BeingUndone: u.beingUndone(other), GaveBack: own && gaveBack(other, c),
						Fate: u.Node.Judge(ctx, other).Fate,
					})
				}
			}
		}
		if alive.HasOtherOwner(named, others) || c.Pool == "" && u.usedElsewhere(c.Address) {
			othersOwn = append(othersOwn, c.Address)
		}
	}
	return othersOwn
}

// usedElsewhere reports whether another container may use an address for which no IPAM plugin
// records an owner: an interface outside the generation's own namespace has it.
func (u *undoing) usedElsewhere(address netip.Addr) bool {
	netns := cmp.Or(u.place.Path, u.gen.NetNS.Path)
	if seen, err := host.Look(netns, u.Entry.IfName); err == nil &&
		slices.Contains(seen.Addresses, address.Unmap()) &&
		(u.place.Path != "" || u.gen.NetNS.Same(seen.Netns)) {
		return false
	}
	var adds journal.NetNS // the namespace of an ADD that was just assigned the address
	if slices.Contains(u.Verb.JustAssigned, address) {
		adds, _ = host.Identify(u.Verb.Netns)
	}
	used, _ := u.Node.InUse([]netip.Addr{address}, func(s host.Interface) bool {
		return u.Node.IsOwn(u.Entry, s.Netns) || u.Node.IsHost(s.Netns) || adds.Same(s.Netns)
	})
	return used != tristate.No // in doubt another container's
}

// gaveBack reports whether another attachment has returned an address to its pool although the
// journal still has it: the plain chain ran its DEL, or the journal could not be written. This
// holds if all its claims on the address are from that pool, its network namespace is at its path,
// and no interface there has the address.
func gaveBack(other *journal.Entry, c journal.Claim) bool {
	for _, g := range other.Generations {
		for _, o := range g.Claims {
			if o.Address == c.Address && o.Pool != c.Pool {
				return false
			}
		}
	}
	at := other.Newest().NetNS
	if id, err := host.Identify(at.Path); err != nil || !id.Same(at) {
		return false
	}
	there, err := host.AddressIn(at, c.Address)
	return !there && err == nil
}

// beingUndone reports whether another attachment is being undone. It then no longer owns its
// addresses; otherwise two attachments in the same sweep would keep parking each other's DELs.
func (w *Worker) beingUndone(e *journal.Entry) bool {
	return (e.State == journal.Removing || e.State == journal.Unwinding) &&
		w.Node.SameNamespaces(e.Newest()) == tristate.Yes
}

// othersOf returns the entries of other attachments that claim one of some addresses, or none if
// the journal cannot be read.
func (w *Worker) othersOf(
	ctx context.Context, key journal.Key, addresses []netip.Addr,
) (others []*journal.Entry) {
	w.Journal.Read(ctx, func(tx *journal.Tx) (err error) {
		others, err = Others(tx, key, addresses)
		return err
	})
	return others
}

// Others returns the entries of other attachments that claim one of some addresses. It is not nil.
func Others(tx *journal.Tx, key journal.Key, addresses []netip.Addr) ([]*journal.Entry, error) {
	others := []*journal.Entry{}
	for _, address := range addresses {
		entries, err := tx.ByAddress(address)
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			known := func(o *journal.Entry) bool { return o.Key == e.Key }
			if e.Key != key && !slices.ContainsFunc(others, known) {
				others = append(others, e)
			}
		}
	}
	return others, nil
}

// late reports whether a step would get an address that it knows only from prevResult and that
// another container may have by now. The address may be free because the delegate that allocated it
// is undone, or because something else released it: an attachment without a journal entry has a
// pending DEL for every delegate. Such a DEL runs with whileFree.
func (a *attempt) late() bool {
	return slices.ContainsFunc(a.gen.Claims, func(c journal.Claim) bool {
		return c.Receives(a.Index) && (a.gen.Freed(c) || a.takenBack(c))
	})
}

// errGiven is why a late DEL is killed.
var errGiven = errors.New("an address may have a new owner")

// whileFree returns the context of a late DEL, and updates withheld. The DEL may be slow, but has
// to end before an ADD that gets one of its addresses runs a delegate whose rules it could remove.
//
//  1. unwind checks for another owner of the addresses. The DEL has LateDel from the start of the
//     check.
//  2. While the DEL runs, unwind repeats the check four times per LateDel. A check that reads the
//     journal and finds no other owner extends the DEL to LateDel from its own start. Any other
//     check extends nothing.
//  3. An ADD that claims an address after the start of the last successful check waits for the
//     attachment's lock, for Release after its claim, which is longer than LateDel: see claim.
func (u *undoing) whileFree(ctx context.Context) (_ context.Context, end func()) {
	began := time.Now()
	u.withheld = u.addressesOfOthers(ctx, nil)
	ctx, cancel := context.WithCancelCause(ctx)
	lease := time.AfterFunc(u.Budgets.LateDel-time.Since(began), func() { cancel(errGiven) })
	ended, looking := make(chan struct{}), *u
	go func() {
		defer close(ended)
		for {
			select {
			case <-ctx.Done():
				return
			case <-time.After(u.Budgets.LateDel / 4):
			}
			looking.Worker = u.Fork() // the step's own is at work, and an earlier look may have failed
			began := time.Now()
			found := looking.addressesOfOthers(ctx, nil)
			given := slices.ContainsFunc(found,
				func(a netip.Addr) bool { return !slices.Contains(looking.withheld, a) })
			if !given && !looking.Journal.Unreadable && ctx.Err() == nil {
				lease.Reset(u.Budgets.LateDel - time.Since(began))
			}
		}
	}()
	return ctx, func() {
		cancel(nil)
		<-ended
		lease.Stop()
	}
}

// poolsOf returns the host-local pools of the addresses that a step knows only from prevResult. It
// returns none for a step whose own IPAM plugin needs the lock of its pool.
func (a *attempt) poolsOf() (pools []string) {
	for _, c := range a.gen.Claims {
		if c.Pool != "" && c.Receives(a.Index) && !slices.Contains(pools, c.Pool) {
			pools = append(pools, c.Pool)
		}
	}
	if ipam.Pool(a.Config, a.Entry.Network) != "" {
		return nil
	}
	slices.Sort(pools) // every process takes several locks in the same order
	return pools
}

// holdPools takes host-local's locks of the pools of a DEL's addresses, and updates withheld. No
// ADD, not even one of the plain chain, gets one of these addresses meanwhile, so an address that
// is free, or this attachment's, gets no new owner before the DEL ends. The DEL has LateDel,
// because every ADD of the network waits.
func (u *undoing) holdPools(ctx context.Context, pools []string) (release func(), ok bool) {
	var unlocks []func()
	release = func() {
		for _, unlock := range unlocks {
			unlock()
		}
	}
	for _, pool := range pools {
		unlock, err := ipam.Lock(ctx, pool)
		if err != nil {
			u.Log.Warn("cannot lock the pool of an address for a DEL", "pool", pool, "err", err)
			return release, false
		}
		unlocks = append(unlocks, unlock)
	}
	u.withheld = u.addressesOfOthers(ctx, nil)
	return release, true
}

// takenBack reports whether host-local's own file no longer has a claimed address for the
// attachment, or cannot be read.
func (u *undoing) takenBack(c journal.Claim) bool {
	if c.Pool == "" {
		return false
	}
	owner := ipam.Owner{ContainerID: u.Entry.ContainerID, IfName: u.Entry.IfName}
	lost, err := ipam.Lost(c.Pool, owner, c.Address)
	return lost || err != nil
}

// withheldFrom returns an address that was withheld from a step because another attachment owns it.
func (a *attempt) withheldFrom() (address netip.Addr, is bool) {
	for _, c := range a.gen.Claims {
		if c.Receives(a.Index) && slices.Contains(a.withheld, c.Address) {
			return c.Address, true
		}
	}
	return address, false
}
