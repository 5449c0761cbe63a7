package undo

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cni-unwind/ipam/ipamtest"
	"cni-unwind/journal"
)

// TestHeld: held omits a claim only if the attachment certainly no longer has the claim's address.
// A file of host-local that cannot be read, or that a power loss cut off, may be the attachment's.
// A DEL that would free a held address is dropped only if the DEL's plugin has left the chain.
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

// TestProvenGone: a namespace that the ADD could not identify counts as gone if its path leads to
// no namespace. If an error hides what is at the path, the namespace does not count as gone.
func TestProvenGone(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, path string
		searchErr  error
		want       bool
	}{
		{"no path", "", nil, true},
		{"nothing at the path", filepath.Join(filepath.Dir(file), "none"), nil, true},
		{"a file at the path", file, nil, true},
		{"an error", strings.Repeat("/x", 3000), nil, false},
		{"a namespace at the path", "/proc/self/ns/net", nil, false},
		{"an error of a search that was not made", file, errors.New("not searched"), true},
	} {
		u := &undoing{Request: Request{Record: &journal.Record{Added: journal.Added{NetNS: journal.NetNS{Path: tt.path}}}},
			Worker: &Worker{Env: &Env{}}}
		if got := u.provenGone(tt.searchErr); got != tt.want {
			t.Errorf("%s: gone %t, want %t", tt.name, got, tt.want)
		}
	}
}
