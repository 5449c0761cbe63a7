package facts

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
	"cni-unwind/testdata/sandbox"
)

// TestHostLinks: of the interfaces of a result, only a veth on the host is a host's end.
func TestHostLinks(t *testing.T) {
	sandbox.Need(t)
	for _, link := range []netlink.Link{
		&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "hl-host"}, PeerName: "hl-peer"},
		&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "hl-bridge"}},
	} {
		if err := netlink.LinkAdd(link); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = netlink.LinkDel(link) })
	}
	r, err := netconf.ParseResult(json.RawMessage(`{"interfaces": [{"name": "lo"}, {"name": ""}, {"name": "hl-none"},
		{"name": "hl-bridge"}, {"name": "hl-host"}, {"name": "hl-peer", "sandbox": "/n"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	host, err := netlink.LinkByName("hl-host")
	if err != nil {
		t.Fatal(err)
	}
	want := []journal.HostLink{{Name: "hl-host", MAC: host.Attrs().HardwareAddr.String()}}
	if diff := cmp.Diff(want, HostLinks(r)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
