package sweep

import (
	"context"
	"encoding/json"
	"errors"
	"net/netip"
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

// freeEmpty releases the addresses in a pool for which host-local died before it wrote an owner.
func (s *Sweep) freeEmpty(ctx context.Context, pool Pool) (findings []Finding, err error) {
	plan, err := s.findEmpty(ctx, pool)
	var released []ipam.Reservation
	if !s.DryRun {
		var applyErr error
		released, applyErr = ipam.Apply(ctx, pool.Dir, plan)
		err = errors.Join(err, applyErr)
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

// findEmpty returns the reservations of a pool that have no owner. If a record of the journal
// claims an address whose file is empty, something else emptied the file. Then the address stays
// until that record is gone.
func (s *Sweep) findEmpty(ctx context.Context, pool Pool) ([]ipam.Reservation, error) {
	found, err := ipam.Scan(pool.Dir)
	return slices.DeleteFunc(found, func(r ipam.Reservation) bool {
		return !r.Empty() || s.w.Journal.Snapshot(ctx).Claims(r.Pool, r.Address)
	}), err
}
