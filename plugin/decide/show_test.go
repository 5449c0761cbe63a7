package decide

import (
	"encoding/json"
	"testing"

	"cni-unwind/journal"
)

// TestShow has each row of Show, and what is next to it.
func TestShow(t *testing.T) {
	for _, tt := range []struct {
		name, plugin, config string
		netns                NetNS
		want                 Shown
	}{
		{"the runtime's DEL", "bridge", ``, NetNS{Found: true, Sent: true, Interface: True}, ShowPath},
		{"a sweep's", "bridge", ``, NetNS{Found: true, Interface: True}, ShowPinned},
		{"a sweep's, the interface unknown", "bridge", ``, NetNS{Found: true}, ShowPinned},
		{"the interface is gone", "bridge", ``, NetNS{Found: true, Sent: true, Interface: False}, ShowScratch},
		{"the interface is gone, of no use", "host-device", ``, NetNS{Found: true, Interface: False}, ShowPinned},
		{"a sweep's, an agent opens it", "cilium-cni", ``, NetNS{Found: true}, ShowPath},
		{"a sweep's, an unknown plugin", "own", ``, NetNS{Found: true}, ShowPath},

		{"gone", "bridge", ``, NetNS{Sent: true}, ShowScratch},
		{"gone, and nothing is known of the ADD: containerd's second DEL", "bridge", ``, NetNS{Unknown: true}, ShowNone},
		{"gone, and nothing is known of the ADD: the runtime's path", "ptp", ``, NetNS{Sent: true, Unknown: true}, ShowSent},
		{"gone, and nothing is known of the ADD, but it needs one", "sbr", ``, NetNS{Unknown: true}, ShowScratch},
		{"gone, a sweep", "own", ``, NetNS{}, ShowNone},
		{"gone, it would take another's", "host-device", ``, NetNS{Sent: true}, ShowNone},
		{"gone, the runtime asks", "own", ``, NetNS{Sent: true}, ShowSent},
		{"not found, the runtime asks", "own", ``, NetNS{Sent: true}, ShowSent},
		{"not found, the runtime's path is another's", "own", ``, NetNS{Sent: true, Anothers: true}, ShowNowhere},
		{"not found, another's, it finds rules by the interface", "bridge", ``, NetNS{Sent: true, Anothers: true}, ShowScratch},
		{"not found, another's, a sweep", "own", ``, NetNS{Anothers: true}, ShowNone},
	} {
		s := &journal.Step{Type: tt.plugin, Config: json.RawMessage(tt.config)}
		if got := Show(s, tt.netns); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
	}
}
