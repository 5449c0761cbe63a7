package undo

import (
	"fmt"
	"slices"
	"time"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/tristate"
)

// takeCached adds the ADD in libcni's cache to the entry, if the journal does not have it, so that
// it is undone as well: it is as dead as the others. The cache also has the chain. For an ADD
// through unwind, takeCached assumes the delegates of the newest ADD, with unknown outcomes.
func (w *Worker) takeCached(e *journal.Entry) {
	newest := e.Newest()
	c, err := w.Node.CachedUnseen(e)
	if c == nil || err != nil || w.Node.SameBoot(newest) != tristate.Yes {
		return
	}
	found := netconf.InterfaceOf(c.Result, e.IfName)
	if !found.Known() || alive.AnySameADD(e.Undone, found) == tristate.Yes {
		return
	}
	gen := journal.Generation{
		NetNS: journal.NetNS{Path: c.NetNS}, Args: newest.Args, Path: newest.Path,
		CNIVersion: newest.CNIVersion, RuntimeConfig: newest.RuntimeConfig,
		Host: newest.Host, Created: journal.Now(), GracePeriod: newest.GracePeriod,
		Stores: newest.Stores,
	}
	if chain, conf, err := c.Chain(); err == nil && chain != nil {
		gen.CNIVersion, gen.Steps = chain.CNIVersion, chain.Steps(conf)
		gen.RuntimeConfig = netconf.Marshal(c.RuntimeConfig)
	} else {
		for _, s := range newest.Steps {
			gen.Steps = append(gen.Steps, journal.Step{
				Index: s.Index, Type: s.Type, Config: s.Config, ADD: journal.AddCutOff,
			})
		}
	}
	if err := addCached(e, gen, c); err != nil {
		w.Log.Warn("cannot use the result in libcni's cache", "attachment", e.Key.String(), "err", err)
	}
}

// OfCache returns the entry that the journal would have of an attachment in libcni's cache, if its
// ADD had been through unwind, in this boot and from these namespaces.
func (w *Worker) OfCache(c *alive.Cached, grace time.Duration) (*journal.Entry, error) {
	chain, conf, err := c.Chain()
	if err != nil {
		return nil, err
	}
	gen := journal.Generation{
		NetNS: journal.NetNS{Path: c.NetNS}, Args: c.CNIArgs(), CNIVersion: chain.CNIVersion,
		Host: w.Node.Host, Created: journal.Now(), GracePeriod: grace, Steps: chain.Steps(conf),
	}
	if len(c.RuntimeConfig) > 0 {
		gen.RuntimeConfig = netconf.Marshal(c.RuntimeConfig)
	}
	e := &journal.Entry{
		Key: c.Key(), Pod: netconf.PodOf(gen.Args), State: journal.Removing,
		Since: gen.Created, Updated: gen.Created,
	}
	if err := addCached(e, gen, c); err != nil {
		return nil, fmt.Errorf("its result: %w", err)
	}
	return e, nil
}

// addCached adds an ADD to an entry, with the result in libcni's cache and a claim on each of its
// addresses, of the delegate that allocates them. If no step does, that delegate's step is already
// undone: it is then the one of the newest ADD, or one before all others.
func addCached(e *journal.Entry, gen journal.Generation, c *alive.Cached) (err error) {
	if gen.Result, err = netconf.ConvertResult(c.Result, gen.CNIVersion); err != nil {
		return err
	}
	claim := journal.Claim{Step: -1}
	if newest := e.Newest(); newest != nil && len(newest.Claims) > 0 {
		claim = newest.Claims[0]
	}
	for _, s := range slices.Backward(gen.Steps) {
		if pool := ipam.Pool(s.Config, e.Network); pool != "" {
			claim = journal.Claim{Step: s.Index, Pool: pool}
		}
	}
	for _, claim.Address = range netconf.InterfaceOf(c.Result, e.IfName).Addresses {
		gen.Claims = append(gen.Claims, claim)
	}
	e.Generations = append(e.Generations, gen)
	return nil
}
