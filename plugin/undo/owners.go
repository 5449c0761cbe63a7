package undo

import (
	"context"
	"net/netip"
	"slices"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/tristate"
)

// addressesOfOthers returns the addresses of a record that have another owner: a live attachment in
// the journal, or the owner in host-local's own file. A DEL does not get these addresses in its
// prevResult (cni#924). If the file cannot be read, or if the other attachment may be live, the
// address counts as having another owner. A DEL without the address can be repeated later, but a
// DEL with it cannot be undone. An ADD that has just got the address, and undoes this record for
// that reason, does not count as another owner. The result is never nil.
func (u *undoing) addressesOfOthers(ctx context.Context) []netip.Addr {
	othersOwn := []netip.Addr{}
	for _, c := range u.Entry.Claims {
		own := []journal.Key{u.Entry.Key}
		assigned := slices.Contains(u.Assigned, c.Address)
		if assigned {
			own = append(own, u.Verb.Key)
		}
		named := tristate.No // whether host-local's file names another owner
		if c.Pool != "" {
			owner, given, err := ipam.OwnerOf(c.Pool, c.Address)
			named = tristate.Of(given && !slices.ContainsFunc(own,
				func(k journal.Key) bool { return owner.Is(k.ContainerID, k.IfName) }), err)
		}
		var others []decide.OtherOwner
		if named == tristate.No {
			if u.Others == nil {
				u.Others = u.othersOf(ctx, u.Entry)
			}
			for _, other := range u.Others {
				if !other.ClaimsAddress(c.Address) || slices.Contains(own, other.Key) {
					continue
				}
				undone := other.State == journal.Deleting || other.State == journal.RollingBack
				others = append(others, decide.OtherOwner{
					BeingUndone: undone && u.Node.SameNamespaces(other) == tristate.Yes,
					Fate:        u.Node.Judge(ctx, other).Fate,
				})
			}
		}
		if decide.HasOtherOwner(named, others) || c.Pool == "" && !assigned &&
			u.Node.CachedOwner(c.Address, func(one facts.Cached) bool { // the journal is more precise
				return one.Key() == u.Entry.Key || one.Key() == u.Verb.Key || u.hasADD(ctx, one)
			}) {
			othersOwn = append(othersOwn, c.Address)
		}
	}
	return othersOwn
}

// hasADD reports whether the ADD in libcni's cache is in the journal. A record of an earlier ADD of
// the container does not count, because that ADD is being undone.
func (w *Worker) hasADD(ctx context.Context, one facts.Cached) (has bool) {
	w.Journal.Read(context.WithoutCancel(ctx), func(tx *journal.Tx) error {
		records, err := tx.Records(one.Key())
		seen, _ := facts.Look(one.NetNS, "")
		has = slices.ContainsFunc(records, func(e *journal.Entry) bool {
			return one.NetNS == "" || w.Node.Names(e, facts.Named{Interface: seen})
		})
		return journal.IgnoreDamaged(err)
	})
	return has
}

// othersOf returns the records of other attachments that claim an address of a record, or none if
// the journal cannot be read.
func (w *Worker) othersOf(ctx context.Context, e *journal.Entry) (others []*journal.Entry) {
	w.Journal.Read(ctx, func(tx *journal.Tx) (err error) {
		others, err = Others(tx, e.Key, e.Addresses())
		return err
	})
	return others
}

// Others returns the records of other attachments that claim one of the addresses. Without an
// error, the result is never nil.
func Others(tx *journal.Tx, key journal.Key, addresses []netip.Addr) ([]*journal.Entry, error) {
	others := []*journal.Entry{}
	for _, address := range addresses {
		entries, err := tx.ByAddress(address)
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			known := func(o *journal.Entry) bool { return o.Key == e.Key && o.Number == e.Number }
			if e.Key != key && !slices.ContainsFunc(others, known) {
				others = append(others, e)
			}
		}
	}
	return others, nil
}
