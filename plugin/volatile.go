package plugin

import (
	"encoding/json"
	"slices"

	"cni-unwind/journal"
)

// inKernel are plugins that keep nothing of an attachment but what the kernel has, and firewalld at
// run time, by the sources of containernetworking/plugins 1.9.1. tuning keeps its backup in a
// directory, in memory unless "dataDir" names another one.
var inKernel = []string{
	"bandwidth", "bridge", "dummy", "firewall", "host-device", "ipvlan", "loopback", "macvlan", "portmap",
	"ptp", "sbr", "tap", "tuning", "vlan", "vrf",
}

// volatile says whether a loss of power may take what the journal has of an entry beyond the first
// version of its newest ADD. It ends all that these plugins keep, but for the addresses that
// host-local gave to the first one. The first version names that delegate, and host-local's files
// name the owner of an address. An ADD that has no number yet has no first version.
func volatile(e *journal.Entry) bool {
	for _, g := range e.Generations {
		if g.Number == 0 {
			return false
		}
		for _, step := range g.Steps {
			var conf struct {
				DataDir string `json:"dataDir"`
				IPAM    struct {
					Type string `json:"type"`
				} `json:"ipam"`
			}
			if json.Unmarshal(step.Config, &conf) != nil || conf.DataDir != "" || !slices.Contains(inKernel, step.Type) {
				return false
			}
			keepsNone := conf.IPAM.Type == "" || conf.IPAM.Type == "static"
			if !keepsNone && (conf.IPAM.Type != "host-local" || step.Index > 0) {
				return false
			}
		}
	}
	return true
}
