package undo

import (
	"net/netip"
	"testing"

	"cni-unwind/ipam/ipamtest"
	"cni-unwind/journal"
)

// TestHeld: while its plugin is in the chain, a DEL that fails for a day is dropped only if the
// attachment surely has no address any more. A file of host-local that cannot be read, or whose text
// a power loss cut off, may be the attachment's.
func TestHeld(t *testing.T) {
	t.Parallel()
	pool := t.TempDir()
	ipamtest.Files{"10.1.0.2": "a\r\neth0", "10.1.0.3": "b\r\neth0", "10.1.0.5": "link to 10.1.0.3", "10.1.0.6": "a\r\net"}.Fill(t, pool)
	for _, tt := range []struct {
		name  string
		claim journal.Claim
		want  bool
	}{
		{"its file", journal.Claim{Address: netip.MustParseAddr("10.1.0.2"), Pool: pool}, true},
		{"another attachment's file", journal.Claim{Address: netip.MustParseAddr("10.1.0.3"), Pool: pool}, false},
		{"no file", journal.Claim{Address: netip.MustParseAddr("10.1.0.4"), Pool: pool}, false},
		{"a file that cannot be read", journal.Claim{Address: netip.MustParseAddr("10.1.0.5"), Pool: pool}, true},
		{"a file that was cut off", journal.Claim{Address: netip.MustParseAddr("10.1.0.6"), Pool: pool}, true},
		{"another IPAM plugin, its DEL is pending", journal.Claim{Address: netip.MustParseAddr("10.1.0.2"), Step: 1}, true},
		{"another IPAM plugin, its DEL is done", journal.Claim{Address: netip.MustParseAddr("10.1.0.2"), Step: 0}, false},
		{"another IPAM plugin, which nobody knows", journal.Claim{Address: netip.MustParseAddr("10.1.0.2"), Step: -1}, true},
	} {
		u := &undoing{Request: Request{Record: &journal.Record{
			Key: journal.Key{Network: "podnet", ContainerID: "a", IfName: "eth0"},
			Got: journal.Got{Claims: []journal.Claim{tt.claim}}, Steps: []journal.Step{{Index: 1}},
		}}}
		if got := len(u.held()) == 1; got != tt.want {
			t.Errorf("%s: held %t, want %t", tt.name, got, tt.want)
		}
	}
}
