package plugin

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/record"
)

// claim releases dead attachments that claim the addresses of this ADD. It runs before the next
// delegate, while this ADD has no rules yet that their DELs could remove. If a live attachment
// claims the same address, the address is a duplicate.
func (a *adding) claim(
	ctx context.Context, i int, claims []journal.Claim, addresses []netip.Addr,
	others []*journal.Entry,
) *delegate.Failure {
	ctx, cancel := context.WithTimeout(ctx, a.Budgets.Release)
	defer cancel()
	for _, other := range others {
		err := a.Release(ctx, other.Key, addresses...)
		if err == nil {
			continue
		}
		a.log.Warn("cannot release another attachment that claims the same address", "other",
			other.Key.String(), "why", err)
		for _, c := range claims {
			if !a.duplicate(ctx, c, other) {
				continue
			}
			a.Journal.Count(record.CountDuplicates)
			if a.Conf.OnDuplicateAddress == "fail" {
				return a.callOf(i).Failed(types.ErrInternal,
					fmt.Sprintf("duplicate address %s: already in use by %s; see unwindctl show %s", c.Address,
						other.Key, other.Key))
			}
		}
	}
	return nil
}

// duplicate reports whether another attachment certainly uses a claimed address: both got the
// address from the same node-local pool, the other attachment is not dead, and its interface has
// the address.
func (a *adding) duplicate(ctx context.Context, c journal.Claim, other *journal.Entry) bool {
	same := slices.ContainsFunc(other.Got.Claims, func(o journal.Claim) bool {
		return o.Address == c.Address && o.Pool == c.Pool && c.Pool != ""
	})
	if !same || a.Judge(ctx, other).Fate == decide.Dead {
		return false
	}
	place, err := facts.Find(other.Added.NetNS, other.IfName)
	place.Close()
	if err != nil {
		a.log.Warn("cannot check for a duplicate address", "address", c.Address,
			"other", other.Key.String(), "err", err)
	}
	return slices.Contains(place.Seen.Addresses, c.Address)
}

// commit writes a delegate's result, and handles other attachments that claim a new address. If the
// result cannot be written, the ADD fails: success would leave a live attachment in state adding.
func (a *adding) commit(ctx context.Context, i int, claims []journal.Claim) *delegate.Failure {
	a.entry.Got.Claims = append(a.entry.Got.Claims, claims...)
	if a.Journal.Unwritable {
		return nil
	}
	var addresses []netip.Addr
	for _, c := range claims {
		addresses = append(addresses, c.Address)
	}
	others, err := a.record(ctx, addresses)
	if err != nil {
		return a.callOf(i).Failed(types.ErrTryAgainLater,
			"unwind: cannot record the result: "+err.Error())
	}
	return a.claim(ctx, i, claims, addresses, others)
}

// record writes the entry as live and returns the other entries that claim one of the addresses. It
// searches in the transaction that writes the claims. So if two ADDs get the same address at the
// same time, the later one finds the other. record waits as long as other processes write.
func (a *adding) record(
	ctx context.Context, addresses []netip.Addr,
) (others []*journal.Entry, err error) {
	for {
		err = a.Journal.Update(ctx, func(tx *journal.Tx) (err error) {
			if others, err = (&record.Snapshot{Tx: tx}).Others(a.Key, addresses); err != nil {
				return err
			}
			a.entry.Undo.State = journal.Live
			return tx.Put(a.entry)
		})
		if !errors.Is(err, journal.ErrQueued) || ctx.Err() != nil {
			return others, err
		}
		a.log.Warn("other processes write the journal; the ADD still waits for its turn")
	}
}
