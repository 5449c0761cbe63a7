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

// TestCutOffTwice: an ADD is cut off before its first delegate's result is written, so that only host-local knows the address;
// then the sweep that undoes it is killed, at each point, and bridge with it where it has come to the address and the interface,
// and not yet to its nat chain, which is keyed by the address. The next sweep still finds it.
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

// cutOff makes the journal what it is when the pod's ADD is cut off in its first delegate.
func (p *pod) cutOff() {
	p.Helper()
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
		g.Result, g.Claims, g.HostLinks, g.Steps = nil, nil, nil, g.Steps[:1]
		return tx.Put(e)
	})
	if err != nil {
		p.Fatal(err)
	}
}

// halfDeleted does what a bridge has done that is killed in the middle of its DEL.
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
			return nil // it came so far by itself
		}
		return netlink.LinkDel(link)
	})
	if err != nil {
		p.Error(err)
	}
}

// TestNamespaceOutOfReach: the pod's namespace is there, but at no path that the DEL could name, and no process is in it: pinned
// by a mount elsewhere, or about to be taken apart by the kernel. bridge would leave its nat chain without one.
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

// TestNamespaceGoesMeanwhile: the runtime removes the pod's namespace between our look at it and bridge's, which then succeeds and
// leaves its nat chain.
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
