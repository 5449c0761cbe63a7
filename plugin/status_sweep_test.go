package plugin

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
)

// sweepsAll runs STATUS until the journal has at most this many entries, since each has only two
// seconds.
func (n *node) sweepsAll(but int, chain ...string) {
	n.Helper()
	eventually(n, "a STATUS after which nothing dead is left", func() bool {
		n.wantStatus("STATUS", n.status("1.0.0", nil, chain...), 0, "")
		return len(n.entries()) == but
	})
}

// deaths make a pod of a chain of four faulty plugins that is dead by all evidence.
var deaths = []struct {
	name string
	die  func(p *pod, list *libcni.NetworkConfigList)
}{
	{"namespace gone", func(p *pod, list *libcni.NetworkConfigList) {
		p.mustAdd(list)
		p.dropNetNS()
	}},
	{"ADD cut off", func(p *pod, list *libcni.NetworkConfigList) {
		p.plan(map[string]map[string]string{"p0": {"ADD": "kill-parent-effect"}})
		if _, err := p.add(list); !wasKilled(err) {
			p.Fatalf("ADD: %v", err)
		}
	}},
	{"ADD cut off after its first result, namespace gone", func(p *pod, list *libcni.NetworkConfigList) {
		p.plan(map[string]map[string]string{"p2": {"ADD": "kill-parent-effect"}})
		if _, err := p.add(list); !wasKilled(err) {
			p.Fatalf("ADD: %v", err)
		}
		p.dropNetNS()
	}},
	{"ADD and its DEL failed", func(p *pod, list *libcni.NetworkConfigList) {
		p.plan(map[string]map[string]string{"p2": {"ADD": "fail-effect"}, "p1": {"DEL": "fail"}})
		if _, err := p.add(list); err == nil {
			p.Fatal("the ADD succeeded")
		}
	}},
	{"DEL failed", func(p *pod, list *libcni.NetworkConfigList) {
		p.mustAdd(list)
		p.plan(map[string]map[string]string{"p2": {"DEL": "fail"}})
		if err := p.del(list); err == nil {
			p.Fatal("the DEL succeeded")
		}
	}},
	{"earlier boot", func(p *pod, list *libcni.NetworkConfigList) {
		p.mustAdd(list)
		p.edit(func(g *journal.Generation) { g.Host.BootID = "another" })
	}},
}

// TestStatusSweeps: a STATUS releases the dead attachments of its own network and of any other, and
// nothing else: none that lives or is being worked on, and nothing where sweeping is disabled. It
// waits for no lock.
func TestStatusSweeps(t *testing.T) {
	t.Parallel()
	for _, death := range deaths {
		t.Run(death.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			list := n.unwind(chainOfFour(n)...)
			p, live := n.pod("a"), n.pod("live")
			live.mustAdd(list)
			death.die(p, list)
			n.plan(nil)
			before, own := n.taken(), n.network

			n.network += "-of-another"
			n.wantStatus("told not to", n.status("1.0.0", keys{"sweepOnStatus": false}, n.faulty("p0", "")), 0, "")
			if death.name != "ADD cut off" { // whose lock file says that it was
				lock, err := n.store.TryAcquire(journal.Key{Network: own, ContainerID: "a", IfName: "eth0"})
				if err != nil {
					t.Fatal(err)
				}
				n.wantStatus("lock held", n.status("1.0.0", nil, n.faulty("p0", "")), 0, "")
				lock.Release()
			}
			if taken := n.taken(); strings.Join(taken, " ") != strings.Join(before, " ") {
				t.Errorf("taken: %v, want %v", taken, before)
			}
			n.sweepsAll(1, n.faulty("p0", ""))
			n.network = own
			if e := live.entry(); e == nil || e.State != journal.Live || e.Pending() != 4 || len(n.taken()) != 4 {
				t.Errorf("the live one is in the journal as %+v, taken: %v", e, n.taken())
			}
			live.mustDel(list)
			n.nothingLeft()
		})
	}
}

// TestStatusDuringAdd: STATUS leaves an attachment alone while its ADD runs.
func TestStatusDuringAdd(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	list := n.unwind(slowChain(n)...)
	p := n.pod("a")
	err := p.addWhile(list, 1, func() { n.wantStatus("STATUS", n.status("1.0.0", nil, n.faulty("p0", "")), 0, "") })
	if e := p.entry(); err != nil || e == nil || e.State != journal.Live || len(n.taken()) != 4 {
		t.Errorf("ADD: %v; the journal has %+v, taken: %v", err, e, n.taken())
	}
	n.wantCalls("all", "ADD p0", "ADD p1", "ADD p2", "ADD p3")
	p.mustDel(list)
	n.nothingLeft()
}

// TestStatusOfRealChain: with reference plugins, the dead pod's address, rules and interface go.
// The live one keeps them, and its traffic.
func TestStatusOfRealChain(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	chain := realChain(n)
	list := n.unwind(chain...)
	dead, live := n.pod("dead"), n.pod("live")
	dead.CapabilityArgs = portMappings
	ofDead, result := dead.marks(dead.mustAdd(list)), live.mustAdd(list)
	ofLive := live.marks(result)
	before := strings.Join(live.traces(ofLive), "\n")
	dead.dropNetNS()
	n.sweepsAll(1, chain...)
	for _, trace := range dead.traces(ofDead) {
		t.Errorf("left: %s", trace)
	}
	if after := strings.Join(live.traces(ofLive), "\n"); after != before || before == "" {
		t.Errorf("the live one has\n%s\nand had\n%s", after, before)
	}
	live.pingsGateways(result)
	live.mustDel(list)
	n.nothingLeft()
}

// TestStatusHasNoList: a runtime's list of valid attachments is for GC. On the stdin of a STATUS it
// makes nothing dead, and no delegate sees it. With the same list, a GC releases.
func TestStatusHasNoList(t *testing.T) {
	t.Parallel()
	for _, key := range netconf.ValidKeys {
		n := newNode(t)
		chain := chainOfFour(n)
		list := n.unwind(chain...)
		p := n.pod("a")
		p.mustAdd(list)
		n.forgetCalls()
		empty := keys{key: []string{}}
		for _, version := range []string{"1.0.0", "1.1.0"} {
			n.wantStatus(version, n.status(version, empty, chain...), 0, "")
		}
		for _, l := range n.callLog() {
			if _, is := l.Stdin[key]; is || l.Command != "STATUS" {
				t.Errorf("%s of %s with %v", l.Command, l.Instance, l.Stdin)
			}
		}
		if e := p.entry(); e == nil || e.State != journal.Live || len(n.taken()) != 4 {
			t.Errorf("%s: the journal has %+v, taken: %v", key, e, n.taken())
		}
		if out := n.ask("GC", "1.0.0", empty, chain...); out.code != 0 {
			t.Errorf("GC: %s", out.stdout)
		}
		n.nothingLeft()
	}
}

// TestStatusIsKilled kills unwind at each point of a STATUS that sweeps. The next one finishes it,
// and the runtime's DEL, if it comes, has nothing to do.
func TestStatusIsKilled(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		chain func(n *node) []string
		die   func(p *pod, list *libcni.NetworkConfigList)
	}{
		{"namespace gone", chainOfFour, deaths[0].die},
		{"ADD cut off", chainOfFour, deaths[1].die},
		{"namespace gone, reference plugins", realChain, deaths[0].die},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			everyPoint(t, 5, func(t *testing.T, at int) bool {
				n := newNode(t).patient()
				n.outer = "1.1.0"
				chain := c.chain(n)
				p := n.pod("a")
				c.die(p, n.unwind(chain...))
				n.plan(nil)
				err := n.killedAt(at, func() error { return n.cni.GetStatusNetworkList(context.Background(), n.anotherChain()) })
				if !wasKilled(err) && err != nil {
					t.Errorf("STATUS: %v", err)
				}
				n.sweepsAll(0, n.faulty("another", ""))
				n.noRules()
				// The DEL finds a tombstone, or a lock file if unwind was killed there.
				p.mustDel(n.anotherChain())
				n.nothingLeft()
				if slices.Contains(n.calls(), "DEL another") {
					t.Error("the runtime's DEL ran a delegate")
				}
				return wasKilled(err)
			})
		})
	}
}

// TestStatusIsKilledInDEL kills unwind while a delegate runs a DEL of its sweep. The delegate goes
// on, and the next sweep waits for it. If it hangs, it is killed, and the DEL runs again.
func TestStatusIsKilledInDEL(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"orphan", "kill-parent", "kill-parent-effect"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			n := newNode(t).hasty() // orphans are killed sooner
			n.outer = "1.1.0"
			n.deadPod(mode)
			err := n.cni.GetStatusNetworkList(context.Background(), n.anotherChain())
			if !wasKilled(err) {
				t.Errorf("STATUS: %v", err)
			}
			n.plan(nil)
			n.sweepsAll(0, n.faulty("another", ""))
			n.nothingLeft()
		})
	}
}

// TestStatusMakesJournal kills unwind at each point of a node's first STATUS. The next one, and an
// ADD, work.
func TestStatusMakesJournal(t *testing.T) {
	t.Parallel()
	everyPoint(t, 2, func(t *testing.T, at int) bool {
		n := newNode(t)
		n.outer = "1.1.0"
		n.conf["onJournalFailure"] = "fail"
		list := n.unwind(chainOfFour(n)...)
		err := n.killedAt(at, func() error { return n.cni.GetStatusNetworkList(context.Background(), list) })
		n.wantStatus("STATUS", n.status("1.0.0", nil, n.faulty("p0", "")), 0, "")
		p := n.pod("a")
		p.mustAdd(list)
		p.mustDel(list)
		n.nothingLeft()
		return wasKilled(err)
	})
}

// TestStatusOfPool: a host-local pool without a free address is a failure only if configured so.
// The same holds for one of two pools that give every container an address. STATUS ignores pools of
// other plugins, and configurations of no pool.
func TestStatusOfPool(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, ipam string
		given      string // the files of the pool
		full       bool
	}{
		{"no pool yet", `"type": "host-local", "subnet": "10.1.0.0/30"`, "", false},
		{"a /30", `"type": "host-local", "subnet": "10.1.0.0/30"`, "10.1.0.2", true},
		{"a /29", `"type": "host-local", "subnet": "10.1.0.0/29"`, "10.1.0.2 10.1.0.3 10.1.0.4 10.1.0.5 10.1.0.6", true},
		{"a /29 with one left", `"type": "host-local", "subnet": "10.1.0.0/29"`, "10.1.0.2 10.1.0.3 10.1.0.5 10.1.0.6", false},
		{"IPv6", `"type": "host-local", "subnet": "fd00::/126"`, "fd00::2 fd00::3", true},
		{"IPv6 with one left", `"type": "host-local", "subnet": "fd00::/126"`, "fd00::2", false},
		{"dual, the second full", `"type": "host-local", "ranges": [[{"subnet": "fd00::/64"}], [{"subnet": "10.1.0.0/30"}]]`,
			"fd00::2 10.1.0.2", true},
		{"dual, the first full", `"type": "host-local", "ranges": [[{"subnet": "10.1.0.0/30"}], [{"subnet": "fd00::/64"}]]`,
			"fd00::2 10.1.0.2", true},
		{"dual, room in both", `"type": "host-local", "ranges": [[{"subnet": "10.1.0.0/29"}], [{"subnet": "fd00::/64"}]]`,
			"fd00::2 10.1.0.2", false},
		{"another IPAM", `"type": "static", "subnet": "10.1.0.0/30"`, "10.1.0.2", false},
		{"a subnet that is none", `"type": "host-local", "subnet": "10.1.0.0"`, "10.1.0.2", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.mkdir(n.dataDir())
			for _, name := range strings.Fields(tt.given) {
				n.mkdir(filepath.Join(n.dataDir(), n.network))
				n.write(filepath.Join(n.dataDir(), n.network, name), "z\r\neth0")
			}
			plugin := n.faulty("p1", fmt.Sprintf(`, "ipam": {"dataDir": %q, %s}`, n.dataDir(), tt.ipam))
			for _, onFull := range []string{"", "ok", "fail"} {
				var changes keys
				if onFull != "" {
					changes = keys{"statusOnPoolExhausted": onFull}
				}
				code, msg := uint(0), ""
				if tt.full && onFull == "fail" {
					code, msg = 50, n.poolFull()
				}
				n.wantStatus(onFull, n.status("1.0.0", changes, n.faulty("p0", ""), plugin), code, msg)
			}
			if pools := n.names(n.dataDir()); len(pools) > 0 && tt.given == "" {
				t.Errorf("pools were made: %v", pools)
			}
		})
	}
}

// TestStatusMakesRoom: an address that the sweep of a STATUS frees counts for its own outcome. One
// that it must not free does not.
func TestStatusMakesRoom(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.conf["statusOnPoolExhausted"] = "fail"
	ipam := n.hostLocal(strings.Replace(n.subnet, "/24", "/30", 1))
	chain := []string{fmt.Sprintf(`{"type": "bridge", "bridge": %q, "ipam": %s}`, n.bridge, ipam), `{"type": "firewall"}`}
	list := n.unwind(chain...)
	full := n.poolFull()
	p := n.pod("a")
	n.wantStatus("empty", n.status("1.0.0", nil, chain...), 0, "")
	p.mustAdd(list)
	n.wantStatus("full", n.status("1.0.0", nil, chain...), 50, full)
	p.dropNetNS()
	n.wantStatus("full of what is not swept", n.status("1.0.0", keys{"sweepOnStatus": false}, chain...), 50, full)
	unlock := n.flock(filepath.Join(n.dataDir(), n.network, "lock"))
	n.wantStatus("full of what cannot be swept", n.status("1.0.0", nil, chain...), 50, full)
	unlock()
	eventually(t, "a STATUS that frees the address", func() bool {
		out := n.status("1.0.0", nil, chain...)
		freed := len(n.entries()) == 0
		if freed {
			n.wantStatus("full of what is dead", out, 0, "")
		}
		return freed
	})
	n.nothingLeft()
}

// TestStatusKeepsTombstone: the runtime's late DEL of an attachment that a STATUS released runs
// nothing.
func TestStatusKeepsTombstone(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	chain := chainOfFour(n)
	list := n.unwind(chain...)
	p := n.pod("a")
	p.mustAdd(list)
	p.dropNetNS()
	n.sweepsAll(0, chain...)
	n.nothingLeft()
	n.forgetCalls()
	p.mustDel(list)
	n.wantCalls("the runtime's DEL")
	if _, err := os.Stat(p.NetNS); !os.IsNotExist(err) {
		t.Errorf("the namespace's path: %v", err)
	}
}

func (n *node) poolFull() string {
	return fmt.Sprintf("unwind: no address is left in %s/%s; unwindctl ipam shows who has them", n.dataDir(), n.network)
}
