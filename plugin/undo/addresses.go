package undo

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"time"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/facts"
)

// addressesOfOthers returns the addresses of a record that have another owner: a live attachment in
// the journal, or the owner in host-local's own file. A DEL does not get these addresses in its
// prevResult (cni#924). If the file cannot be read, or if the other attachment may be live, the
// address counts as having another owner. A DEL without the address can be repeated later, but a
// DEL with it cannot be undone. An ADD that has just got the address, and undoes this record for
// that reason, does not count as another owner. The result is never nil.
func (u *undoing) addressesOfOthers(ctx context.Context) []netip.Addr {
	othersOwn := []netip.Addr{}
	claimants, _ := u.Journal.Snapshot(ctx).Others(u.Entry.Key, u.Entry.Addresses())
	for _, c := range u.Entry.Got.Claims {
		if u.hasOtherOwner(ctx, c, claimants) {
			othersOwn = append(othersOwn, c.Address)
		}
	}
	return othersOwn
}

func (u *undoing) hasOtherOwner(
	ctx context.Context, c journal.Claim, claimants []*journal.Entry,
) bool {
	own, owners := []journal.Key{u.Entry.Key}, []ipam.Owner{ownerOf(u.Entry.Key)}
	assigned := slices.Contains(u.Assigned, c.Address)
	if assigned {
		own, owners = append(own, u.Verb.Key), append(owners, ownerOf(u.Verb.Key))
	}
	named := decide.False // whether host-local's file names another owner
	if c.Pool != "" {
		named = decide.TruthOf(ipam.OwnedByOther(c.Pool, c.Address, owners...))
	}
	switch {
	case named != decide.False, slices.ContainsFunc(claimants, func(o *journal.Entry) bool {
		undone := o.Undo.State == journal.Deleting || o.Undo.State == journal.RollingBack
		return o.ClaimsAddress(c.Address) && !slices.Contains(own, o.Key) &&
			decide.Owns(undone && u.SameNamespaces(o) == decide.True, u.Judge(ctx, o).Fate)
	}):
		return true
	case c.Pool != "" || assigned:
		return false
	}
	return u.CachedOwner(c.Address, func(one facts.Cached) bool { // the journal is more precise
		return one.Key() == u.Entry.Key || one.Key() == u.Verb.Key || u.hasADD(ctx, one)
	})
}

func ownerOf(k journal.Key) ipam.Owner {
	return ipam.Owner{ContainerID: k.ContainerID, IfName: k.IfName}
}

// reassigned reports whether the ADD that undoes this record has just got each address of a step,
// in the same network. Another network may use the same addresses. The claim of another record
// would prove nothing: it may be from before.
func (u *undoing) reassigned(s *journal.Step) (is bool) {
	for _, c := range u.Entry.Got.Claims {
		if c.Step != s.Index {
			continue
		}
		if is = slices.Contains(u.Assigned, c.Address); !is {
			return false
		}
	}
	return is && u.Verb.Key.Network == u.Entry.Network
}

// errLate is the cause of the time limit for a late DEL.
var errLate = errors.New("its address is free, so another pod may get it")

// The problem: a delegate that knows an address only from prevResult removes rules by the address
// alone. If the address is free, a new pod could get it during the DEL, and lose its rules. So late
// prepares each such DEL (see decide.IsLate):
//
//  1. It reads the claims in the journal and host-local's files again, and withholds an address
//     that has another owner by now.
//  2. It ends the DEL Budgets.LateDel after it began to read. An ADD that gets the address later
//     finds this record when it commits its own claim. Before its next delegate makes a rule, that
//     ADD waits longer than LateDel for the attachment's lock, which the DEL holds.
//
// A DEL that reached this limit twice, or whose record no ADD can find, runs without the address
// (see decide.DropsAddress). After SIGKILL, the delegate still holds the lock; the ADD kills it.
func (u *undoing) late(
	ctx context.Context, s *journal.Step,
) (bounded context.Context, cancel context.CancelFunc) {
	end := time.Now().Add(u.Budgets.LateDel)
	var free []netip.Addr
	for _, c := range u.Entry.Got.Claims {
		if !slices.Contains(slices.Concat(u.withheld, u.Assigned), c.Address) &&
			decide.IsLate(s, c, u.isFree(c)) {
			free = append(free, c.Address)
		}
	}
	u.dropped = nil
	switch {
	case len(free) == 0:
		return context.WithCancel(ctx)
	case decide.DropsAddress(s, u.recorded()):
		u.dropped = free
		return context.WithCancel(ctx)
	}
	err := u.Journal.Renew(ctx)
	if u.withheld = u.addressesOfOthers(ctx); err != nil {
		u.Log.Warn("cannot read the journal; the DEL runs without its address", "err", err)
		u.withheld = slices.Concat(u.withheld, free)
	}
	if !slices.ContainsFunc(free,
		func(a netip.Addr) bool { return !slices.Contains(u.withheld, a) }) {
		return context.WithCancel(ctx)
	}
	return context.WithDeadlineCause(ctx, end, errLate)
}

// isFree reports whether the attachment no longer has a claimed address. If host-local assigned it,
// the file shows that. Otherwise it counts as free once the DEL of the delegate that allocated it
// is done. That delegate is unknown in some reconstructed records.
func (u *undoing) isFree(c journal.Claim) bool {
	if c.Pool == "" {
		return c.Step >= 0 && u.Entry.Freed(c)
	}
	owner, given, err := ipam.OwnerOf(c.Pool, c.Address)
	return err != nil || !given || !owner.Is(u.Entry.ContainerID, u.Entry.IfName)
}

// recorded reports whether the record is in the journal, where other processes find it.
func (u *undoing) recorded() bool {
	return u.Journal.Lost == nil && u.Entry.Number != 0
}

// hasADD reports whether the ADD in libcni's cache is in the journal. A record of an earlier ADD of
// the container does not count, because that ADD is being undone.
func (w *Worker) hasADD(ctx context.Context, one facts.Cached) bool {
	records, _ := w.Journal.Snapshot(ctx).Records(one.Key())
	seen, _ := facts.Look(one.NetNS, "")
	return slices.ContainsFunc(records, func(e *journal.Entry) bool {
		return one.NetNS == "" || w.Names(e, seen)
	})
}
