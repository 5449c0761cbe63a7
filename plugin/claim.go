package plugin

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/record"
	"cni-unwind/plugin/undo"
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
		err := a.w.Release(ctx, other.Key, addresses...)
		if err == nil {
			continue
		}
		a.log.Warn("cannot release another attachment that claims the same address", "other",
			other.Key.String(), "why", err)
		for _, c := range claims {
			if !a.duplicate(ctx, c, other) {
				continue
			}
			a.rec.Count(record.CountDuplicates)
			if a.conf.OnDuplicateAddress == "fail" {
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
	same := slices.ContainsFunc(other.Claims, func(o journal.Claim) bool {
		return o.Address == c.Address && o.Pool == c.Pool && c.Pool != ""
	})
	if !same || a.node.Judge(ctx, other).Fate == decide.Dead {
		return false
	}
	place, err := facts.Find(other.NetNS, other.IfName)
	place.Close()
	if err != nil {
		a.log.Warn("cannot check for a duplicate address", "address", c.Address,
			"other", other.Key.String(), "err", err)
	}
	return slices.Contains(place.Seen.Addresses, c.Address)
}

// commit writes a delegate's result, and handles other attachments that claim a new address.
func (a *adding) commit(ctx context.Context, i int, claims []journal.Claim) *delegate.Failure {
	a.entry.Claims = append(a.entry.Claims, claims...)
	if a.rec.Unwritable {
		return nil
	}
	var addresses []netip.Addr
	for _, c := range claims {
		addresses = append(addresses, c.Address)
	}
	others, err := a.record(ctx, addresses)
	if err == nil && len(others) > 0 {
		return a.claim(ctx, i, claims, addresses, others)
	}
	return a.unrecorded(i, err)
}

// unrecorded handles an entry that could not be written. It fails the ADD if onJournalFailure is
// "fail". Otherwise it logs the error, and the ADD continues.
func (a *adding) unrecorded(i int, err error) *delegate.Failure {
	if err != nil && a.conf.OnJournalFailure == "fail" {
		return a.callOf(i).Failed(types.ErrTryAgainLater, err.Error())
	}
	if err != nil {
		a.rec.Degraded("ADD", err)
		a.log.Error("cannot write the journal; the ADD continues without it", "err", err)
	}
	return nil
}

// record writes the entry as live and returns the other entries that claim one of the addresses. It
// searches in the transaction that writes the claims. So if two ADDs get the same address at the
// same time, the later one finds the other.
func (a *adding) record(
	ctx context.Context, addresses []netip.Addr,
) (others []*journal.Entry, err error) {
	err = a.rec.Update(ctx, func(tx *journal.Tx) (err error) {
		if others, err = undo.Others(tx, a.key, addresses); err != nil {
			return err
		}
		stored, err := tx.Get(a.key)
		err = journal.IgnoreDamaged(err)
		if err == nil && (stored == nil || stored.Number != a.entry.Number) {
			// another verb has recreated the journal
			a.entry.State, a.entry.Number = journal.Adding, 0
			err = tx.Put(a.entry)
		}
		if err != nil {
			return err
		}
		a.entry.State = journal.Live
		return tx.Put(a.entry)
	})
	a.durable = err == nil
	return others, err
}

// confirm ensures, before the result is printed, that the entry is live in the journal. Since the
// entry was written, the journal file may have been set aside or removed. confirm also rewrites an
// entry that is too old, because the grace period begins when the ADD succeeds.
func (a *adding) confirm(ctx context.Context, last int) *delegate.Failure {
	age := time.Duration(journal.BootNanos() - a.entry.Updated.Boot)
	late := age > time.Second && age > a.conf.GracePeriod/10
	if a.rec.Unwritable || a.durable && !late && a.isRecorded(ctx) {
		return nil
	}
	_, err := a.record(ctx, nil)
	return a.unrecorded(last, err)
}

// isRecorded reports whether this ADD is live in the journal that is now at its path.
func (a *adding) isRecorded(ctx context.Context) (is bool) {
	a.rec.Read(ctx, func(tx *journal.Tx) error {
		e, err := tx.Get(a.key)
		is = e != nil && e.Number == a.entry.Number && e.State == journal.Live
		return err
	})
	return is
}
