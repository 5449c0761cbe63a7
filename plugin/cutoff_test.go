package plugin

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
)

// TestCutOffTwice: an ADD is cut off before its first delegate's result is written, so that only
// host-local knows the address. Then the sweep that undoes it is killed at each point. bridge is
// killed with it after it released the address and the interface, but not yet its nat chain, which
// is keyed by the address. The next sweep still finds the chain.
func TestCutOffTwice(t *testing.T) {
	t.Parallel()
	everyPoint(t, 5, func(t *testing.T, at int) bool {
		n := newNode(t).patient()
		n.outer = "1.1.0"
		chain := []string{n.bridgePlugin(`, "ipMasq": true`), n.faulty("p1", "")}
		list := n.unwind(chain...)
		p := n.pod("a")
		p.mustAdd(list)
		p.cutOff()
		if err := os.Remove(filepath.Join(n.faultyDir(), "taken", "a.eth0.p1")); err != nil {
			t.Fatal(err)
		}
		err := n.killedAt(at, func() error { return n.cni.GetStatusNetworkList(context.Background(), list) })
		if !wasKilled(err) && err != nil {
			t.Errorf("STATUS: %v", err)
		}
		if e := p.entry(); e != nil && e.State == journal.Unwinding { // the DEL may have begun
			p.halfDeleted()
		}
		if out := n.ask("GC", "1.0.0", nil, chain...); out.code != 0 {
			t.Errorf("GC: %s", out.stdout)
		}
		n.nothingLeft()
		return wasKilled(err)
	})
}

// cutOff gives the journal and libcni's cache the state of an ADD that was cut off in its first
// delegate.
func (p *pod) cutOff() {
	p.Helper()
	if err := os.Remove(p.cacheFile()); err != nil && !os.IsNotExist(err) {
		p.Fatal(err)
	}
	err := p.store.Update(p.Context(), func(tx *journal.Tx) error {
		e, err := tx.Get(p.key())
		if err != nil {
			return err
		}
		if err := tx.Delete(e.Key); err != nil {
			return err
		}
		e.State = journal.Adding
		g := e.Newest()
		g.Result, g.Claims, g.HostLinks = nil, nil, nil
		return tx.Put(e)
	})
	if err != nil {
		p.Fatal(err)
	}
}

// halfDeleted does what bridge does before it is killed in the middle of its DEL.
func (p *pod) halfDeleted() {
	p.Helper()
	for address := range p.reserved() {
		if err := os.Remove(filepath.Join(p.dataDir(), p.network, address)); err != nil {
			p.Error(err)
		}
	}
	err := ns.WithNetNSPath(p.NetNS, func(ns.NetNS) error {
		link, err := netlink.LinkByName(p.IfName)
		if err != nil {
			return nil // bridge came this far by itself
		}
		return netlink.LinkDel(link)
	})
	if err != nil {
		p.Error(err)
	}
}

// TestNamespaceOutOfReach: the pod's namespace exists, but no path leads the DEL to it, and it has
// no process: it is pinned by a mount elsewhere, or the kernel is about to remove it. Without a
// namespace bridge would leave its nat chain.
func TestNamespaceOutOfReach(t *testing.T) {
	t.Parallel()
	n := newNode(t).hasty()
	list := n.unwind(n.bridgePlugin(`, "ipMasq": true`))
	p := n.pod("a")
	p.mustAdd(list)
	pin := filepath.Join(n.dir, "pin")
	if err := os.WriteFile(pin, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(p.NetNS, pin, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(pin, unix.MNT_DETACH) })
	if err := unix.Unmount(p.NetNS, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	p.mustDel(list)
	if rules := n.rules(strings.TrimSuffix(n.subnet, "0/24")); len(rules) > 0 || len(n.entries()) > 0 || len(n.reserved()) > 0 {
		t.Errorf("left: %q, %d entries, %v", rules, len(n.entries()), n.reserved())
	}
}

// TestNamespaceGoesMeanwhile: the runtime removes the pod's namespace after unwind looked at it and
// before bridge does. bridge then succeeds and leaves its nat chain.
func TestNamespaceGoesMeanwhile(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	list := n.unwind(n.bridgePlugin(`, "ipMasq": true`))
	p := n.pod("a")
	p.mustAdd(list)
	real := filepath.Join(toolsDir(t), "cni", "bridge")
	n.script("bridge", `umount -l `+p.NetNS+` 2>/dev/null && rm `+p.NetNS+`
		exec `+real)
	p.mustDel(list)
	if _, err := os.Lstat(p.NetNS); err == nil {
		t.Error("the namespace is still there")
	}
	n.nothingLeft()
}
