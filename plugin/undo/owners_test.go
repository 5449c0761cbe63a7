package undo

import (
	"encoding/json"
	"strings"
	"testing"

	"cni-unwind/journal"
	"cni-unwind/plugin/facts"
)

// TestHasADD: a record that is being undone says nothing about a later ADD of its container that
// libcni's cache has, even with the same address. That one's rule would be taken by a late DEL.
func TestHasADD(t *testing.T) {
	result := func(mac string) json.RawMessage {
		return json.RawMessage(strings.ReplaceAll(`{"cniVersion": "1.0.0", "interfaces": [{"name": "eth0",
			"mac": "MAC", "sandbox": "/run/netns/a"}], "ips": [{"address": "10.0.0.2/24", "interface": 0}]}`, "MAC", mac))
	}
	key := journal.Key{Network: "net", ContainerID: "a", IfName: "eth0"}
	records := []*journal.Entry{{Key: key, State: journal.Deleting, Result: result("02:00:00:00:00:01")}}
	for _, tt := range []struct {
		name, mac string
		has       bool
	}{
		{"the ADD on record", "02:00:00:00:00:01", true},
		{"a later ADD", "02:00:00:00:00:02", false},
	} {
		one := facts.Cached{Network: "net", ContainerID: key.ContainerID, IfName: "eth0", Result: result(tt.mac)}
		if hasADD(records, one) != tt.has {
			t.Errorf("%s: want %v", tt.name, tt.has)
		}
	}
}
