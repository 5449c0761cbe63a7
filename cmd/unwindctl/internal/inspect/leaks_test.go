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
		Got: journal.Got{Claims: []journal.Claim{{Address: netip.MustParseAddr("10.9.0.2")}}}}
	const anything = "anything that bridge created for container c, interface eth0"
	for _, tt := range []struct{ plugin, config, want string }{
		{"bridge", `{}`, anything}, {"bridge", `[`, anything}, {"loopback", `{}`, ""},
		{"bridge", `{"ipam": {"type": "whereabouts"}}`, "the records of whereabouts for container c, such as 10.9.0.2\n" + anything},
		{"bridge", `{"ipam": {"type": "host-local", "dataDir": "/nonexistent"}}`, anything},
	} {
		got := leaksOfStep(e, &journal.Step{Type: tt.plugin, Config: json.RawMessage(tt.config)})
		if strings.Join(got, "\n") != tt.want {
			t.Errorf("%s %s: %q, want %q", tt.plugin, tt.config, got, tt.want)
		}
	}
}
