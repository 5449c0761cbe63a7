package plugin

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"

	"cni-unwind/journal"
)

// TestCutOffTwice: an ADD is cut off before its first delegate's result is written, so that only
// host-local knows the address. Then the sweep that undoes it is killed at each point. bridge is
// killed with it after it released the address and the interface, but not yet its nat chain, which
// is keyed by the address. The next sweep still finds the chain.
func TestCutOffTwice(t *testing.T) {
	t.Parallel()
	atEveryPoint(t, 5, `
	patient; versions 1.1.0 1.0.0; chain bridge, "ipMasq": true | p1
	add a; cutoff a; lose $dir/faulty/taken/a.eth0.p1
	kill any $at libcni-status; bridge-too a
	gc`, acts{"bridge-too": func(s *story, w []string) {
		if e := s.who(w[0]).entry(); e != nil && e.State == journal.Unwinding { // the DEL may have begun
			s.who(w[0]).halfDeleted()
		}
	}})
}

// TestNamespaceOutOfReach: the pod's namespace exists, but no path leads the DEL to it, and it has
// no process: it is pinned by a mount elsewhere, or the kernel is about to remove it. Without a
// namespace bridge would leave its nat chain.
func TestNamespaceOutOfReach(t *testing.T) {
	stories(t, `
	hasty; chain bridge, "ipMasq": true
	add a; bind pin; unpin a
	del a; iptables 0; entries 0; reserved 0; leaves`, mounts())
}

// TestNamespaceGoesMeanwhile: the runtime removes the pod's namespace after unwind looked at it and
// before bridge does. bridge then succeeds and leaves its nat chain.
func TestNamespaceGoesMeanwhile(t *testing.T) {
	stories(t, `
	chain bridge, "ipMasq": true
	add a; script bridge 'umount -l $netns/a 2>/dev/null && rm $netns/a; exec $cni/bridge'
	del a; absent $netns/a`)
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
