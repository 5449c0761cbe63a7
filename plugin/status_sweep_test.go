package plugin

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
)

// TestStatusSweeps: a STATUS releases the dead attachments of its own network and of any other, and
// nothing else: none that lives or is being worked on, and nothing where sweeping is disabled. It
// waits for no lock. The lock file of an ADD that was cut off in its first delegate says that it was.
func TestStatusSweeps(t *testing.T) {
	stories(t, `
	chain p0 | p1 | p2 | p3
	add live
	either namespace gone: add a; drop a
	or ADD cut off in its first delegate: plan p0 ADD kill-parent-effect; killed add a
	or ADD cut off after its first result, namespace gone: plan p2 ADD kill-parent-effect; killed add a; drop a
	or ADD and its DEL failed: plan p2 ADD fail-effect, p1 DEL fail; fails add a
	or DEL failed: add a; plan p2 DEL fail; fails del a
	or earlier boot: add a; boot a
	plan; steady
	network of-another
	status sweepOnStatus=false; steady
	unless first delegate: lock a; status; unlock; steady
	statuses 1
	entry live live 4; taken live.eth0.p0 live.eth0.p1 live.eth0.p2 live.eth0.p3
	del live`, acts{
		"steady": func(s *story, _ []string) { // the same is taken as before
			taken := fmt.Sprint(s.taken())
			s.want(s.vars["taken"] == "" || s.vars["taken"] == taken, "%s, was %s", taken, s.vars["taken"])
			s.vars["taken"] = taken
		},
	})
}

// TestStatusDuringAdd: STATUS leaves an attachment alone while its ADD runs.
func TestStatusDuringAdd(t *testing.T) {
	stories(t, `
	chain p0 | p1, "delayMS": 500 | p2 | p3
	plan p1 ADD late; start add a; awaits ADD p1
	status; wait add a
	entry a live 4; taken a.eth0.p0 a.eth0.p1 a.eth0.p2 a.eth0.p3
	calls ADD p0, ADD p1, ADD p2, ADD p3
	del a`)
}

// TestStatusOfRealChain: with reference plugins, the dead pod's address, rules and interface go.
// The live one keeps them, and its traffic.
func TestStatusOfRealChain(t *testing.T) {
	stories(t, `
	chain bridge, "ipMasq": true | firewall | portmap
	add dead; remember dead; add live; remember live
	drop dead; statuses 1
	vanished dead; unchanged live; pings live
	del live`)
}

// TestStatusHasNoList: a runtime's list of valid attachments is for GC. On the stdin of a STATUS it
// makes nothing dead, and no delegate sees it. With the same list, a GC releases.
func TestStatusHasNoList(t *testing.T) {
	stories(t, `
	chain p0 | p1 | p2 | p3; add a; forgets
	either valid: let list valid=[]
	or slip: let list slip=[]
	status $list; versions 1.0.0 1.1.0; status $list
	unlisted; entry a live 4
	versions 1.0.0 1.0.0; gc $list`, acts{"unlisted": func(s *story, _ []string) {
		s.want(len(s.callLog()) == 4, "%d calls", len(s.callLog()))
		for _, l := range s.callLog() {
			s.want(l.Command == "STATUS" && l.Stdin[validKey] == nil && l.Stdin[slipKey] == nil, "%s: %v", l.Command, l.Stdin)
		}
	}})
}

// TestStatusIsKilled kills unwind at each point of a STATUS that sweeps. The next one finishes it,
// and the runtime's DEL, if it comes, has nothing to do.
func TestStatusIsKilled(t *testing.T) {
	t.Parallel()
	for name, past := range map[string]string{
		"namespace gone":                    `chain p0 | p1 | p2 | p3; add a; drop a`,
		"ADD cut off":                       `chain p0 | p1 | p2 | p3; plan p0 ADD kill-parent-effect; killed add a; plan`,
		"namespace gone, reference plugins": `chain bridge, "ipMasq": true | firewall | portmap; add a; drop a`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// The DEL finds a tombstone, or a lock file if unwind was killed there.
			atEveryPoint(t, 5, `
			patient; versions 1.1.0 1.0.0; `+past+`
			chain another; kill any $at libcni-status
			statuses 0; clean
			del a; times 0 DEL another`)
		})
	}
}

// TestStatusIsKilledInDEL kills unwind while a delegate runs a DEL of its sweep. The delegate goes
// on, and the next sweep waits for it. If it hangs, it is killed, and the DEL runs again. The short
// budgets end orphans sooner.
func TestStatusIsKilledInDEL(t *testing.T) {
	stories(t, `
	hasty; versions 1.1.0 1.0.0; chain p0 | p1
	add a; drop a
	either orphan: plan p1 DEL orphan
	or kill-parent: plan p1 DEL kill-parent
	or kill-parent-effect: plan p1 DEL kill-parent-effect
	chain another; killed libcni-status
	plan; statuses 0`)
}

// TestStatusMakesJournal kills unwind at each point of a node's first STATUS. The next one, and an
// ADD, work.
func TestStatusMakesJournal(t *testing.T) {
	t.Parallel()
	atEveryPoint(t, 2, `
	versions 1.1.0 1.0.0; conf onJournalFailure fail; chain p0 | p1 | p2 | p3
	kill any $at libcni-status
	status; add a; del a`)
}

// TestStatusKeepsTombstone: the runtime's late DEL of an attachment that a STATUS released runs
// nothing.
func TestStatusKeepsTombstone(t *testing.T) {
	stories(t, `
	chain p0 | p1 | p2 | p3
	add a; drop a
	statuses 0; left; forgets
	del a; calls; absent $netns/a`)
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

func (n *node) poolFull() string {
	return fmt.Sprintf("unwind: no free address in %s/%s; unwindctl ipam shows who has them", n.dataDir(), n.network)
}

// sweepsAll runs STATUS until the journal has at most this many entries, since each has only two
// seconds.
func (n *node) sweepsAll(but int, chain ...string) {
	n.Helper()
	eventually(n, "a STATUS after which nothing dead is left", func() bool {
		n.wantStatus("STATUS", n.status("1.0.0", nil, chain...), 0, "")
		return len(n.entries()) == but
	})
}
