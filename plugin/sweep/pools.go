package sweep

import (
	"bytes"
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
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/tristate"
)

// Pool is the directory in which host-local keeps the addresses of a network.
type Pool struct {
	Network string
	Dir     string
	Config  json.RawMessage // of the delegate that calls host-local
	// GracePeriod is the network's.
	GracePeriod time.Duration
}

// PoolsOf returns the pools of a chain.
func PoolsOf(ch *netconf.Chain, c *netconf.Conf) []Pool {
	var pools []Pool
	for i := range ch.Delegates {
		config := ch.Config(i, c)
		dir := ipam.Pool(config, c.Name)
		if dir != "" && !slices.ContainsFunc(pools, func(p Pool) bool { return p.Dir == dir }) {
			pools = append(pools, Pool{c.Name, dir, config, c.GracePeriod})
		}
	}
	return pools
}

// Full says whether the pool has no address left.
func (p Pool) Full(log *slog.Logger) bool {
	full, err := ipam.Exhausted(p.Config, p.Network)
	if err != nil {
		log.Warn("looking for free addresses", "pool", p.Dir, "err", err)
	}
	return full
}

// ReadPools returns the pools of the networks in a directory of conflists (/etc/cni/net.d) that
// unwind runs with the given state directory. The error names the files and chains that cannot be
// read; ReadPools returns the pools of the others with it.
func ReadPools(confDir, stateDir string) ([]Pool, error) {
	paths, err := netconf.Conflists(confDir)
	errs := []error{err}
	var pools []Pool
	for _, path := range paths {
		found, err := readPools(path, stateDir)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", path, err))
		}
		for _, p := range found {
			if !slices.ContainsFunc(pools, func(o Pool) bool { return o.Dir == p.Dir }) {
				pools = append(pools, p)
			}
		}
	}
	return pools, errors.Join(errs...)
}

func readPools(path, stateDir string) ([]Pool, error) {
	data, err := netconf.ReadFile(path)
	if err != nil || !bytes.Contains(data, []byte(netconf.Name)) {
		return nil, err
	}
	list, err := netconf.ReadConflist(path)
	if err != nil || list.Unwind == nil || list.Unwind.StateDir != filepath.Clean(stateDir) {
		return nil, err
	}
	chain, err := list.Unwind.LoadChain()
	if err != nil {
		return nil, err
	}
	return PoolsOf(chain, list.Unwind), nil
}

// reconcile compares the reservations in a pool with the journal and releases the dead ones. It
// skips those whose owner the journal knows: they follow its entry.
func (s *Sweep) reconcile(ctx context.Context, pool Pool, dryRun bool) (findings []Finding, err error) {
	found, err := ipam.Scan(pool.Dir)
	if len(found) == 0 {
		return nil, err
	}
	known, knownErr := s.containers(ctx)
	if knownErr != nil {
		return nil, errors.Join(err, knownErr)
	}
	plan := ipam.Plan(found, func(r ipam.Reservation) (bool, string) {
		if known[r.Owner.ContainerID] || s.w.Node.List == nil {
			return false, "" // without a list nothing speaks against an owner
		}
		v := alive.DecideOrphan(s.lookAtOrphan(pool, r))
		if v.Fate != alive.Dead {
			findings = append(findings, strayFinding(pool, r, v))
		}
		return v.Fate == alive.Dead, v.Reason.Text
	})
	var released []ipam.Planned
	if !dryRun {
		var applyErr error
		released, applyErr = ipam.Apply(ctx, pool.Dir, plan)
		err = errors.Join(err, applyErr)
	}
	gone := map[netip.Addr]bool{}
	for _, r := range released {
		gone[r.Address] = true
		s.w.Journal.Event(journal.Event{Kind: journal.Released, Key: strayFinding(pool, r.Reservation, alive.Verdict{}).Key,
			Addresses: []netip.Addr{r.Address}, Reason: r.Reason})
		s.w.Log.Info("address released", "network", pool.Network, "address", r.Address, "owner", r.Owner.ContainerID, "reason", r.Reason)
	}
	for _, r := range plan {
		f := strayFinding(pool, r.Reservation, alive.Verdict{Fate: alive.Dead, Reason: alive.Reason{Text: r.Reason}})
		f.Released = gone[r.Address]
		findings = append(findings, f)
	}
	return findings, err
}

func strayFinding(pool Pool, r ipam.Reservation, v alive.Verdict) Finding {
	key := journal.Key{Network: pool.Network, ContainerID: r.Owner.ContainerID, IfName: r.Owner.IfName}
	return Finding{Key: key, Address: r.Address, Fate: v.Fate, Reason: v.Reason}
}

// containers returns the container IDs that the journal knows, in any network: their reservations
// follow their entries.
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

func (s *Sweep) lookAtOrphan(pool Pool, r ipam.Reservation) alive.Orphan {
	seen := alive.Orphan{SameNamespaces: s.w.Node.SeesAsRuntime()}
	cache, err := s.w.Node.CachedAttachments(pool.Network, r.Owner.ContainerID)
	seen.Listed = s.w.Node.List.HasContainer(pool.Network, r.Owner.ContainerID, cache)
	if seen.Listed != tristate.No {
		return seen
	}
	if changed, err := r.Changed(); err == nil {
		// The wall clock may have been set since, but not before the machine was started.
		age := min(time.Since(changed), time.Duration(journal.BootNanos()))
		seen.PastGracePeriod = tristate.Of(age > pool.GracePeriod, nil)
	}
	seen.Cached = tristate.Of(false, err)
	for _, c := range cache {
		if _, err := host.Identify(c.NetNS); c.NetNS == "" || err == nil || !host.IsNoNetNS(err) {
			seen.Cached = tristate.Yes
		}
	}
	if seen.PastGracePeriod == tristate.Yes && seen.Cached == tristate.No {
		var err error
		seen.InUse, err = s.w.Node.InUse(r.Address, nil)
		seen.Doubt = alive.Doubt(err)
	}
	return seen
}
