package undo

import (
	"context"
	"net/netip"
	"slices"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
)

// withheldFrom returns the claimed addresses that a step's DEL does not get (see decide.Gets). It
// looks at host-local's files, so it is called right before the DEL. Only the attachment's own DELs
// free an address of its own, and they need its lock.
func (u *undoing) withheldFrom(ctx context.Context, s *journal.Step) (addresses []netip.Addr) {
	for _, c := range u.Entry.Got.Claims {
		if !decide.Gets(s, c, u.ownerOf(ctx, c)) {
			addresses = append(addresses, c.Address)
		}
	}
	return addresses
}

func (u *undoing) ownerOf(ctx context.Context, c journal.Claim) (o decide.Owner) {
	if c.Pool != "" {
		o.InFile = !u.isFree(c)
		return o
	}
	o.Freed = u.Entry.Freed(c) && c.Step >= 0 || slices.ContainsFunc(u.Entry.Undo.Steps,
		func(s journal.Step) bool { return s.Index == c.Step && s.Started })
	claimants, err := u.Journal.Snapshot(ctx).Others(u.Entry.Key, []netip.Addr{c.Address})
	o.Others = err != nil || slices.ContainsFunc(claimants,
		func(e *journal.Entry) bool { return decide.KeepsContainer(e.Undo.State) })
	return o
}

func ownerOf(k journal.Key) ipam.Owner {
	return ipam.Owner{ContainerID: k.ContainerID, IfName: k.IfName}
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
