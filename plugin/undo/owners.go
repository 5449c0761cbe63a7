package undo

import (
	"context"
	"net/netip"
	"slices"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/tristate"
)

// addressesOfOthers returns the addresses of a record that have another owner: a live attachment in
// the journal, or the owner in host-local's own file. They are removed from the prevResult of a DEL
// (cni#924). If the file cannot be read, or it is unknown whether the other attachment is live, the
// address counts as another owner's: a DEL without it can be repeated later, a DEL with it cannot
// be undone. An address that was just assigned to this ADD does not count, because this ADD has
// nothing yet that a DEL with the address could remove. The result is not nil.
func (u *undoing) addressesOfOthers(ctx context.Context, claiming []*journal.Entry) []netip.Addr {
	othersOwn := []netip.Addr{}
	for _, c := range u.Entry.Claims {
		justAssigned := slices.Contains(u.Verb.JustAssigned, c.Address)
		named := tristate.No // host-local's file names another owner
		if c.Pool != "" {
			owner, given, err := ipam.OwnerOf(c.Pool, c.Address)
			ours := justAssigned && owner.Is(u.Verb.Key.ContainerID, u.Verb.Key.IfName)
			own := given && owner.Is(u.Entry.ContainerID, u.Entry.IfName)
			named = tristate.Of(given && !ours && !own, err)
		}
		var others []decide.OtherOwner
		if named == tristate.No {
			if claiming == nil {
				claiming = u.othersOf(ctx, u.Entry.Key, u.Entry.Addresses())
			}
			for _, other := range claiming {
				ours := justAssigned && other.Key == u.Verb.Key
				if other.ClaimsAddress(c.Address) && !ours {
					others = append(others, decide.OtherOwner{
						BeingUndone: u.beingUndone(other), Fate: u.Node.Judge(ctx, other).Fate,
					})
				}
			}
		}
		cached := c.Pool == "" && !justAssigned &&
			u.Node.CachedOwner(c.Address, func(one facts.Cached) bool { // the journal knows more
				return one.Key() == u.Entry.Key || one.Key() == u.Verb.Key ||
					hasADD(claiming, one) || hasADD(u.undoneOf(ctx, one.Key()), one)
			})
		if decide.HasOtherOwner(named, others) || cached {
			othersOwn = append(othersOwn, c.Address)
		}
	}
	return othersOwn
}

// undoneOf returns the undone records of an attachment.
func (w *Worker) undoneOf(ctx context.Context, k journal.Key) (undone []*journal.Entry) {
	w.Journal.Read(context.WithoutCancel(ctx), func(tx *journal.Tx) error {
		all, err := tx.Records(k)
		undone = slices.DeleteFunc(all,
			func(e *journal.Entry) bool { return e.State != journal.Undone })
		return journal.IgnoreDamaged(err)
	})
	return undone
}

// hasADD reports whether one of several records may be of the ADD in libcni's cache. An older
// record of the same container says nothing about a later ADD: it is being undone.
func hasADD(records []*journal.Entry, one facts.Cached) bool {
	return slices.ContainsFunc(records, func(e *journal.Entry) bool {
		own := facts.InterfaceOf(e)
		return e.Key == one.Key() && own.Known() &&
			facts.SameADD(own, netconf.InterfaceOf(one.Result, one.IfName)) != tristate.No
	})
}

// beingUndone reports whether another attachment is being undone. It then no longer owns its
// addresses; otherwise two attachments in the same sweep would keep each other's DELs waiting.
func (w *Worker) beingUndone(e *journal.Entry) bool {
	return (e.State == journal.Deleting || e.State == journal.RollingBack) &&
		w.Node.SameNamespaces(e) == tristate.Yes
}

// othersOf returns the records of other attachments that claim one of some addresses, or none if
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

// Others returns the records of other attachments that claim one of some addresses. It is not nil.
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
