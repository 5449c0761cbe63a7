package facts

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"cni-unwind/testdata/sandbox"
)

// netnsAt makes a network namespace with an interface at a path.
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

// TestOpenPins: the place of a namespace leads there after another namespace has come to its path.
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
		t.Error("it is not at its path")
	}
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	netnsAt(t, path, "eth1")
	pinned := place.Pinned()
	if place.IsAt(path) || place.IsAt(path+"x") {
		t.Error("another one is taken for it")
	}
	if now, err := Look(path, "eth0"); err != nil || now.There() || now.Netns.Same(seen.Netns) {
		t.Errorf("at the path: %+v (%v)", now, err)
	}
	if now, err := Look(pinned, "eth0"); err != nil || !now.There() || !now.Netns.Same(seen.Netns) {
		t.Errorf("at the place: %+v (%v)", now, err)
	}
	place.Close()
	if now, err := Look(pinned, "eth0"); err == nil {
		t.Errorf("after it was closed: %+v", now)
	}
}
