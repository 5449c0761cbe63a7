package plugin

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/ipam"
	"cni-unwind/journal"
)

// The guards against a DEL that comes late and names an address which has a new owner by then (cni#924):
//
//  1. Before a DEL, foreignAddresses: what another attachment owns is taken out of prevResult. If the delegate knows the
//     address from prevResult alone, its step is parked: still owed, in full.
//  2. When an ADD gets an address, claim: what others that are dead owe with it is run before the next delegate.
//  3. When an address is free again, replayParked.

// foreignAddresses returns the addresses of a generation that belong to another attachment by now: a live one in the
// journal, or the one that host-local's own file names. If the file cannot be read, or the other's liveness not be told, an
// address counts as foreign: a DEL without it can be made good later, one with it cannot. What is fresh is not foreign by
// our own owning it: there is nothing of ours yet that a DEL with it could take.
func (u *undoing) foreignAddresses(ctx context.Context) []netip.Addr {
	var foreign []netip.Addr
	for _, c := range u.gen.Claims {
		fresh := slices.Contains(u.fresh, c.Address)
		named := no // another one, by host-local's file
		if c.Pool != "" {
			owner, given, err := ipam.OwnerOf(c.Pool, c.Address)
			ours := fresh && owner.Is(u.key.ContainerID, u.key.IfName)
			named = answerOf(given && !ours && !owner.Is(u.entry.ContainerID, u.entry.IfName), err)
		}
		var rivals []rival
		if named == no {
			for _, other := range u.othersWith(ctx, u.entry.Key, c.Address) {
				if ours := fresh && other.Key == u.key; !ours {
					rivals = append(rivals, rival{u.beingUndone(other), u.judge(other).fate})
				}
			}
		}
		if isForeign(named, rivals) {
			foreign = append(foreign, c.Address)
		}
	}
	return foreign
}

// rival is another attachment that claims an address.
type rival struct {
	undone bool // it is being undone
	fate   Fate
}

// isForeign decides whether an address belongs to another attachment than the one whose DEL is about to run. named says whether
// host-local's file names another owner.
func isForeign(named answer, rivals []rival) bool {
	return named != no || slices.ContainsFunc(rivals, func(r rival) bool { return !r.undone && r.fate != Dead })
}

// beingUndone says whether whoever works on another attachment undoes it: it owns its addresses no more. Two that are undone at
// once, as in a sweep, would else park each other's DELs again and again.
func (o *op) beingUndone(e *journal.Entry) bool {
	return (e.State == journal.Removing || e.State == journal.Unwinding) && o.sees(e.Newest()) == yes
}

// othersWith returns the entries of other attachments that claim an address. A journal that cannot be read has none.
func (o *op) othersWith(ctx context.Context, key journal.Key, address netip.Addr) []*journal.Entry {
	var others []*journal.Entry
	o.read(ctx, func(tx *journal.Tx) error {
		entries, err := tx.ByAddress(address)
		others = slices.DeleteFunc(entries, func(e *journal.Entry) bool { return e.Key == key })
		return err
	})
	return others
}

// claim settles others that claim our addresses, where they are dead, before the next delegate runs: as yet there is no
// rule of ours that their DELs could take. One that lives is a duplicate.
func (a *adding) claim(d Delegate, claims []journal.Claim, others []*journal.Entry) *failure {
	ctx, cancel := context.WithTimeout(a.ctx, a.Budgets.Settle)
	defer cancel()
	for _, c := range claims {
		a.fresh = append(a.fresh, c.Address)
	}
	defer func() { a.fresh = nil }()
	for _, other := range others {
		err := a.settle(ctx, other.Key)
		if err == nil {
			continue
		}
		a.log.Warn("another attachment has the same address", "attachment", a.key.String(), "other", other.Key.String(),
			"why", err)
		for _, c := range claims {
			if !a.duplicate(c, other) {
				continue
			}
			a.count(CountDuplicates)
			if a.conf.OnDuplicateAddress == "fail" {
				return &failure{plugin: d.Type, command: "ADD", code: types.ErrInternal, msg: fmt.Sprintf(
					"it gave out %s, which is in use by %s", c.Address, other.Key)}
			}
		}
	}
	return nil
}

// duplicate says whether a claimed address is in use by another attachment beyond doubt: both have it from the same
// node-local pool, the other one is not dead, and netlink shows it there.
func (a *adding) duplicate(c journal.Claim, other *journal.Entry) bool {
	g := other.Newest()
	same := slices.ContainsFunc(g.Claims, func(o journal.Claim) bool {
		return o.Address == c.Address && o.Pool == c.Pool && c.Pool != ""
	})
	if !same || a.judge(other).fate == Dead {
		return false
	}
	there, err := hasAddress(g.NetNS, c.Address)
	if err != nil {
		a.log.Warn("looking for a duplicate address", "address", c.Address, "other", other.Key.String(), "err", err)
	}
	return there
}

// replayParked runs the DELs that others owe with addresses that have become free: those that were parked, and those that
// failed.
func (o *op) replayParked(ctx context.Context, freed []netip.Addr) {
	ctx, cancel := context.WithTimeout(ctx, o.Budgets.Settle)
	defer cancel()
	for _, address := range freed {
		for _, other := range o.othersWith(ctx, o.key, address) {
			if other.State == journal.Live || !o.due(ctx, other, true) {
				continue
			}
			if other.State == journal.Adding && !o.judge(other).ends() {
				continue // its ADD may be waiting for us, see claim
			}
			if err := o.settle(ctx, other.Key); err != nil {
				o.log.Debug("left for later", "attachment", other.Key.String(), "err", err)
			}
		}
	}
}
