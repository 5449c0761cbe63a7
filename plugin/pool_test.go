package plugin

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/tristate"
	"cni-unwind/plugin/undo"
)

// TestDecideOrphan: a reservation whose owner the journal does not know is dead only by all of the
// evidence.
func TestDecideOrphan(t *testing.T) {
	t.Parallel()
	dead := alive.Orphan{SameNamespaces: tristate.Yes, Listed: tristate.No, PastGracePeriod: tristate.Yes, Cached: tristate.No, InUse: tristate.No}
	if v := alive.DecideOrphan(dead); v.Fate != alive.Dead {
		t.Errorf("%+v", v)
	}
	n := 0
	answers := []tristate.Value{tristate.Unknown, tristate.No, tristate.Yes}
	for _, observer := range answers {
		for _, listed := range answers {
			for _, aged := range answers {
				for _, cached := range answers {
					for _, inUse := range answers {
						n++
						o := alive.Orphan{SameNamespaces: observer, Listed: listed, PastGracePeriod: aged, Cached: cached, InUse: inUse}
						v := alive.DecideOrphan(o)
						if (v.Fate == alive.Dead) != (o == dead) || v.Reason.Text == "" {
							t.Errorf("%+v: %+v", o, v)
						}
						if uncovered := observer == tristate.Yes && listed == tristate.Unknown; uncovered &&
							(v.Fate == alive.Live) != (inUse == tristate.Yes) {
							t.Errorf("no list covers it: %+v: %+v", o, v)
						}
					}
				}
			}
		}
	}
	if n != 243 {
		t.Errorf("%d combinations", n)
	}
}

// orphanage is a node whose only network has pods that were added before unwind was installed, or
// are unknown to its journal. Its libcni has its cache where every runtime has it.
type orphanage struct {
	*node
	varLib string
	chain  string
}

func newOrphanage(t *testing.T) *orphanage {
	n := newNode(t)
	o := &orphanage{node: n, varLib: filepath.Join(n.dir, "varlib"), chain: n.bridgePlugin("")}
	n.cni = libcni.NewCNIConfigWithCacheDir(n.path, filepath.Join(o.varLib, "cni"), &nodeExec{node: n})
	n.mkdir(filepath.Join(o.varLib, "cni"))
	return o
}

// gc runs a GC with a list of container IDs.
func (o *orphanage) gc(grace string, listed ...string) outcome {
	o.Helper()
	valid := []netconf.Attachment{}
	for _, id := range listed {
		valid = append(valid, netconf.Attachment{ContainerID: id, IfName: "eth0"})
	}
	return o.sweep("GC", map[string]any{"gracePeriod": grace, netconf.ValidKeys[0]: valid})
}

func (o *orphanage) sweep(command string, changes map[string]any) outcome {
	o.Helper()
	changes["cniVersion"] = "1.1.0"
	in := &input{
		stdin: o.entryOf(`{"plugins": [`+o.chain+`]}`, changes), varLib: o.varLib,
		env: map[string]string{"CNI_COMMAND": command, "CNI_PATH": strings.Join(o.path, ":")},
	}
	out := o.start(in)
	if out.code != 0 {
		o.Errorf("%s: %s\n%s", command, out.stdout, out.stderr)
	}
	return out
}

// naive runs the reaper of the race on its pool, as antrea does at its start.
func (o *orphanage) naive(listed ...string) {
	o.Helper()
	reap(o.TB, filepath.Join(o.dataDir(), o.network), listed...)
}

// owners returns the containers that have an address.
func (o *orphanage) owners() []string {
	var ids []string
	for _, owner := range o.reserved() {
		id, _, _ := strings.Cut(owner, " ")
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

func (o *orphanage) want(what string, ids ...string) {
	o.Helper()
	if got := o.owners(); !slices.Equal(got, ids) {
		o.Errorf("%s: %v have an address, want %v", what, got, ids)
	}
}

// TestOrphans: there are pods of every kind from before the install. Only reservations that nobody
// has and no evidence supports go.
func TestOrphans(t *testing.T) {
	t.Parallel()
	o := newOrphanage(t)
	plain := o.plain(o.chain)
	for _, id := range []string{"cached", "gone", "listed", "moved"} {
		o.pod(id).mustAdd(plain)
	}
	o.at("gone").dropNetNS()
	o.at("listed").dropNetNS()
	// The cache has lost this one, but its interface is there.
	if err := os.Remove(filepath.Join(o.varLib, "cni", "results", o.network+"-moved-eth0")); err != nil {
		t.Fatal(err)
	}
	// The cache does not have this one either: its ADD failed, and so did the runtime's DEL.
	o.plan(map[string]map[string]string{"p1": {"ADD": "fail", "DEL": "fail"}})
	leaking := o.plain(o.chain, o.faulty("p1", ""))
	leaked := o.pod("leaked")
	if _, err := leaked.add(leaking); err == nil {
		t.Fatal("the ADD succeeded")
	}
	leaked.dropNetNS()

	o.want("at first", "cached", "gone", "leaked", "listed", "moved")
	for _, changes := range []map[string]any{{}, {netconf.ValidKeys[0]: nil}} {
		o.sweep("GC", maps.Clone(changes))
		o.sweep("STATUS", maps.Clone(changes))
	}
	o.want("without a list", "cached", "gone", "leaked", "listed", "moved")
	o.gc("1h", "listed")
	o.want("in the grace period", "cached", "gone", "leaked", "listed", "moved")
	// While processes come and go, not every namespace can be examined each time.
	eventually(t, "two released", func() bool { o.gc("0s", "listed"); return len(o.owners()) == 3 })
	o.want("with a list", "cached", "listed", "moved")
	eventually(t, "one more released", func() bool { o.gc("0s"); return len(o.owners()) == 2 })
	o.want("with an empty list", "cached", "moved")
	o.naive()
	o.want("a naive reconcile")
}

// TestOrphanInItsGracePeriod: a person's sweep, which has no network of its own, uses the grace
// period of each pool's network.
func TestOrphanInItsGracePeriod(t *testing.T) {
	t.Parallel()
	for grace, want := range map[string]int{"1ns": 0, "1h": 1} {
		t.Run(grace, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.conf["gracePeriod"] = grace
			chain := n.bridgePlugin("")
			p := n.pod("a")
			p.mustAdd(n.plain(chain))
			if err := os.Remove(p.cacheFile()); err != nil {
				t.Fatal(err)
			}
			p.dropNetNS()
			dir := filepath.Join(n.dir, "net.d")
			n.mkdir(dir)
			n.write(filepath.Join(dir, "10.conflist"), string(n.unwind(chain).Bytes))
			pools, err := sweep.ReadPools(n.stateDir, dir)
			if err != nil {
				t.Fatal(err)
			}
			eventually(t, "as many addresses as are to be kept", func() bool {
				plugin := &Plugin{Stderr: n.Output(), Budgets: undo.DefaultBudgets, CacheDir: n.cacheDir()}
				_, err := plugin.sweepAsRuntime(t.Context(), n.stateDir, sweep.Job{List: alive.NewList(n.network, nil), Pools: pools})
				return err == nil && len(n.reserved()) == want
			})
		})
	}
}

// at returns a pod that was added earlier.
func (n *node) at(id string) *pod {
	return &pod{n, libcni.RuntimeConf{ContainerID: id, NetNS: filepath.Join(n.dir, "netns", id), IfName: "eth0"}}
}

// TestLostJournal: after the journal was lost, every live pod is an orphan (antrea#8239 is of this
// kind). With a list that lacks them unwind takes nothing, while a reaper that goes by the list
// alone takes all. Once they are gone, unwind releases them.
func TestLostJournal(t *testing.T) {
	t.Parallel()
	for _, naive := range []bool{true, false} {
		t.Run(fmt.Sprintf("naive %t", naive), func(t *testing.T) {
			t.Parallel()
			o := newOrphanage(t)
			list := o.unwind(o.chain)
			for i := range 3 {
				o.pod(fmt.Sprintf("p%d", i)).mustAdd(list)
			}
			if err := os.RemoveAll(o.stateDir); err != nil {
				t.Fatal(err)
			}
			if naive {
				o.naive()
				o.want("all live")
				return
			}
			o.gc("0s")
			o.want("all live", "p0", "p1", "p2")
			o.at("p1").dropNetNS()
			eventually(t, "p1 released", func() bool { o.gc("0s"); return len(o.owners()) == 2 })
			o.want("p1 gone", "p0", "p2")
			for _, id := range []string{"p0", "p2"} {
				o.at(id).mustDel(list)
			}
			o.nothingLeft()
		})
	}
}

// TestReservedWhileListed: an ADD reserves its address after a list was read. A naive reconcile
// takes the address from the new pod; unwind's grace period keeps it.
func TestReservedWhileListed(t *testing.T) {
	t.Parallel()
	for _, naive := range []bool{true, false} {
		t.Run(fmt.Sprintf("naive %t", naive), func(t *testing.T) {
			o := newOrphanage(t)

			slow := o.plain(o.chain, o.faulty("p1", `, "delayMS": 1500`))
			p := o.pod("new")
			done := make(chan error, 1)
			go func() {
				_, err := p.add(slow)
				done <- err
			}()
			eventually(t, "an address is reserved", func() bool { return len(o.reserved()) == 1 })
			if naive {
				o.naive()
			} else {
				o.gc("10m")
			}
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			if lost := len(o.reserved()) == 0; lost != naive {
				t.Errorf("lost: %t", lost)
			}
		})
	}
}

// TestAddressLeftByDEL: host-device does not call its IPAM plugin if its device went with the
// namespace. Its success proves nothing.
func TestAddressLeftByDEL(t *testing.T) {
	t.Parallel()
	for _, wrapped := range []bool{false, true} {
		t.Run(fmt.Sprintf("wrapped %t", wrapped), func(t *testing.T) {
			n := newNode(t)
			device := n.bridge + "d"
			run(t, "ip", "link", "add", device, "type", "veth", "peer", "name", n.bridge+"e")
			t.Cleanup(func() { _ = exec.Command("ip", "link", "del", n.bridge+"e").Run() })
			chain := fmt.Sprintf(`{"type": "host-device", "device": %q, "ipam": %s}`, device, n.hostLocal(n.subnet))
			list := n.plain(chain)
			if wrapped {
				list = n.unwind(chain)
			}
			p := n.pod("a")
			p.mustAdd(list)
			p.dropNetNS()
			p.NetNS = ""
			p.mustDel(list)
			if left := len(n.reserved()) > 0; left == wrapped {
				t.Errorf("the address is left: %t", left)
			}
		})
	}
}
