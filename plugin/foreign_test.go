package plugin

import (
	"testing"

	"cni-unwind/journal"
)

// TestForeignContainerIDAgain: this disk is a copy of a machine's, and a container ID of that
// machine is added here. No DEL of the original's runs; what host-local keeps for it on this disk
// goes.
func TestForeignContainerIDAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	list := n.unwind(n.bridgePlugin(""), n.faulty("p1", ""))
	p := n.pod("a")
	before := address(t, p.mustAdd(list))
	machine := otherMachine(t)
	p.edit(func(g *journal.Generation) { g.Host.BootID, g.Host.Machine = "another", machine })
	p.dropNetNS()
	n.forgetCalls()
	again := n.pod("a")
	if after := address(t, again.mustAdd(list)); len(n.reserved()) != 1 {
		t.Errorf("%s was given out, then %s: %v", before, after, n.reserved())
	}
	if calls := n.calls(); len(calls) != 1 || calls[0] != "ADD p1" {
		t.Errorf("calls: %v", calls)
	}
	if e := again.entry(); e == nil || e.State != journal.Live || len(e.Generations) != 1 {
		t.Errorf("the entry is %+v", e)
	}
	again.mustDel(list)
	n.nothingLeft()
}
