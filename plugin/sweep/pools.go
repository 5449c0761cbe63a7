package sweep

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/netconf"
)

// Pool is a directory in which host-local keeps the addresses of a network.
type Pool struct {
	Network string
	Dir     string
	Config  json.RawMessage // of the delegate that calls host-local
	// GracePeriod is the network's.
	GracePeriod time.Duration
	// Plain means that a runtime runs the chain itself, without unwind.
	Plain bool
}

// PoolsOf returns the pools of a chain.
func PoolsOf(ch *netconf.Chain, c *netconf.Conf) (pools []Pool) {
	for i := range ch.Delegates {
		p := poolOf(ch.Config(i, c), c)
		if p.Dir != "" && !slices.ContainsFunc(pools, func(o Pool) bool { return o.Dir == p.Dir }) {
			pools = append(pools, p)
		}
	}
	return pools
}

func poolOf(config json.RawMessage, c *netconf.Conf) Pool {
	return Pool{Network: c.Name, Dir: ipam.Pool(config, c.Name), Config: config,
		GracePeriod: c.GracePeriod}
}

// Full reports whether the pool has no free address.
func (p Pool) Full(log *slog.Logger) bool {
	full, err := ipam.Exhausted(p.Config, p.Network)
	if err != nil {
		log.Warn("cannot count free addresses", "pool", p.Dir, "err", err)
	}
	return full
}

// ReadPools returns the pools of the networks in conflist directories (/etc/cni/net.d), with or
// without unwind. If several files have the same pool, the file with unwind wins. ReadPools leaves
// out the pools of a network that unwind runs with another state directory, because another journal
// knows their owners. The error names the files and chains that cannot be read; ReadPools still
// returns the pools of the others.
func ReadPools(stateDir string, confDirs ...string) ([]Pool, error) {
	var pools []Pool
	var errs []error
	elsewhere := map[string]bool{} // pool directories of another journal
	for _, dir := range confDirs {
		paths, err := netconf.Conflists(dir)
		errs = append(errs, err)
		for _, path := range paths {
			found, ours, err := readPools(path, stateDir)
			if err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", path, err))
			}
			for _, p := range found {
				i := slices.IndexFunc(pools, func(o Pool) bool { return o.Dir == p.Dir })
				switch {
				case !ours:
					elsewhere[p.Dir] = true
				case i < 0:
					pools = append(pools, p)
				case pools[i].Plain:
					pools[i] = p
				}
			}
		}
	}
	return slices.DeleteFunc(pools, func(p Pool) bool { return elsewhere[p.Dir] }),
		errors.Join(errs...)
}

// readPools returns the pools of one file. ours is false if unwind runs them with another state
// directory.
func readPools(path, stateDir string) (pools []Pool, ours bool, err error) {
	list, err := netconf.ReadConflist(path)
	if err != nil {
		return nil, true, err
	}
	if conf := list.Unwind; conf != nil {
		chain, err := conf.LoadChain()
		if err != nil {
			return nil, true, err
		}
		return PoolsOf(chain, conf), conf.StateDir == filepath.Clean(stateDir), nil
	}
	chain, conf, err := list.Plain()
	if err != nil {
		return nil, true, err
	}
	pools = PoolsOf(chain, conf)
	for _, d := range chain.Delegates {
		if known.Of(d.Type).HidesIPAM && d.IPAM == "" { // flannel's plugin gets host-local then
			pools = append(pools, poolOf(json.RawMessage(`{"ipam": {"type": "host-local"}}`), conf))
		}
	}
	for i := range pools {
		pools[i].Plain = true
	}
	return pools, true, nil
}

// reconcile compares the reservations in a pool with the journal and releases the dead ones. It
// skips reservations whose owner is in the journal or in a finding on libcni's cache, because their
// DELs release them.
func (s *Sweep) reconcile(
	ctx context.Context, pool Pool, all []Finding,
) (findings []Finding, err error) {
	found, err := ipam.Scan(pool.Dir)
	if len(found) == 0 {
		return nil, err
	}
	inJournal, journalErr := s.containers(ctx)
	if journalErr != nil {
		return nil, errors.Join(err, journalErr)
	}
	plan := ipam.Plan(found, func(r ipam.Reservation) (bool, string) {
		cached := func(f Finding) bool {
			return f.cached != nil && f.Network == pool.Network && r.Owner.Is(f.ContainerID, f.IfName)
		}
		if inJournal[r.Owner.ContainerID] || s.w.Node.List == nil || slices.ContainsFunc(all, cached) {
			return false, "" // without a list there is no evidence against an owner
		}
		v := s.w.Node.JudgeReservation(pool.Network, r, pool.GracePeriod)
		if v.Fate != alive.Dead {
			findings = append(findings, findingOn(r, pool, v))
		}
		return v.Fate == alive.Dead, v.Reason.Text
	})
	var released []ipam.Planned
	if !s.DryRun {
		var applyErr error
		released, applyErr = ipam.Apply(ctx, pool.Dir, plan)
		err = errors.Join(err, applyErr)
	}
	for _, r := range plan {
		f := findingOn(r.Reservation, pool,
			alive.Verdict{Fate: alive.Dead, Reason: alive.Reason{Text: r.Reason}})
		if f.Released = slices.Contains(released, r); f.Released {
			s.w.Journal.Event(journal.Event{Kind: journal.Released, Key: f.Key,
				Addresses: []netip.Addr{r.Address}, Reason: r.Reason})
			s.w.Log.Info("address released", "network", pool.Network, "address", r.Address,
				"owner", r.Owner.ContainerID, "reason", r.Reason)
		}
		findings = append(findings, f)
	}
	return findings, err
}

func findingOn(r ipam.Reservation, pool Pool, v alive.Verdict) Finding {
	return Finding{Address: r.Address, Verdict: v, Key: journal.Key{
		Network: pool.Network, ContainerID: r.Owner.ContainerID, IfName: r.Owner.IfName}}
}

// containers returns the container IDs in the journal, of any network.
func (s *Sweep) containers(ctx context.Context) (map[string]bool, error) {
	known := map[string]bool{}
	err := s.w.Journal.Store.View(ctx, func(tx *journal.Tx) error {
		return tx.Outlines(func(outline journal.Outline, _ error) error {
			known[outline.ContainerID] = true
			return nil
		})
	})
	return known, err
}
