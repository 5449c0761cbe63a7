package facts

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/sandbox"
)

// netnsAt creates a network namespace that contains a veth pair, and mounts it at a path.
func netnsAt(t *testing.T, path, ifname string) {
	t.Helper()
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(path, unix.MNT_DETACH) })
	out, err := exec.Command("unshare", "--net="+path, "ip", "link", "add", ifname, "type", "veth", "peer", "name", "peer0").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// TestOpenPins: Open keeps a namespace open. The pinned path still leads to that namespace after
// another namespace is mounted at the original path.
func TestOpenPins(t *testing.T) {
	t.Parallel()
	sandbox.Need(t)
	path := filepath.Join(t.TempDir(), "netns")
	netnsAt(t, path, "eth0")
	place, err := Open(path, "eth0")
	seen := place.Seen
	if err != nil || !seen.There() {
		t.Fatalf("%+v (%v)", seen, err)
	}
	if !place.IsAt(path) {
		t.Error("IsAt is false for the path that was opened")
	}
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	netnsAt(t, path, "eth1")
	pinned := place.Pinned()
	if place.IsAt(path) || place.IsAt(path+"x") {
		t.Error("IsAt takes another namespace for the one that was opened")
	}
	if now, err := InterfaceAt(path, "eth0"); err != nil || now.There() || now.Netns.Same(seen.Netns) {
		t.Errorf("at the original path: %+v (%v)", now, err)
	}
	if now, err := InterfaceAt(pinned, "eth0"); err != nil || !now.There() || !now.Netns.Same(seen.Netns) {
		t.Errorf("at the pinned path: %+v (%v)", now, err)
	}
	place.Close()
	if now, err := InterfaceAt(pinned, "eth0"); err == nil {
		t.Errorf("at the pinned path, after Close: %+v", now)
	}
}

// TestIn: eight goroutines call In at the same time, each for its own namespace, and each function
// runs in that namespace. Afterwards no thread of the process is in any of these namespaces.
func TestIn(t *testing.T) {
	t.Parallel()
	sandbox.Need(t)
	var all sync.WaitGroup
	inodes := map[string]bool{}
	var mu sync.Mutex
	for range 8 {
		path := filepath.Join(t.TempDir(), "netns")
		netnsAt(t, path, "eth0")
		all.Go(func() {
			held, err := ns.GetNS(path)
			if err != nil {
				t.Error(err)
				return
			}
			defer held.Close()
			var there unix.Stat_t
			if err := unix.Fstat(int(held.Fd()), &there); err != nil {
				t.Error(err)
			}
			mu.Lock()
			inodes[fmt.Sprintf("net:[%d]", there.Ino)] = true
			mu.Unlock()
			for range 20 {
				err := In(held, func() error {
					var its unix.Stat_t
					if err := unix.Stat("/proc/thread-self/ns/net", &its); err != nil || its.Ino != there.Ino {
						t.Errorf("in namespace %d instead of %d (%v)", its.Ino, there.Ino, err)
					}
					return io.EOF
				})
				if !errors.Is(err, io.EOF) {
					t.Errorf("In returned %v, want the function's error", err)
				}
			}
		})
	}
	all.Wait()
	threads, err := filepath.Glob("/proc/self/task/*/ns/net")
	if err != nil || len(threads) == 0 {
		t.Fatal(threads, err)
	}
	for _, thread := range threads {
		if link, err := os.Readlink(thread); err == nil && inodes[link] {
			t.Errorf("thread %s is still in %s", thread, link)
		}
	}
}

// TestIs: an interface belongs to a result if it exists and has one of the result's addresses. If
// the result has no address, it is enough that the interface exists.
func TestIs(t *testing.T) {
	t.Parallel()
	a, b := netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.3")
	for _, tt := range []struct {
		seen   Interface
		result []netip.Addr
		want   bool
	}{
		{Interface{index: 1, Addresses: []netip.Addr{a}}, []netip.Addr{b, a}, true},
		{Interface{index: 1, Addresses: []netip.Addr{a}}, []netip.Addr{b}, false},
		{Interface{index: 1, Addresses: []netip.Addr{a}}, nil, true},
		{Interface{}, nil, false},
	} {
		if got := tt.seen.Is(tt.result); got != tt.want {
			t.Errorf("%+v, %v: %t", tt.seen, tt.result, got)
		}
	}
}

// TestOccupant: Occupant finds the interface that already has a given name, even if it has no MAC
// address, such as cilium's netkit. It ignores lo, which every namespace has.
func TestOccupant(t *testing.T) {
	t.Parallel()
	sandbox.Need(t)
	path := filepath.Join(t.TempDir(), "netns")
	netnsAt(t, path, "eth0")
	netns, err := ns.GetNS(path)
	if err != nil {
		t.Fatal(err)
	}
	defer netns.Close()
	tun := &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "tun0"}, Mode: netlink.TUNTAP_MODE_TUN}
	tunErr := netns.Do(func(ns.NetNS) error { return netlink.LinkAdd(tun) })
	if tunErr != nil { // a kernel or a container may lack tun
		t.Log(tunErr)
	}
	for name, want := range map[string]bool{"eth0": true, "tun0": tunErr == nil, "lo": false, "none": false} {
		seen, err := InterfaceAt(path, name)
		if got := seen.Occupant(); err != nil || (got != "") != want {
			t.Errorf("%s: %q (%v)", name, got, err)
		}
	}
}

// TestHostLinks: of a result's interfaces, only a veth on the host counts as a host end.
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
