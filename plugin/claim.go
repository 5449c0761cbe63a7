package plugin

import (
	"context"
	"fmt"
	"slices"

	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/journal"
	"cni-unwind/plugin/internal/delegate"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/internal/verdict"
	"cni-unwind/plugin/netconf"
)

// claim releases dead attachments that claim the addresses of this ADD before the next delegate
// runs: this ADD has no rules yet that their DELs could take. A live one is a duplicate.
func (a *adding) claim(ctx context.Context, d netconf.Delegate, claims []journal.Claim, others []*journal.Entry) *delegate.Failure {
	ctx, cancel := context.WithTimeout(ctx, a.Budgets.Release)
	defer cancel()
	for _, c := range claims {
		a.justAssigned = append(a.justAssigned, c.Address)
	}
	defer func() { a.justAssigned = nil }()
	for _, other := range others {
		err := a.releaseIfDead(ctx, other.Key)
		if err == nil {
			continue
		}
		a.log.Warn("another attachment has the same address", "attachment", a.key.String(), "other", other.Key.String(),
			"why", err)
		for _, c := range claims {
			if !a.duplicate(ctx, c, other) {
				continue
			}
			a.count(CountDuplicates)
			if a.conf.OnDuplicateAddress == "fail" {
				return &delegate.Failure{Plugin: d.Type, Command: "ADD", Code: types.ErrInternal, Msg: fmt.Sprintf(
					"it gave out %s, which is in use by %s", c.Address, other.Key)}
			}
		}
	}
	return nil
}

// duplicate says whether another attachment certainly uses a claimed address: both have it from the
// same node-local pool, the other one is not dead, and netlink shows the address there.
func (a *adding) duplicate(ctx context.Context, c journal.Claim, other *journal.Entry) bool {
	g := other.Newest()
	same := slices.ContainsFunc(g.Claims, func(o journal.Claim) bool {
		return o.Address == c.Address && o.Pool == c.Pool && c.Pool != ""
	})
	if !same || a.judge(ctx, other).Fate == verdict.Dead {
		return false
	}
	there, err := host.AddressIn(g.NetNS, c.Address)
	if err != nil {
		a.log.Warn("looking for a duplicate address", "address", c.Address, "other", other.Key.String(), "err", err)
	}
	return there
}

// commit records the progress of carryOut, and handles other attachments that claim a new address.
func (a *adding) commit(ctx context.Context, d netconf.Delegate, claims []journal.Claim, last bool) *delegate.Failure {
	a.gen.Claims = append(a.gen.Claims, claims...)
	if a.unwritable {
		return nil
	}
	others, err := a.record(ctx, claims, last)
	if err == nil && len(others) > 0 {
		if f := a.claim(ctx, d, claims, others); f != nil {
			return f
		}
		if last {
			_, err = a.record(ctx, nil, true)
		}
	}
	if err != nil && a.conf.OnJournalFailure == "fail" {
		return &delegate.Failure{Plugin: d.Type, Command: "ADD", Code: types.ErrTryAgainLater, Msg: err.Error()}
	}
	if err != nil {
		a.degraded("ADD", err)
		a.log.Error("the journal cannot be written", "err", err)
	}
	return nil
}

// record writes the entry and returns the other entries that hold one of the claims. The entry
// becomes live on the last call if there are no such entries.
func (a *adding) record(ctx context.Context, claims []journal.Claim, last bool) (others []*journal.Entry, err error) {
	a.entry.State = journal.Adding
	a.durable = false
	if !last {
		if others, ok := a.appended(ctx, claims); ok {
			return others, nil
		}
	}
	err = a.update(ctx, func(tx *journal.Tx) (err error) {
		if others, err = a.holdersOf(tx, claims); err != nil {
			return err
		}
		a.entry.State = journal.Adding
		if last && len(others) == 0 {
			a.entry.State = journal.Live
		}
		return tx.Put(a.entry)
	})
	a.durable = err == nil && a.entry.State == journal.Live
	return others, err
}

// appended is record without a sync, if a loss of power may take the entry. It says whether it wrote
// the entry.
func (a *adding) appended(ctx context.Context, claims []journal.Claim) (others []*journal.Entry, ok bool) {
	if len(claims) == 0 {
		return nil, a.append(a.entry)
	}
	if !volatile(a.entry) {
		return nil, false
	}
	err := a.store.ViewAlone(ctx, func(tx *journal.Tx) (err error) {
		if others, err = a.holdersOf(tx, claims); err == nil {
			ok = a.append(a.entry)
		}
		return err
	})
	return others, ok && err == nil
}

// holdersOf returns the other entries that hold one of the claims. The transaction that writes the
// claims looks, too: of two ADDs that get the same address at once, the later one finds the other.
func (a *adding) holdersOf(tx *journal.Tx, claims []journal.Claim) (others []*journal.Entry, err error) {
	for _, c := range claims {
		entries, err := tx.ByAddress(c.Address)
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if e.Key != a.key {
				others = append(others, e)
			}
		}
	}
	return others, nil
}
