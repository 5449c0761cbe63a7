package ipam

import (
	"context"
	"encoding/json"
	"net/netip"
)

// Probe asks the store of an IPAM plugin what it keeps for an attachment. Some plugins exit with 0
// from a DEL that freed nothing. A probe only looks: what is still held is released by the plugin's
// own DEL, once more.
type Probe interface {
	// Held returns the addresses that the store keeps for an attachment, given the configuration of
	// the delegate that calls the IPAM plugin, or is one. asked is false if the probe knows no store
	// of that delegate. An error means that the store cannot be asked now.
	Held(ctx context.Context, config json.RawMessage, network, containerID, ifname string) (
		held []netip.Addr, asked bool, err error)
}

// typesOf returns the type of a delegate, and that of its IPAM plugin or "".
func typesOf(config json.RawMessage) (delegate, plugin string) {
	var conf struct {
		Type string `json:"type"`
		IPAM struct {
			Type string `json:"type"`
		} `json:"ipam"`
	}
	if json.Unmarshal(config, &conf) != nil {
		return "", ""
	}
	return conf.Type, conf.IPAM.Type
}

// MayLie says whether a delegate's DEL is known to exit with 0 where it freed no address:
//   - aws-cni: if ipamd is away, or of another version (amazon-vpc-cni-k8s 1.13 and later,
//     cmd/routed-eni-cni-plugin/cni.go, del);
//   - whereabouts: whatever the API server says (0.9.4, cmd/whereabouts.go, cmdDel);
//   - spiderpool: if the agent cannot release it (1.2.2, cmd/spiderpool/cmd/command_delete.go).
//
// All three free by the container ID or the pod's UID. aws-cni also removes the routing rules of
// prevResult's address where ipamd answers with an error, whoever has the address: its DEL must not
// be shown one that has another owner.
func MayLie(config json.RawMessage) bool {
	delegate, plugin := typesOf(config)
	return delegate == awsType || isElsewhere(plugin)
}

// RemovesByAddress says whether a delegate of a type, which gives out addresses, also removes, at its
// DEL, what the next owner of the address in prevResult has made by the end of its own ADD: aws-cni,
// see MayLie.
func RemovesByAddress(delegate string) bool { return delegate == awsType }

// Elsewhere says whether a delegate that MayLie keeps its addresses on another machine.
func Elsewhere(config json.RawMessage) bool {
	_, plugin := typesOf(config)
	return isElsewhere(plugin)
}

func isElsewhere(plugin string) bool { return plugin == "whereabouts" || plugin == "spiderpool" }
