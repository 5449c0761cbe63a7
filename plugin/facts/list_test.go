package facts

import (
	"testing"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/tristate"
)

// TestShortIDs: a list with what crictl and nerdctl print of a container ID has the container; a
// shorter beginning, or that of another, does not count.
func TestShortIDs(t *testing.T) {
	t.Parallel()
	const id = "d66c0f41dfc8d0199ad675f1f60e319bc48e53c28e496e1fc9eb2ce29ec4182e"
	for _, tt := range []struct {
		listed, ifname string
		want           bool
	}{
		{id, "eth0", true}, {id, "", true}, {id, "eth1", false}, {id[:12], "eth0", true}, {id[:13], "", true},
		{id[:12], "eth1", false}, {id[:11], "eth0", false}, {"", "", false}, {id + "0", "eth0", false},
		{id[:12] + "f", "eth0", false},
	} {
		l := NewList("podnet", []netconf.Attachment{{ContainerID: tt.listed, IfName: tt.ifname}})
		if got := l.Names(journal.Key{Network: "podnet", ContainerID: id, IfName: "eth0"}); got != tt.want {
			t.Errorf("%+v: %t", tt, got)
		}
		want := tristate.Of(tt.want || tt.ifname == "eth1", nil) // with any interface
		if got := l.HasContainer("podnet", id, nil); got != want {
			t.Errorf("%+v: container %v", tt, got)
		}
	}
}
