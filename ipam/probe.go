package ipam

import (
	"context"
	"encoding/json"
	"net/netip"
)

// Probe queries the store of a plugin for what it has for an attachment, because some plugins exit
// 0 from a DEL that freed nothing. A probe only reads: another DEL of the plugin releases the rest.
type Probe interface {
	// Held returns the addresses that the store has for an attachment. asked is false if there is no
	// store to query. An error means that the store cannot be queried now.
	Held(ctx context.Context, q Query) (held []netip.Addr, asked bool, err error)
}

// Query is the input of a probe: an attachment, and a delegate that is the probe's plugin or calls
// it.
type Query struct {
	Network, ContainerID, IfName string

	Config json.RawMessage // of the delegate
	IPAM   string          // the IPAM plugin that the delegate calls, or ""
	Store  string          // the path of the store; "" is the one that the plugin uses by default
}

// OnNode returns the probes of stores on the node, by plugin.
func OnNode() map[string]Probe {
	return map[string]Probe{"aws-cni": AWS{}, "cilium-cni": Cilium{}}
}
