package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"cni-unwind/journal"
)

// A duplicate is an address of a living pod that host-local gives out once more, since it lost the
// file (Azure CNS #4210: the same address under another owner is an error, never adopted).

// warned is the log message for an address that two attachments have.
const warned = "another attachment has the same address"

// forget removes host-local's reservation of an address, so that the next pod gets it.
func (n *node) forget(address string) {
	n.Helper()
	if err := os.Remove(filepath.Join(n.dataDir(), n.network, address)); err != nil {
		n.Fatal(err)
	}
	n.lowestNext()
}

func (n *node) firewallChain() []string {
	return []string{n.bridgePlugin(""), `{"type": "firewall"}`}
}

// TestDuplicateAddress: an ADD that gets the address of a living pod fails. That pod keeps all it
// has, and the other one leaves nothing. When the address is free, the other pod can have it.
func TestDuplicateAddress(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	list := n.unwind(n.firewallChain()...)
	a, b := n.pod("a"), n.pod("b")
	r := a.mustAdd(list)
	ip := address(t, r)
	n.forget(ip)

	_, err := b.add(list)
	want := fmt.Sprintf(`plugin type="bridge" failed (add): it gave out %s, which is in use by %s/a/eth0`, ip, n.network)
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Fatalf("ADD: %v, want %s", err, want)
	}
	if traces, e := b.inside(), b.entry(); len(traces) > 0 || e != nil || len(n.reserved()) > 0 {
		t.Errorf("left of b: %v, %v, %v", traces, e, n.reserved())
	}
	b.mustDel(list)
	n.wantOpen("after the ADD that failed", ip)
	if e := a.entry(); e == nil || e.State != journal.Live {
		t.Errorf("a's entry: %v", e)
	}
	a.pingsGateways(r)

	a.mustDel(list)
	b.pingsGateways(b.addAgain(list, ip))
	b.mustDel(list)
	n.nothingLeft()
}

// TestNoDuplicate: two pods have one address where that is no error. unwind warns if something
// could be wrong.
func TestNoDuplicate(t *testing.T) {
	t.Parallel()
	static := func(address string) func(*node) []string {
		return func(n *node) []string { return []string{n.faulty("p0", fmt.Sprintf(`, "address": %q`, address))} }
	}
	loopback := func(*node) []string { return []string{`{"type": "loopback"}`} }
	for _, c := range []struct {
		name     string
		chain    func(n *node) []string
		between  func(n *node, a *pod) *node // runs between the ADDs; the node of the second pod
		warnings int
	}{
		{"allowed", (*node).firewallChain, func(n *node, a *pod) *node {
			n.conf["onDuplicateAddress"] = "warn"
			n.forget(n.prefix(4, 2).Addr().String())
			return n
		}, 1},
		{"not on the other's interface any more", (*node).firewallChain, func(n *node, a *pod) *node {
			run(n, "nsenter", "--net="+a.NetNS, "ip", "address", "flush", "dev", "eth0")
			n.forget(n.prefix(4, 2).Addr().String())
			return n
		}, 1},
		{"another network over the same subnet", (*node).firewallChain, func(n *node, a *pod) *node {
			other := *n
			other.network, other.bridge = n.network+"-other", "o"+n.bridge
			return &other
		}, 1},
		{"static", static("192.0.2.7/24"), nil, 1},
		{"loopback", loopback, nil, 0},
		{"127.0.0.1", static("127.0.0.1/8"), nil, 0},
		{"link-local", static("fe80::7/64"), nil, 0},
		{"link-local IPv4", static("169.254.1.1/16"), nil, 0},
		{"multicast", static("224.0.0.7/32"), nil, 0},
		{"unspecified", static("0.0.0.0/0"), nil, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			a := n.pod("a")
			list := n.unwind(c.chain(n)...)
			first := a.mustAdd(list)
			second := n
			if c.between != nil {
				second = c.between(n, a)
			}
			b := second.pod("b")
			list2 := second.unwind(c.chain(second)...)
			if got := address(t, b.mustAdd(list2)); got != address(t, first) {
				t.Fatalf("b got %s", got)
			}
			if got := strings.Count(n.log(), warned); got != c.warnings {
				t.Errorf("%d warnings, want %d", got, c.warnings)
			}
			for _, d := range []struct {
				p    *pod
				list *libcni.NetworkConfigList
			}{{a, list}, {b, list2}} {
				d.p.mustDel(d.list)
			}
			n.nothingLeft()
			second.nothingLeft()
		})
	}
}
