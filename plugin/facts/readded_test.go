package facts

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/record"
	"cni-unwind/plugin/tristate"
)

// TestUnrecorded: another file of host-local's, or another interface in libcni's cache, shows an ADD
// that the journal does not have. Neither has to be newer. A DEL that it does not have shows if both
// have nothing of the attachment.
func TestUnrecorded(t *testing.T) {
	t.Parallel()
	const result = `{"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "mac": "%s", "sandbox": "%s"}], "ips": [{"address": "%s/24", "interface": 0}]}`
	const mac, address = "02:00:00:00:00:01", "10.0.0.2"
	file := func(pool, address, owner string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(pool, address), []byte(owner), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const there, gone = "/proc/self/ns/net", "/nonexistent"
	cache := func(dir, mac, netns, address string) {
		file(dir, "podnet-a-eth0", fmt.Sprintf(`{"ifName": "eth0", "result": `+result+`}`, mac, netns, address))
	}
	hour := func(pool, address string, hours int) {
		at := time.Now().Add(time.Duration(hours) * time.Hour)
		if err := os.Chtimes(filepath.Join(pool, address), at, at); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		name   string
		change func(pool, cached string, e *journal.Entry)
		later  tristate.Value
		passed bool
	}{
		{"as it was", func(string, string, *journal.Entry) {}, tristate.No, false},
		{"released", func(pool, _ string, _ *journal.Entry) { _ = os.Remove(filepath.Join(pool, address)) }, tristate.No, true},
		{"the same address, later", func(pool, _ string, _ *journal.Entry) { hour(pool, address, 1) }, tristate.Yes, false},
		{"the same address, after the clock was set back", func(pool, _ string, _ *journal.Entry) { hour(pool, address, -1) }, tristate.Yes, false},
		{"the same address and time", func(_, _ string, e *journal.Entry) { e.Claims[0].Ino++ }, tristate.Yes, false},
		{"the same, on a copy of the disk", func(_, _ string, e *journal.Entry) {
			e.Claims[0].Ino++
			e.Host.BootID = "another"
		}, tristate.No, false},
		{"a claim without a file", func(pool, _ string, e *journal.Entry) {
			e.Claims[0].Ino, e.Claims[0].Mtime = 0, 0
		}, tristate.No, false},
		{"one more address", func(pool, _ string, _ *journal.Entry) { file(pool, "10.0.0.3", "a\r\neth0") }, tristate.Yes, false},
		{"another's address", func(pool, _ string, _ *journal.Entry) { file(pool, "10.0.0.3", "b\r\neth0") }, tristate.No, false},
		{"nobody's address", func(pool, _ string, _ *journal.Entry) { file(pool, "10.0.0.3", "") }, tristate.No, false},
		{"a pool that cannot be read", func(pool, _ string, _ *journal.Entry) {
			_ = os.RemoveAll(pool)
			_ = os.WriteFile(pool, nil, 0o600)
		}, tristate.Unknown, false},
		{"cached", func(_, cached string, _ *journal.Entry) { cache(cached, mac, there, address) }, tristate.No, false},
		{"another address cached", func(_, cached string, _ *journal.Entry) { cache(cached, mac, there, "10.0.0.4") }, tristate.Yes, false},
		{"another address cached, of a namespace that is gone", func(_, cached string, _ *journal.Entry) { cache(cached, mac, gone, "10.0.0.4") }, tristate.No, false},
		{"another MAC address cached", func(_, cached string, _ *journal.Entry) { cache(cached, "02:00:00:00:00:02", there, address) }, tristate.Yes, false},
		{"no interface, and none cached", func(pool, cached string, e *journal.Entry) {
			e.Result, e.Claims = []byte(`{"cniVersion": "1.0.0"}`), nil
			file(cached, "podnet-a-eth0", `{"ifName": "eth0", "result": {"cniVersion": "1.0.0"}}`)
		}, tristate.No, false},
		{"released, and cached", func(pool, cached string, _ *journal.Entry) {
			_ = os.Remove(filepath.Join(pool, address))
			cache(cached, mac, there, address)
		}, tristate.No, false},
		{"released, and no cache", func(pool, cached string, _ *journal.Entry) {
			_ = os.Remove(filepath.Join(pool, address))
			_ = os.Remove(cached)
		}, tristate.No, false},
		{"the address is another's", func(pool, _ string, _ *journal.Entry) { file(pool, address, "b\r\neth0") }, tristate.No, true},
		{"the address is of another interface", func(pool, _ string, _ *journal.Entry) { file(pool, address, "a\r\neth1") }, tristate.No, true},
		{"the address is nobody's", func(pool, _ string, _ *journal.Entry) { file(pool, address, "") }, tristate.No, true},
		{"one address is released, one is not", func(pool, _ string, e *journal.Entry) {
			e.Claims = append(e.Claims, journal.Claim{Address: netip.MustParseAddr("10.0.0.3"), Pool: pool})
		}, tristate.No, false},
		{"no pool", func(pool, _ string, _ *journal.Entry) { _ = os.RemoveAll(pool) }, tristate.No, false},
		{"an address of another IPAM plugin", func(_, _ string, e *journal.Entry) { e.Claims[0].Pool = "" }, tristate.No, false},
		{"a cache that cannot be read", func(_, cached string, _ *journal.Entry) { file(cached, "podnet-a-eth0", "{") }, tristate.Unknown, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			pool, cached := filepath.Join(t.TempDir(), "podnet"), t.TempDir()
			if err := os.Mkdir(pool, 0o700); err != nil {
				t.Fatal(err)
			}
			file(pool, address, "a\r\neth0")
			at := ipam.FileAt(pool, netip.MustParseAddr(address))
			e := &journal.Entry{Key: journal.Key{Network: "podnet", ContainerID: "a", IfName: "eth0"}, State: journal.Live,
				Result: []byte(fmt.Sprintf(result, mac, there, address)), Host: journal.Host{BootID: "this"},
				Claims: []journal.Claim{{Address: netip.MustParseAddr(address), Pool: pool, Ino: at.Ino, Mtime: at.Mtime}}}
			tt.change(pool, cached, e)
			n := &Node{Journal: &record.Recorder{Store: &journal.Store{Dir: t.TempDir()}, Log: slog.New(slog.DiscardHandler)}, CacheDir: cached, View: &View{}, Host: journal.Host{BootID: "this"}}
			if got, err := n.Later(t.Context(), e); got != tt.later || (err != nil) != (got == tristate.Unknown) {
				t.Errorf("added later: %v (%v), want %v", got, err, tt.later)
			}
			if got := n.Passed(e); got != tt.passed {
				t.Errorf("its DEL has passed: %t", got)
			}
		})
	}
}

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
		if HasADD(records, netconf.InterfaceOf(result(tt.mac), key.IfName)) != tt.has {
			t.Errorf("%s: want %v", tt.name, tt.has)
		}
	}
}
