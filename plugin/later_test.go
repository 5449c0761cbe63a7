package plugin

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/undo"
)

// again is a node whose chain of reference plugins has something keyed by container ID (bridge's
// masquerading, portmap, host-local) and something keyed by address (firewall).
type again struct {
	*node
	chain        []string
	list, bypass *libcni.NetworkConfigList // through unwind, and past it
	port         int
}

func newAgain(t testing.TB) *again {
	n := newNode(t)
	chain := []string{
		n.bridgePlugin(`, "ipMasq": true`), `{"type": "firewall"}`,
		`{"type": "portmap", "capabilities": {"portMappings": true}}`,
	}
	return &again{n, chain, n.unwind(chain...), n.plain(chain...), 20000}
}

// mapped is a pod with a port mapping of its own.
func (a *again) mapped(name string) *pod {
	p := a.pod(name)
	a.port++
	p.CapabilityArgs = map[string]any{
		"portMappings": []map[string]any{{"hostPort": a.port, "containerPort": 80, "protocol": "tcp"}},
	}
	return p
}

// whole returns everything that is visible of an added pod: its traces, sorted.
func (p *pod) whole(m marks) string {
	traces := p.traces(m)
	slices.Sort(traces)
	return strings.Join(traces, "\n")
}

// moveTo gives a pod another namespace under the same container ID.
func (p *pod) moveTo(name string) {
	p.Helper()
	p.NetNS = p.netns(name)
}

// TestAddedAgainPastTheJournal: a container ID is deleted and added again while the journal cannot
// see it. Undoing the ADD on record must not touch what the later one has. The DEL of the later one
// leaves nothing of both.
func TestAddedAgainPastTheJournal(t *testing.T) {
	t.Parallel()
	cases := []struct {
		name string
		// recorded leaves an ADD of the pod in the journal.
		recorded func(a *again, p *pod)
	}{
		{"live, its namespace gone", func(a *again, p *pod) {
			p.mustAdd(a.list)
			entries := a.entries()
			p.mustDel(a.bypass)
			p.dropNetNS()
			a.mustHave(entries)
			p.moveTo("later")
		}},
		{"live, of an earlier boot", func(a *again, p *pod) {
			p.mustAdd(a.list)
			p.mustDel(a.bypass)
			before(p)
			p.moveTo("later")
		}},
		{"a DEL pending, in the same namespace", func(a *again, p *pod) {
			p.mustAdd(a.list)
			p.mustDel(a.bypass)
			p.setState(journal.Removing)
		}},
		{"cut off, in the same namespace", func(a *again, p *pod) {
			p.mustAdd(a.list)
			p.mustDel(a.bypass)
			p.cutOff()
		}},
		{"cut off, in another namespace", func(a *again, p *pod) {
			p.mustAdd(a.list)
			p.mustDel(a.bypass)
			p.cutOff()
			p.dropNetNS()
			p.moveTo("later")
		}},
	}
	for _, address := range []string{"another address", "the same address"} {
		for _, c := range cases {
			t.Run(c.name+", "+address, func(t *testing.T) {
				t.Parallel()
				a := newAgain(t)
				p := a.mapped("a")
				c.recorded(a, p)
				if address == "the same address" {
					p.lowestNext()
				}
				marks := p.marks(p.mustAdd(a.bypass))
				want := p.whole(marks)
				for name, sweep := range sweeps {
					sweep(a.node, a.chain)
					if got := p.whole(marks); got != want {
						t.Fatalf("after %s:\n%s\nwant\n%s", name, got, want)
					}
				}
				if p.entry() == nil {
					t.Error("the ADD on record is forgotten")
				}
				p.mustDel(a.list)
				if left := p.whole(marks); left != "" {
					t.Errorf("after the DEL:\n%s", left)
				}
				a.nothingLeft()
			})
		}
	}
}

// TestDeletedPastTheJournal is the opposite: the later ADD has ended too, past the journal. Then
// nothing keeps the one on record.
func TestDeletedPastTheJournal(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"deleted", "forgotten"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			a := newAgain(t)
			p := a.mapped("a")
			p.mustAdd(a.list)
			p.mustDel(a.bypass)
			p.dropNetNS()
			p.moveTo("later")
			p.mustAdd(a.bypass)
			a.sweep(undo.DefaultBudgets)
			if p.entry() == nil {
				t.Fatal("released beside the later ADD")
			}
			if how == "deleted" {
				p.mustDel(a.bypass)
			}
			p.dropNetNS()
			a.sweep(undo.DefaultBudgets)
			if e := p.entry(); e != nil {
				t.Errorf("kept: %s, %v", e.State, e.Reason)
			}
			a.nothingLeft()
		})
	}
}

// mustHave checks that the journal has these entries unchanged.
func (n *node) mustHave(entries []*journal.Entry) {
	n.Helper()
	if got := n.entries(); len(got) != len(entries) {
		n.Fatalf("the journal has %d entries, not %d", len(got), len(entries))
	}
}

// setState sets the state of the pod's entry.
func (p *pod) setState(state journal.State) {
	p.Helper()
	err := p.store.Update(p.Context(), func(tx *journal.Tx) error {
		e, err := tx.Get(p.key())
		if err != nil {
			return err
		}
		e.State = state
		return tx.Put(e)
	})
	if err != nil {
		p.Fatal(err)
	}
}

// TestStaticAddressAgain: two containers have the same static address. The first is dead, and the
// second was added past the journal. The first one's firewall rules belong to the second by now.
func TestStaticAddressAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	ip := n.prefix(4, 7)
	chain := []string{
		fmt.Sprintf(`{"type": "bridge", "bridge": %q, "isGateway": true,
			"ipam": {"type": "static", "addresses": [{"address": "%s"}]}}`, n.bridge, ip),
		`{"type": "firewall"}`,
	}
	list, bypass := n.unwind(chain...), n.plain(chain...)
	old := n.pod("old")
	old.mustAdd(list)
	old.dropNetNS()
	next := n.pod("next")
	marks := next.marks(next.mustAdd(bypass))
	want := next.whole(marks)
	for name, sweep := range sweeps {
		sweep(n, chain)
		if got := next.whole(marks); got != want {
			t.Fatalf("after %s:\n%s\nwant\n%s", name, got, want)
		}
	}
	next.mustDel(bypass)
	next.dropNetNS()
	n.sweep(undo.DefaultBudgets)
	n.nothingLeft()
}

// TestLateDELAtAnothersPath: a container's DEL comes late, and by now another container's namespace
// is at its path. No delegate is shown that namespace.
func TestLateDELAtAnothersPath(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		// ended adds the pod and ends it, and leaves something that answers its late DEL, or
		// nothing.
		ended func(a *again, p *pod)
	}{
		{"a tombstone, after a sweep", func(a *again, p *pod) {
			p.mustAdd(a.list)
			p.dropNetNS()
			a.sweep(undo.DefaultBudgets)
			if a.tombstone(p.key()) == nil {
				p.Fatal("no tombstone")
			}
		}},
		{"a second DEL", func(a *again, p *pod) {
			p.mustAdd(a.list)
			cache := read(p, p.cacheFile())
			p.mustDel(a.list)
			p.write(p.cacheFile(), cache) // like a runtime that gives the result each time
			p.dropNetNS()
		}},
		{"its ADD failed", func(a *again, p *pod) {
			list := a.unwind(append(slices.Clone(a.chain), a.faulty("p3", ""))...)
			a.plan(map[string]map[string]string{"p3": {"ADD": "fail"}})
			if _, err := p.add(list); err == nil {
				p.Fatal("the ADD succeeded")
			}
			p.dropNetNS()
		}},
		{"never added through unwind", func(a *again, p *pod) {
			p.mustAdd(a.bypass)
			cache := read(p, p.cacheFile())
			p.mustDel(a.bypass)
			p.write(p.cacheFile(), cache)
			p.dropNetNS()
		}},
	} {
		for _, list := range []string{"through unwind", "past unwind"} {
			t.Run(c.name+", the other added "+list, func(t *testing.T) {
				t.Parallel()
				a := newAgain(t)
				p, other := a.mapped("a"), a.mapped("b")
				c.ended(a, p)
				if err := os.Rename(other.NetNS, p.NetNS); err != nil {
					a.bindOver(other.NetNS, p.NetNS)
				}
				other.NetNS = p.NetNS
				var marks marks
				if list == "past unwind" {
					marks = other.marks(other.mustAdd(a.bypass))
				} else {
					marks = other.marks(other.mustAdd(a.list))
				}
				want := other.whole(marks)
				if err := p.del(a.list); err != nil {
					t.Errorf("the late DEL: %v", err)
				}
				if got := other.whole(marks); got != want {
					t.Errorf("after the late DEL:\n%s\nwant\n%s", got, want)
				}
				if list == "past unwind" {
					other.mustDel(a.bypass)
				} else {
					other.mustDel(a.list)
				}
				a.nothingLeft()
			})
		}
	}
}

// bindOver mounts a namespace at another one's former path.
func (n *node) bindOver(from, to string) {
	n.Helper()
	n.write(to, "")
	if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil {
		n.Fatal(err)
	}
	n.Cleanup(func() { _ = unix.Unmount(to, unix.MNT_DETACH) })
}

func read(t testing.TB, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// TestTombstoneAnswersItsOwn: a container ID is swept, then added again past the journal. The DEL
// of that ADD undoes it.
func TestTombstoneAnswersItsOwn(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		later func(p *pod)
	}{
		{"in another namespace", func(p *pod) { p.moveTo("later") }},
		{"at the same path", func(p *pod) { p.NetNS = p.netns(p.ContainerID) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			a := newAgain(t)
			p := a.mapped("a")
			p.mustAdd(a.list)
			p.dropNetNS()
			a.sweep(undo.DefaultBudgets)
			c.later(p)
			marks := p.marks(p.mustAdd(a.bypass))
			p.mustDel(a.list)
			if left := p.whole(marks); left != "" {
				t.Errorf("after the DEL:\n%s", left)
			}
			a.nothingLeft()
		})
	}
}

// TestADDAfterAnUnseenDEL: an attachment is added through unwind, deleted past it, and added again
// in the same namespace.
func TestADDAfterAnUnseenDEL(t *testing.T) {
	t.Parallel()
	a := newAgain(t)
	p := a.mapped("a")
	p.mustAdd(a.list)
	p.mustDel(a.bypass)
	marks := p.marks(p.mustAdd(a.list))
	p.mustDel(a.list)
	if left := p.whole(marks); left != "" {
		t.Errorf("after the DEL:\n%s", left)
	}
	a.nothingLeft()
}

// TestADDOverAnUnseenADD: unwind refuses to add an attachment that already lives, and takes nothing
// from it.
func TestADDOverAnUnseenADD(t *testing.T) {
	t.Parallel()
	for _, recorded := range []bool{false, true} {
		a := newAgain(t)
		p := a.mapped("a")
		if recorded {
			p.mustAdd(a.list)
			p.mustDel(a.bypass)
		}
		marks := p.marks(p.mustAdd(a.bypass))
		want := p.whole(marks)
		if _, err := p.add(a.list); err == nil || !strings.Contains(err.Error(), "is added already") {
			t.Errorf("the second ADD: %v", err)
		}
		if got := p.whole(marks); got != want {
			t.Errorf("after the second ADD:\n%s\nwant\n%s", got, want)
		}
		p.mustDel(a.list)
		a.nothingLeft()
	}
}

// TestRollbackBesideAnother: an ADD fails in a namespace in which another container has the
// interface, whether libcni's cache knows that container or not.
func TestRollbackBesideAnother(t *testing.T) {
	t.Parallel()
	for _, cached := range []bool{true, false} {
		a := newAgain(t)
		p, other := a.mapped("a"), a.mapped("b")
		marks := other.marks(other.mustAdd(a.bypass))
		want, cache := other.whole(marks), read(t, other.cacheFile())
		if !cached {
			if err := os.Remove(other.cacheFile()); err != nil {
				t.Fatal(err)
			}
		}
		p.NetNS = other.NetNS
		if _, err := p.add(a.list); err == nil {
			t.Fatal("the ADD succeeded")
		}
		if got := other.whole(marks); got != want {
			t.Errorf("cached %t: after the rollback:\n%s\nwant\n%s", cached, got, want)
		}
		other.write(other.cacheFile(), cache)
		other.mustDel(a.bypass)
		a.nothingLeft()
	}
}

// TestLaterADDOfAnotherChain: a later ADD, past the journal, has a chain with more plugins than the
// one on record. Both end without a DEL. Nothing is left of either.
func TestLaterADDOfAnotherChain(t *testing.T) {
	t.Parallel()
	a := newAgain(t)
	p := a.mapped("a")
	p.mustAdd(a.unwind(a.chain[0]))
	p.mustDel(a.plain(a.chain[0]))
	p.dropNetNS()
	p.moveTo("later")
	p.mustAdd(a.bypass)
	p.dropNetNS()
	a.sweep(undo.DefaultBudgets)
	a.nothingLeft()
}

// TestLaterADDIsUndoneOnce: there is a later ADD, past the journal, and a delegate of the one on
// record whose DEL fails. Neither the runtime's next DEL, which still has the later ADD's result,
// nor a sweep undoes the later ADD again.
func TestLaterADDIsUndoneOnce(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	bridge, earlier, later := n.bridgePlugin(""), n.faulty("earlier", ""), n.faulty("later", "")
	p := n.pod("a")
	p.mustAdd(n.unwind(bridge, earlier))
	p.mustDel(n.plain(bridge))
	p.mustAdd(n.plain(bridge, later))
	n.plan(map[string]map[string]string{"earlier": {"DEL": "fail"}})
	for range 2 {
		if err := p.del(n.unwind(bridge, later)); err == nil {
			t.Fatal("DEL: no error, though a delegate's DEL fails")
		}
	}
	p.dropNetNS()
	n.sweep(undo.DefaultBudgets)
	times := 0
	for _, call := range n.calls() {
		if call == "DEL later" {
			times++
		}
	}
	if times != 1 {
		t.Errorf("the later ADD was undone %d times: %v", times, n.calls())
	}
	n.plan(nil)
	p.mustDel(n.unwind(bridge, later))
	n.nothingLeft()
}

// TestADDInTheHostsNetNS: the runtime adds an interface to its own namespace on purpose. The DEL
// removes the interface there.
func TestADDInTheHostsNetNS(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.env = append(n.env, "CNI_NETNS_OVERRIDE=TRUE")
	list := n.unwind(n.bridgePlugin(""))
	p := n.pod("a")
	p.NetNS, p.IfName = "/proc/self/ns/net", "h"+n.bridge
	p.mustAdd(list)
	if _, err := netlink.LinkByName(p.IfName); err != nil {
		t.Fatal(err)
	}
	p.mustDel(list)
	if _, err := netlink.LinkByName(p.IfName); err == nil {
		t.Error("the interface is still there")
	}
	n.nothingLeft()
}

// TestUndoneADDComesAgain: unwind has undone an ADD, while an earlier one has a pending DEL. The ADD
// comes again past the journal, with the same MAC and IP address. A sweep takes nothing from it.
func TestUndoneADDComesAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	bridge := n.bridgePlugin(`, "capabilities": {"mac": true}`)
	earlier, later := n.faulty("earlier", ""), n.faulty("later", "")
	n.conf["capabilities"] = map[string]bool{"mac": true}
	p := n.pod("a")
	p.mustAdd(n.unwind(bridge, earlier))
	p.mustDel(n.plain(bridge))
	p.CapabilityArgs = map[string]any{"mac": "02:00:00:00:00:07"}
	again := n.plain(bridge, later)
	p.lowestNext()
	p.mustAdd(again)
	n.plan(map[string]map[string]string{"earlier": {"DEL": "fail"}})
	if err := p.del(n.unwind(bridge, later)); err == nil {
		t.Fatal("DEL: no error, though a delegate's DEL fails")
	}
	p.lowestNext()
	p.mustAdd(again)
	n.plan(nil)
	n.forgetCalls()
	n.sweep(undo.DefaultBudgets)
	if calls := n.calls(); len(calls) > 0 {
		t.Errorf("the sweep ran %v beside an ADD that lives", calls)
	}
	p.mustDel(n.unwind(bridge, later))
	n.nothingLeft()
}

// TestUndoneADDInTheCache: a sweep undid c's newer ADD, whose result libcni's cache still has, and c
// has an older pending DEL. Its next pass takes the cached ADD for one that the journal did not see.
// It must not be shown the cached address, which b has by now.
func TestUndoneADDInTheCache(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.conf["gracePeriod"] = "1ns"
	list := n.unwind(n.pooled("p0", 2, 3), n.faulty("p1", `, "rules": true`), n.faulty("p2", ""))
	c := n.pod("c")
	older := address(t, c.mustAdd(list))
	n.plan(map[string]map[string]string{"p1": {"DEL": "fail"}})
	if err := c.del(list); err == nil {
		t.Fatal("c's DEL passed")
	}
	a, b := n.pod("a"), n.pod("b")
	first := address(t, a.mustAdd(list))
	if first != older { // host-local goes round
		_ = a.del(list)
		first = address(t, a.mustAdd(list))
	}
	n.plan(nil)
	if first != older {
		t.Fatalf("a has %s, and c had %s", first, older)
	}
	c = c.again()
	newer := address(t, c.mustAdd(list))
	c.dropNetNS()
	n.sweep(undo.DefaultBudgets)
	if e := c.entry(); e == nil || len(e.Generations) != 1 {
		t.Fatalf("after the sweep c is %+v", e)
	}
	if got := address(t, b.mustAdd(list)); got != newer {
		t.Fatalf("b has %s, and c had %s", got, newer)
	}
	if _, err := os.Stat(c.cacheFile()); err != nil {
		t.Fatal(err)
	}
	a.mustDel(list)
	if rules := n.addressRules(); !slices.Contains(rules, newer+".p1") {
		t.Errorf("b has lost its rule: %v", rules)
	}
	b.mustDel(list)
	n.sweep(undo.DefaultBudgets)
	c.mustDel(list)
	n.nothingLeft()
}
