package undo

import (
	"encoding/json"
	"maps"
	"slices"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/netconf"
)

// This file answers what a runtime would do now with a plugin that a record names.

// Present returns the configuration of a step's DEL for a retry. The present one has the runtime
// arguments of the ADD. Present returns nil if the network's chain contains no such delegate, or
// several.
func (w *Worker) Present(
	e *journal.Entry, s *journal.Step, retry decide.Retry,
) json.RawMessage {
	chain, of := w.chainOf(e.Network)
	if chain == nil {
		return nil
	}
	i := chain.Only(s.Type)
	if i < 0 || slices.ContainsFunc(e.Undo.Steps,
		func(o journal.Step) bool { return o.Type == s.Type && o.Index != s.Index }) {
		return nil
	}
	if retry == decide.RecordedInNew {
		config := netconf.ObjectOf(s.Config)
		config["cniVersion"] = netconf.Marshal(chain.CNIVersion)
		return netconf.Marshal(config)
	}
	conf := *of
	conf.RuntimeConfig = netconf.ObjectOf(e.Added.RuntimeConfig)
	conf.Injected = netconf.ObjectOf(s.Config)
	maps.DeleteFunc(conf.Injected, func(key string, _ json.RawMessage) bool {
		return !slices.Contains(netconf.InjectedKeys, key)
	})
	return chain.Config(i, &conf)
}

// HasLeft reports whether a step's plugin has left the chain of the record's network. A chain that
// cannot be read contains every plugin.
func (w *Worker) HasLeft(e *journal.Entry, s *journal.Step) bool {
	chain, _ := w.chainOf(e.Network)
	return chain != nil && !slices.ContainsFunc(chain.Delegates,
		func(d netconf.Delegate) bool { return d.Type == s.Type })
}

// chainOf returns the chain of a network, or nil if it is unknown or cannot be read.
func (w *Worker) chainOf(network string) (*netconf.Chain, *netconf.Conf) {
	if w.Verb.Conf.Name == network {
		chain, _ := w.Verb.Chain() // nil after an error
		return chain, w.Verb.Conf
	}
	if w.ChainOf != nil {
		return w.ChainOf(network)
	}
	return nil, nil
}
