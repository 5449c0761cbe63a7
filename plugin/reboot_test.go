package plugin

import (
	"fmt"
	"testing"

	"cni-unwind/journal"
	"cni-unwind/plugin/undo"
)

// earlier is the ID of the boot before this one.
const earlier = "11111111-2222-3333-4444-555555555555"

// before moves pods to an earlier boot and removes their namespaces.
func before(pods ...*pod) {
	for _, p := range pods {
		p.dropNetNS()
		p.edit(func(g *journal.Generation) { g.Host.BootID = earlier })
	}
}

// sweeps are the verbs that sweep all networks.
var sweeps = map[string]func(n *node, chain []string){
	"STATUS": func(n *node, chain []string) { n.ask("STATUS", "1.0.0", nil, chain...) },
	"GC":     func(n *node, chain []string) { n.ask("GC", "1.0.0", nil, chain...) },
	"sweep":  func(n *node, _ []string) { n.sweep(undo.DefaultBudgets) },
}

// until sweeps until the journal is empty: a STATUS may have too little time for all.
func (n *node) until(verb string, chain []string) {
	n.Helper()
	for range 30 {
		if sweeps[verb](n, chain); len(n.entries()) == 0 {
			return
		}
	}
	n.Errorf("%s does not free all", verb)
}

// TestReboot: pods of an earlier boot have all that is on the disk, and their rules. Any sweep
// releases it. The runtime's DEL, which comes later with libcni's cached result, runs nothing.
func TestReboot(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		verb    string
		renamed bool
	}{{"STATUS", false}, {"GC", false}, {"sweep", false}, {"GC", true}} {
		t.Run(fmt.Sprintf("%s, network renamed %t", c.verb, c.renamed), func(t *testing.T) {
			t.Parallel()
			n := newNode(t).patient()
			chain := append(realChain(n), n.faulty("last", ""))
			list := n.unwind(chain...)
			pods := []*pod{n.pod("a"), n.pod("b")}
			for _, p := range pods {
				p.CapabilityArgs = portMappings
				p.mustAdd(list)
			}
			before(pods...)
			n.forgetCalls()
			now := *n
			if c.renamed {
				now.network += "-renamed"
			}
			now.until(c.verb, chain)
			n.nothingLeft()
			n.noRules()
			n.wantCalls("the day after", "DEL last", "DEL last")
			for _, p := range pods {
				if tomb := n.tombstone(p.key()); tomb == nil || tomb.Reason != "it was made before this boot" {
					t.Errorf("%s has a tombstone: %t", p.key(), tomb != nil)
				}
				p.mustDel(list)
			}
			n.wantCalls("the runtime's DELs")
			n.nothingLeft()
		})
	}
}

// TestRebootRace: after a reboot a sweep frees a's address and b gets it. Then the runtime's DEL of
// a comes, with libcni's cached result, and runs nothing, since a has a tombstone. Without the
// tombstone the delegates run, and the guards alone keep b's rules.
func TestRebootRace(t *testing.T) {
	t.Parallel()
	for _, buried := range []bool{true, false} {
		t.Run(fmt.Sprintf("tombstone %t", buried), func(t *testing.T) {
			t.Parallel()
			f := newFirewalled(t)
			f.few("portmap")
			chain := []string{
				f.bridgePlugin(""), `{"type": "firewall"}`, `{"type": "portmap", "capabilities": {"portMappings": true}}`,
				f.faulty("last", ""),
			}
			f.list = f.unwind(chain...)
			a, b := f.pod("a"), f.pod("b")
			a.CapabilityArgs, b.CapabilityArgs = portMappings, portMappings
			first := address(t, a.mustAdd(f.list))
			before(a)
			f.until("GC", chain)
			if f.open(first) {
				t.Errorf("%s is open when a is freed", first)
			}
			b.addAgain(f.list, first)
			if !buried {
				a.exhume()
			}
			f.asked()
			f.forgetCalls()

			a.mustDel(f.list)
			if buried {
				f.wantAsked("the late DEL")
				f.wantCalls("the late DEL")
			} else {
				f.wantAsked("the late DEL", "DEL a")
				f.wantCalls("the late DEL", "DEL last")
			}
			f.wantOpen("after the late DEL", first)
			if rules := f.rules("--to-destination " + first + ":80"); len(rules) != 1 {
				t.Errorf("rules of b's port: %q", rules)
			}
			b.mustDel(f.list)
			f.nothingLeft()
			f.noRules()
		})
	}
}

// exhume deletes the pod's tombstone.
func (p *pod) exhume() {
	p.Helper()
	err := p.store.Update(p.Context(), func(tx *journal.Tx) error {
		e := &journal.Entry{Key: p.key(), State: journal.Adding, Generations: []journal.Generation{{}}}
		if err := tx.Put(e); err != nil {
			return err
		}
		return tx.Delete(e.Key)
	})
	if err != nil || p.tombstone(p.key()) != nil {
		p.Fatalf("the tombstone: %v", err)
	}
}
