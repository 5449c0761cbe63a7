package inspect

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"

	"cni-unwind/journal"
)

// TestLeaks: what one delegate may leave.
func TestLeaks(t *testing.T) {
	e := &journal.Entry{Key: journal.Key{Network: "podnet", ContainerID: "c", IfName: "eth0"},
		Generations: []journal.Generation{{Claims: []journal.Claim{{Address: netip.MustParseAddr("10.9.0.2")}}}}}
	const rules = "its rules; unwindctl sweep --cri auto lists them afterwards"
	for _, tt := range []struct{ plugin, config, want string }{
		{"bridge", `{"ipMasq": true}`, "bridge: " + rules},
		{"ptp", `{"ipMasq": true}`, "ptp: " + rules},
		{"bridge", `{}`, ""},
		{"bridge", `[`, ""},
		{"portmap", `{}`, "portmap: " + rules},
		{"firewall", `{}`, "firewall: " + rules},
		{"loopback", `{}`, ""},
		{"tuning", `{}`, "tuning: everything of container c, interface eth0"},
		{"own", `{"ipMasq": true}`, "own: everything of container c, interface eth0"},
		{"bridge", `{"ipam": {"type": "whereabouts"}}`, "whereabouts: its records of container c, such as 10.9.0.2"},
		{"bridge", `{"ipam": {"type": "host-local", "dataDir": "/nonexistent"}}`, ""},
	} {
		got := leaksOfStep(e, &journal.Step{Type: tt.plugin, Config: json.RawMessage(tt.config)})
		if strings.Join(got, "\n") != tt.want {
			t.Errorf("%s %s: %q, want %q", tt.plugin, tt.config, got, tt.want)
		}
	}
}
