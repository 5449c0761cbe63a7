package plugin

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/plugins/pkg/ns"

	"cni-unwind/journal"
	"cni-unwind/plugin/undo"
)

// TestStaleOwner (Azure CNS #4210): a pod gets the address of a dead one, in a network that has
// another name now. unwind purges the dead one with its address before anything of the new one
// exists but the interface, and adopts nothing of it.
func TestStaleOwner(t *testing.T) {
	t.Parallel()
	for _, stale := range []string{"earlier boot", "namespace gone", "ADD cut off"} {
		t.Run(stale, func(t *testing.T) {
			t.Parallel()
			f := newFirewalled(t)
			a := f.pod("a")
			switch stale {
			case "ADD cut off":
				f.plan(map[string]map[string]string{"p2": {"ADD": "kill-parent-effect"}})
				if _, err := a.add(f.list); !wasKilled(err) {
					t.Fatalf("ADD: %v", err)
				}
				a.dropNetNS()
				f.plan(nil)
			case "earlier boot":
				a.mustAdd(f.list)
				before(a)
			default:
				a.mustAdd(f.list)
				a.dropNetNS()
			}
			f.forgetCalls()
			f.asked()
			renamed := *f.node
			renamed.network += "-renamed"
			list := renamed.unwind(renamed.bridgePlugin(""), `{"type": "firewall"}`, renamed.faulty("p2", ""))
			b := renamed.pod("b")
			ip := address(t, b.mustAdd(list))
			if first := f.prefix(4, 2).Addr().String(); ip != first {
				t.Fatalf("b has %s, a had %s", ip, first)
			}
			f.wantAsked("the address is given again", "DEL a "+ip, "ADD b "+ip)
			f.wantCalls("the address is given again", "DEL p2", "ADD p2")
			if e := a.entry(); e != nil || len(f.reserved()) > 0 || f.tombstone(a.key()) == nil {
				t.Errorf("left of a: %+v, %v", e, f.reserved())
			}
			a.mustDel(f.list)
			f.wantAsked("the late DEL")
			f.wantOpen("after the late DEL", ip)
			b.mustDel(list)
			f.nothingLeft()
			renamed.nothingLeft()
		})
	}
}

// TestStaleOwnerCutOff kills unwind at each point of the purge of a stale owner. The next owner has
// the address alone, and nothing of the stale owner is left.
func TestStaleOwnerCutOff(t *testing.T) {
	t.Parallel()
	everyPoint(t, 14, func(t *testing.T, at int) bool {
		n := newNode(t).patient()
		chain := []string{n.faulty("p0", `, "address": "192.0.2.7/24"`), n.faulty("p1", "")}
		a, old := n.pod("a"), n.unwind(chain...)
		a.mustAdd(old)
		before(a)
		renamed := *n
		renamed.network += "-renamed"
		list := renamed.unwind(chain...)
		b := renamed.pod("b")
		err := n.killedAt(at, func() error {
			_, err := b.add(list)
			return err
		})
		if wasKilled(err) {
			b.dropNetNS()
			next := b.nextSandbox("next")
			next.mustAdd(list)
			n.sweep(undo.DefaultBudgets)
			if taken := n.taken(); !slices.Equal(taken, []string{"next.eth0.p0", "next.eth0.p1"}) && b.entry() == nil {
				t.Errorf("taken: %q", taken)
			}
			if a.entry() != nil {
				t.Error("the stale owner is in the journal")
			}
			next.mustDel(list)
		}
		b.mustDel(list)
		a.mustDel(old) // as in TestForeignCutOff
		n.nothingLeft()
		return wasKilled(err)
	})
}

// TestNewSandbox (Azure CNS #4350): a pool has one address, and a pod gets a new sandbox. It gets
// the address if the old sandbox is certainly gone. Otherwise the old one keeps all it has.
func TestNewSandbox(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		old  string
		make func(p *pod) (end func())
		dead bool
	}{
		{"namespace gone", func(p *pod) func() { p.dropNetNS(); return nil }, true},
		{"earlier boot", func(p *pod) func() { before(p); return nil }, true},
		{"there", func(p *pod) func() { return nil }, false},
		{"a process inside, no path", func(p *pod) func() {
			p.processInside()
			p.unpin()
			return nil
		}, false},
		{"held open, no path, no process", func(p *pod) func() {
			held, err := ns.GetNS(p.NetNS)
			if err != nil {
				p.Fatal(err)
			}
			p.unpin()
			return func() { _ = held.Close() }
		}, false},
	} {
		t.Run(c.old, func(t *testing.T) {
			t.Parallel()
			n := newNode(t).patient()
			only := n.prefix(4, 7).Addr()
			list := n.unwind(fmt.Sprintf(`{"type": "bridge", "bridge": %q, "isGateway": true, "ipam": {"type": "host-local",
				"dataDir": %q, "ranges": [[{"subnet": %q, "rangeStart": %q, "rangeEnd": %q}]]}}`,
				n.bridge, n.dataDir(), n.subnet, only, only), n.faulty("p1", ""))
			p := n.pod("a")
			p.mustAdd(list)
			end := c.make(p)
			n.forgetCalls()
			next := p.nextSandbox("next")
			_, err := next.add(list)
			if c.dead {
				if err != nil {
					t.Errorf("ADD: %v", err)
				}
				n.wantCalls("the new sandbox", "DEL p1", "ADD p1")
			} else {
				if err == nil || !strings.Contains(err.Error(), "no IP addresses available") {
					t.Errorf("ADD: %v", err)
				}
				n.wantCalls("the new sandbox")
				if e := p.entry(); e == nil || e.State != journal.Live || e.Pending() != 2 {
					t.Errorf("the old one: %+v", e)
				}
			}
			if end != nil {
				end()
			}
			next.mustDel(list)
			p.mustDel(list)
			n.nothingLeft()
		})
	}
}
