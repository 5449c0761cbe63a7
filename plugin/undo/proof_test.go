package undo

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/tristate"
)

// TestOnNode: a store that can be asked is that of a plugin whose DEL proves nothing by itself.
func TestOnNode(t *testing.T) {
	for plugin := range ipam.OnNode() {
		if p := known.Of(plugin); !p.MayLie && !p.Queues {
			t.Errorf("%s: nothing known of it asks for a proof", plugin)
		}
	}
}

// probeOf notes what it is asked, and has an answer.
type probeOf struct {
	asked  *[]string
	plugin string
	known  bool
}

func (p probeOf) Held(_ context.Context, q ipam.Query) ([]netip.Addr, bool, error) {
	*p.asked = append(*p.asked, fmt.Sprintf("%s of %s %s %s, ipam %q at %q", p.plugin, q.Network, q.ContainerID,
		q.IfName, q.IPAM, q.Store))
	return nil, p.known, nil
}

// TestAsked: the stores that a step's DEL is proven by are those of its own plugin and of its IPAM
// plugin, in that order, up to the first that tells.
func TestAsked(t *testing.T) {
	for _, tt := range []struct {
		plugin, config string
		want           []string
		proven         tristate.Value
	}{
		{"macvlan", `{"ipam": {"type": "whereabouts"}}`, []string{`whereabouts of net c eth0, ipam "whereabouts" at ""`}, tristate.Yes},
		{"aws-cni", `{}`, []string{`aws-cni of net c eth0, ipam "" at "/ipam.json"`}, tristate.Yes},
		{"cilium-cni", `{"ipam": {"type": "whereabouts"}}`, []string{`cilium-cni of net c eth0, ipam "whereabouts" at ""`,
			`whereabouts of net c eth0, ipam "whereabouts" at ""`}, tristate.Yes},
		{"cilium-cni", `{}`, []string{`cilium-cni of net c eth0, ipam "" at ""`}, tristate.Unknown},
		{"bridge", `{"ipam": {"type": "host-local"}}`, nil, tristate.Unknown},
		{"own", `{"ipam": "whereabouts"}`, nil, tristate.Unknown},
		{"own", `[`, nil, tristate.Unknown},
	} {
		var asked []string
		w := testWorker()
		w.Probes = map[string]ipam.Probe{
			"aws-cni": probeOf{&asked, "aws-cni", true}, "cilium-cni": probeOf{&asked, "cilium-cni", false},
			"whereabouts": probeOf{&asked, "whereabouts", true},
		}
		u := &undoing{Worker: w, Job: Job{Entry: &journal.Entry{Key: journal.Key{Network: "net", ContainerID: "c", IfName: "eth0"}}},
			gen: &journal.Generation{Stores: map[string]string{"aws-cni": "/ipam.json"}}}
		is, why := (&attempt{u, &journal.Step{Type: tt.plugin, Config: json.RawMessage(tt.config)}}).proven(t.Context())
		if !slices.Equal(asked, tt.want) || is != tt.proven || why != "" {
			t.Errorf("%s %s: asked %q, %v %q", tt.plugin, tt.config, asked, is, why)
		}
	}
}
