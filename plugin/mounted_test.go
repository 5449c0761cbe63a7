package plugin

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/undo"
)

// TestMountedElsewhere: the namespace of a pod with a macvlan, which has no end on the host, moves
// from its path to another one. It lives as long as it is mounted, and a DEL runs in it.
func TestMountedElsewhere(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		// leave takes the namespace off its path. It returns where it is, and whether it can be
		// reached.
		leave func(p *pod) (path string, open bool)
	}{
		{"the mount is moved", func(p *pod) (string, bool) {
			path := p.emptyFile("moved")
			p.mount(p.NetNS, path, "", unix.MS_MOVE, "")
			return path, true
		}},
		{"bound a second time", func(p *pod) (string, bool) {
			path := p.emptyFile(`a b"c\d`)
			p.mount(p.NetNS, path, "", unix.MS_BIND, "")
			p.unpin()
			return path, true
		}},
		{"bound a second time, another one at its path", func(p *pod) (string, bool) {
			path := p.emptyFile("bound")
			p.mount(p.NetNS, path, "", unix.MS_BIND, "")
			p.unpin()
			p.other(p.ContainerID)
			return path, true
		}},
		{"below another mount", func(p *pod) (string, bool) {
			path := p.emptyFile("below")
			p.mount(p.NetNS, path, "", unix.MS_BIND, "")
			p.unpin()
			p.mount("/dev/null", path, "", unix.MS_BIND, "")
			return path, false
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			list := n.unwind(fmt.Sprintf(`{"type": "macvlan", "master": %q, "ipam": %s}`, n.hostVeth("IPv4"), n.hostLocal(n.subnet)))
			p := n.pod("a")
			p.mustAdd(list)
			own, err := host.Identify(p.NetNS)
			if err != nil {
				t.Fatal(err)
			}
			path, open := c.leave(p)
			for range 2 {
				n.wantStatus("STATUS", n.status("1.0.0", nil, n.faulty("p0", "")), 0, "")
				n.sweep(undo.DefaultBudgets)
			}
			if e := p.entry(); e == nil || e.Pending() != 1 || len(n.reserved()) != 1 {
				t.Fatalf("the journal has %+v, reserved %v", e, n.reserved())
			}
			if !open {
				if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
					t.Fatal(err)
				}
			}
			if there, err := host.Identify(path); err != nil || !there.Same(own) || !slices.Contains(n.links(path), "eth0") {
				t.Fatalf("%s is %+v (%v)", path, there, err)
			}
			p.mustDel(list)
			if links := n.links(path); slices.Contains(links, "eth0") {
				t.Errorf("left in the namespace: %v", links)
			}
			n.othersSurvive()
			n.nothingLeft()
		})
	}
}

// TestMountGone: without the second mount the namespace is gone.
func TestMountGone(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := n.pod("a")
	p.mustAdd(n.unwind(n.faulty("p0", "")))
	path := p.emptyFile("bound")
	p.mount(p.NetNS, path, "", unix.MS_BIND, "")
	p.unpin()
	if n.sweep(undo.DefaultBudgets); p.entry() == nil {
		t.Fatal("it is released")
	}
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	n.sweep(undo.DefaultBudgets)
	n.nothingLeft()
}

// emptyFile makes a file to mount something at.
func (n *node) emptyFile(name string) string {
	n.Helper()
	path := filepath.Join(n.dir, name)
	n.write(path, "")
	return path
}

// TestKeptOpen: a process elsewhere holds a descriptor of a pod's namespace, as a DHCP daemon does,
// and so keeps the host's end of its interface. The pod counts as live, unless a list lacks it and
// the grace period is over. Then all is undone, in the namespace.
func TestKeptOpen(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name     string
		grace    string
		list     bool // the runtime's list, without the pod
		inside   bool // a process is in the namespace, too
		released bool
	}{
		{"no list", "1ms", false, false, false},
		{"not on the list, young", "1h", true, false, false},
		{"not on the list, a process inside", "1ms", true, true, false},
		{"not on the list", "1ms", true, false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.outer, n.conf["gracePeriod"] = "1.1.0", c.grace
			chain := []string{n.bridgePlugin(`, "ipMasq": true`)}
			list := n.unwind(chain...)
			p := n.pod("a")
			p.mustAdd(list)
			time.Sleep(10 * time.Millisecond)
			end := p.holder()
			if c.inside {
				p.processInside()
			}
			p.unpin()
			lists := valid()
			if !c.list {
				lists = nil
			}
			if out := n.ask("GC", "1.0.0", lists, chain...); out.code != 0 {
				t.Fatalf("GC: %s", out.stdout)
			}
			if e := p.entry(); (e == nil) != c.released {
				t.Fatalf("the journal has %+v", e)
			}
			if !c.released {
				if there, err := host.LinkThere(p.entry().Newest().HostLinks); !there || err != nil || len(n.reserved()) != 1 {
					t.Errorf("host link %t (%v), reserved %v", there, err, n.reserved())
				}
				p.mustDel(list)
			}
			n.nothingLeft() // though it is still held
			end()
		})
	}
}

// holder starts a process that has the pod's namespace open. It returns a function that ends it.
func (p *pod) holder() (end func()) {
	p.Helper()
	f, err := os.Open(p.NetNS)
	if err != nil {
		p.Fatal(err)
	}
	defer f.Close()
	cmd := exec.Command("sleep", "60")
	cmd.ExtraFiles = []*os.File{f}
	if err := cmd.Start(); err != nil {
		p.Fatal(err)
	}
	end = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	p.Cleanup(end)
	return end
}
