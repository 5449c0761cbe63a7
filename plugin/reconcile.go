package plugin

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/internal/tristate"
	"cni-unwind/plugin/internal/verdict"
)

// reconcile compares the reservations in a pool with the journal and releases the dead ones. It
// skips those whose owner the journal knows: they follow its entry.
func (o *op) reconcile(ctx context.Context, pool Pool, dryRun bool) (findings []Finding, err error) {
	found, err := ipam.Scan(pool.Dir)
	if len(found) == 0 {
		return nil, err
	}
	known, knownErr := o.containers(ctx)
	if knownErr != nil {
		return nil, errors.Join(err, knownErr)
	}
	plan := ipam.Plan(found, func(r ipam.Reservation) (bool, string) {
		if known[r.Owner.ContainerID] || o.list == nil {
			return false, "" // without a list nothing speaks against an owner
		}
		v := verdict.DecideOrphan(o.lookAtOrphan(pool, r))
		if v.Fate != verdict.Dead {
			findings = append(findings, strayFinding(pool, r, v))
		}
		return v.Fate == verdict.Dead, v.Reason.Text
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
		o.recordEvent(journal.Event{Kind: journal.Released, Key: strayFinding(pool, r.Reservation, verdict.Verdict{}).Key,
			Addresses: []netip.Addr{r.Address}, Reason: r.Reason})
		o.log.Info("address released", "network", pool.Network, "address", r.Address, "owner", r.Owner.ContainerID, "reason", r.Reason)
	}
	for _, r := range plan {
		f := strayFinding(pool, r.Reservation, verdict.Verdict{Fate: verdict.Dead, Reason: verdict.Reason{Text: r.Reason}})
		f.Released = gone[r.Address]
		findings = append(findings, f)
	}
	return findings, err
}

func strayFinding(pool Pool, r ipam.Reservation, v verdict.Verdict) Finding {
	key := journal.Key{Network: pool.Network, ContainerID: r.Owner.ContainerID, IfName: r.Owner.IfName}
	return Finding{Key: key, Address: r.Address, Fate: v.Fate, Reason: v.Reason}
}

// containers returns the container IDs that the journal knows, in any network: their reservations
// follow their entries.
func (o *op) containers(ctx context.Context) (map[string]bool, error) {
	known := map[string]bool{}
	err := o.store.View(ctx, func(tx *journal.Tx) error {
		return tx.Outlines(func(outline journal.Outline, _ error) error {
			known[outline.ContainerID] = true
			return nil
		})
	})
	return known, err
}

func (o *op) lookAtOrphan(pool Pool, r ipam.Reservation) verdict.Orphan {
	seen := verdict.Orphan{SameNamespaces: o.seesAsRuntime()}
	cache, err := o.cachedAttachments(pool.Network, r.Owner.ContainerID)
	seen.Listed = o.list.hasContainer(pool.Network, r.Owner.ContainerID, cache)
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
		seen.InUse, err = o.inUse(r.Address, nil)
		seen.Doubt = doubt(err)
	}
	return seen
}

// hasContainer says whether a list has a container, with any interface. A list of pods says nothing
// of a container that is no pod; libcni's cache tells.
func (l *List) hasContainer(network, id string, cache []cached) tristate.Value {
	if l == nil || l.Network != "" && l.Network != network {
		return tristate.Unknown
	}
	for a := range l.Valid {
		if a.ContainerID == id {
			return tristate.Yes
		}
	}
	for _, c := range cache {
		if l.Pods && !c.isPod() {
			return tristate.Unknown
		}
	}
	return tristate.No
}
