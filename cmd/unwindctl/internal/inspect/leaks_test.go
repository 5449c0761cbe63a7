package inspect

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"

	"github.com/containernetworking/plugins/pkg/utils"

	"cni-unwind/journal"
)

// TestLeaks: what one delegate may leave, with the chains as the reference plugins name them.
func TestLeaks(t *testing.T) {
	e := &journal.Entry{Key: journal.Key{Network: "podnet", ContainerID: "c", IfName: "eth0"},
		Generations: []journal.Generation{{Claims: []journal.Claim{{Address: netip.MustParseAddr("10.9.0.2")}}}}}
	chain := "chain " + utils.FormatChainName("podnet", "c") + " in table nat, and the rules that jump to it"
	for _, tt := range []struct{ plugin, config, want string }{
		{"bridge", `{"ipMasq": true}`, "bridge: " + chain},
		{"ptp", `{"ipMasq": true}`, "ptp: " + chain},
		{"bridge", `{}`, ""},
		{"bridge", `[`, ""},
		{"portmap", `{}`, "portmap: chain " + utils.MustFormatChainNameWithPrefix("podnet", "c", "DN-") +
			" in table nat, and the rules that jump to it"},
		{"firewall", `{}`, "firewall: rules for 10.9.0.2 in chain CNI-FORWARD of table filter"},
		{"loopback", `{}`, ""},
		{"tuning", `{}`, "tuning: everything of container c, interface eth0"},
		{"own", `{"ipMasq": true}`, "own: everything of container c, interface eth0"},
		{"bridge", `{"ipam": {"type": "whereabouts"}}`, "whereabouts: what it keeps for container c, such as 10.9.0.2"},
		{"bridge", `{"ipam": {"type": "host-local", "dataDir": "/nonexistent"}}`, ""},
	} {
		got := leaksOfStep(e, &journal.Step{Type: tt.plugin, Config: json.RawMessage(tt.config)})
		if strings.Join(got, "\n") != tt.want {
			t.Errorf("%s %s: %q, want %q", tt.plugin, tt.config, got, tt.want)
		}
	}
}
