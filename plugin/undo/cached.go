package undo

import (
	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/tristate"
)

// takeCached adds the ADD in libcni's cache, if the journal does not have it, so that it is undone
// as well: it is as dead as the others. The cache has its chain too. For an ADD through unwind,
// takeCached assumes the delegates of the newest ADD, with unknown outcomes.
func (w *Worker) takeCached(e *journal.Entry) {
	newest := e.Newest()
	found, err := w.Node.CachedInterface(e)
	if err != nil || !found.Known() || w.Node.SameBoot(newest) != tristate.Yes ||
		alive.AnySameADD(e.Undone, found) == tristate.Yes {
		return
	}
	c, err := w.Node.CachedADD(e.Key)
	if c == nil || err != nil {
		return
	}
	gen := journal.Generation{
		NetNS: journal.NetNS{Path: c.NetNS}, Args: newest.Args, Path: newest.Path,
		CNIVersion: newest.CNIVersion, RuntimeConfig: newest.RuntimeConfig,
		Host: newest.Host, Created: journal.Now(), GracePeriod: newest.GracePeriod,
		Stores: newest.Stores,
	}
	conf := netconf.DefaultConf()
	conf.Name, conf.RuntimeConfig = e.Network, c.RuntimeConfig
	if chain, err := conf.ParseChain(c.Config, ""); err == nil {
		gen.CNIVersion, gen.Steps = chain.CNIVersion, chain.Steps(conf)
		gen.RuntimeConfig = netconf.Marshal(c.RuntimeConfig)
	} else {
		for _, s := range newest.Steps {
			gen.Steps = append(gen.Steps, journal.Step{
				Index: s.Index, Type: s.Type, Config: s.Config, ADD: journal.AddCutOff,
			})
		}
	}
	if gen.Result, err = netconf.ConvertResult(c.Result, gen.CNIVersion); err != nil {
		w.Log.Warn("the result in libcni's cache cannot be used", "attachment", e.Key.String(), "err", err)
		return
	}
	by := broughtBy(e, gen.Steps)
	for _, address := range found.Addresses {
		gen.Claims = append(gen.Claims, journal.Claim{Address: address, Step: by.Step, Pool: by.Pool})
	}
	e.Generations = append(e.Generations, gen)
}

// broughtBy returns a claim without an address, of the delegate that brings the addresses of an ADD
// with these steps. If none of them does, that delegate's step is undone: it is the one of the newest
// ADD, or one before all.
func broughtBy(e *journal.Entry, steps []journal.Step) journal.Claim {
	for _, s := range steps {
		if pool := ipam.Pool(s.Config, e.Network); pool != "" {
			return journal.Claim{Step: s.Index, Pool: pool}
		}
	}
	if claims := e.Newest().Claims; len(claims) > 0 {
		return claims[0]
	}
	return journal.Claim{Step: -1}
}
