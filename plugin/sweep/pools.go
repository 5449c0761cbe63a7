package sweep

import (
	"context"
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"slices"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/netconf"
)

// Pool is a directory in which host-local keeps the addresses of a network.
type Pool struct {
	Network string
	Dir     string
	Config  json.RawMessage // the configuration of the delegate that calls host-local
	// Plain is set if a runtime runs the chain itself, without unwind.
	Plain bool

	chain *netconf.Chain
	conf  *netconf.Conf
}

// PoolsOf returns the pools of a chain.
func PoolsOf(ch *netconf.Chain, c *netconf.Conf) (pools []Pool) {
	for i := range ch.Delegates {
		p := PoolOf(ch.Config(i, c), ch, c)
		if p.Dir != "" && !slices.ContainsFunc(pools, func(o Pool) bool { return o.Dir == p.Dir }) {
			pools = append(pools, p)
		}
	}
	return pools
}

// PoolOf returns the pool of a chain's delegate, given the delegate's configuration. Dir is "" if
// the delegate does not call host-local.
func PoolOf(config json.RawMessage, ch *netconf.Chain, c *netconf.Conf) Pool {
	return Pool{Network: c.Name, Dir: ipam.Pool(config, c.Name), Config: config, chain: ch,
		conf: c}
}

// freeEmpty releases two kinds of addresses in a pool: those for which host-local died before it
// wrote an owner, and those that a DEL held until it was killed.
func (s *Sweep) freeEmpty(ctx context.Context, pool Pool) (findings []Finding, err error) {
	found, plan, err := s.findEmpty(ctx, pool)
	var released []ipam.Reservation
	if !s.DryRun {
		dropped, dropErr := DropHeld(ctx, s.w.Journal.Store, pool.Network, found)
		for _, r := range dropped {
			s.w.Log.Info("address released", "network", pool.Network, "address", r.Address,
				"owner", r.HeldFor.ContainerID, "reason", "the DEL that reserved it was killed")
		}
		var applyErr error
		released, applyErr = ipam.Apply(ctx, pool.Dir, plan)
		err = errors.Join(err, dropErr, applyErr)
	}
	for _, r := range plan {
		f := Finding{Key: journal.Key{Network: pool.Network}, Addresses: []netip.Addr{r.Address},
			Verdict: decide.Verdict{Fate: decide.Dead, Reason: decide.Reason{Text: ipam.WhyEmpty}}}
		if f.Released = slices.Contains(released, r); f.Released {
			s.w.Journal.Event(journal.Event{Kind: journal.Released, Key: f.Key,
				Addresses: f.Addresses, Reason: ipam.WhyEmpty})
			s.w.Log.Info("address released", "network", pool.Network, "address", r.Address, "reason",
				ipam.WhyEmpty)
		}
		findings = append(findings, f)
	}
	return findings, err
}

// findEmpty returns the reservations of a pool, and those of them that have no owner. If a record
// of the journal claims an address whose file is empty, something else emptied the file. Then the
// address stays until that record is gone.
func (s *Sweep) findEmpty(
	ctx context.Context, pool Pool,
) (found, empty []ipam.Reservation, err error) {
	found, err = ipam.Scan(pool.Dir)
	empty = s.unclaimed(ctx, slices.DeleteFunc(slices.Clone(found),
		func(r ipam.Reservation) bool { return !r.Empty() }))
	return found, empty, err
}

// unclaimed returns the reservations whose addresses no record of the journal claims. If the
// journal cannot be read, unclaimed returns none.
func (s *Sweep) unclaimed(
	ctx context.Context, found []ipam.Reservation,
) (free []ipam.Reservation) {
	if len(found) == 0 {
		return nil
	}
	s.w.Journal.Read(ctx, func(tx *journal.Tx) error {
		free = slices.DeleteFunc(slices.Clone(found), func(r ipam.Reservation) bool {
			records, err := tx.ByAddress(r.Address)
			return err != nil || slices.ContainsFunc(records, func(e *journal.Entry) bool {
				return slices.ContainsFunc(e.Claims,
					func(c journal.Claim) bool { return c.Pool == r.Pool && c.Address == r.Address })
			})
		})
		return nil
	})
	return free
}

// DropHeld removes the files with which killed DELs still hold a network's addresses (see
// ipam.Hold), and returns these reservations. It keeps the file of a DEL that still runs, because
// that DEL holds its attachment's lock.
func DropHeld(
	ctx context.Context, store *journal.Store, network string, found []ipam.Reservation,
) (dropped []ipam.Reservation, err error) {
	for _, r := range found {
		if !r.IsHeld() {
			continue
		}
		switch dropErr := dropHeld(ctx, store, network, r); {
		case dropErr == nil:
			dropped = append(dropped, r)
		case !errors.Is(dropErr, journal.ErrBusy):
			err = errors.Join(err, dropErr)
		}
	}
	return dropped, err
}

func dropHeld(
	ctx context.Context, store *journal.Store, network string, r ipam.Reservation,
) error {
	if _, err := os.Lstat(store.Dir); err == nil { // without the directory, there are no locks
		unlock, err := lockAttachment(store, journal.Key{Network: network,
			ContainerID: r.HeldFor.ContainerID, IfName: r.HeldFor.IfName})
		if err != nil {
			return err
		}
		defer unlock()
	}
	return ipam.DropHeld(ctx, r.Pool, r.HeldFor, r.Address)
}
