package ipam

import (
	"context"
	"encoding/json"
	"net/netip"
)

// Probe asks the store of a plugin what it keeps for an attachment. Some plugins exit with 0 from a
// DEL that freed nothing. A probe only looks: what is still held is released by the plugin's own DEL,
// once more.
type Probe interface {
	// Held returns the addresses that the store keeps for an attachment. asked is false if there is
	// no store that tells. An error means that the store cannot be asked now.
	Held(ctx context.Context, q Query) (held []netip.Addr, asked bool, err error)
}

// Query is what a probe is asked: an attachment, and a delegate that calls the probe's plugin, or is
// it.
type Query struct {
	Network, ContainerID, IfName string

	Config json.RawMessage // of the delegate
	IPAM   string          // the IPAM plugin that the delegate calls, or ""
	Store  string          // the path of the store; "" is the one that the plugin uses by default
}

// OnNode returns the probes of stores that are on the node, by the plugin.
func OnNode() map[string]Probe {
	return map[string]Probe{"aws-cni": AWS{}, "cilium-cni": Cilium{}}
}
