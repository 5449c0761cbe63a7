package decide

import (
	"encoding/json"
	"testing"

	"cni-unwind/journal"
)

// TestShow covers each case of Show, and variants of the cases with one fact changed.
func TestShow(t *testing.T) {
	for _, tt := range []struct {
		name, plugin, config string
		netns                NetNS
		want                 Shown
	}{
		{"the runtime's DEL", "bridge", ``, NetNS{Found: true, Sent: true, Interface: True}, ShowPath},
		{"a sweep's DEL", "bridge", ``, NetNS{Found: true, Interface: True}, ShowPinned},
		{"a sweep's DEL, the interface is unknown", "bridge", ``, NetNS{Found: true}, ShowPinned},
		{"the interface is gone", "bridge", ``, NetNS{Found: true, Sent: true, Interface: False}, ShowScratch},
		{"the interface is gone, a scratch namespace is of no use", "host-device", ``, NetNS{Found: true, Interface: False}, ShowPinned},
		{"a sweep's DEL, an agent opens the namespace", "cilium-cni", ``, NetNS{Found: true}, ShowPath},
		{"a sweep's DEL, an unknown plugin", "own", ``, NetNS{Found: true}, ShowPath},

		{"gone", "bridge", ``, NetNS{Sent: true}, ShowScratch},
		{"gone, and nothing is known of the ADD: containerd's second DEL", "bridge", ``, NetNS{Unknown: true}, ShowNone},
		{"gone, and nothing is known of the ADD: the runtime's path", "ptp", ``, NetNS{Sent: true, Unknown: true}, ShowSent},
		{"gone, and nothing is known of the ADD, but the plugin needs a namespace", "sbr", ``, NetNS{Unknown: true}, ShowScratch},
		{"gone, a sweep's DEL", "own", ``, NetNS{}, ShowNone},
		{"gone, the plugin could take another container's device", "host-device", ``, NetNS{Sent: true}, ShowNone},
		{"gone, the runtime's DEL", "own", ``, NetNS{Sent: true}, ShowSent},
		{"not found, the runtime's DEL", "own", ``, NetNS{Sent: true}, ShowSent},
		{"not found, the runtime's path leads to another attachment", "own", ``, NetNS{Sent: true, Anothers: true}, ShowNowhere},
		{"not found, another attachment's path, the plugin finds rules by the interface", "bridge", ``, NetNS{Sent: true, Anothers: true}, ShowScratch},
		{"not found, another attachment's path, a sweep's DEL", "own", ``, NetNS{Anothers: true}, ShowNone},
	} {
		s := &journal.Step{Type: tt.plugin, Config: json.RawMessage(tt.config)}
		if got := Show(s, tt.netns); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
	}
}
