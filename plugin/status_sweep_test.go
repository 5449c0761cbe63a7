package plugin

import (
	"fmt"
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
	or ADD cut off in its first delegate: plan p0 ADD kill-parent-effect; killed add a; free a
	or ADD cut off after its first result, namespace gone: plan p2 ADD kill-parent-effect; killed add a; free a; drop a
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
		"ADD cut off":                       `chain p0 | p1 | p2 | p3; plan p0 ADD kill-parent-effect; killed add a; free a; plan`,
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

const poolFull = "'unwind: no free address in $data/$network; unwindctl ipam shows who has them'"

// TestStatusOfPool: a host-local pool without a free address is a failure only if configured so.
// The same holds for one of two pools that give every container an address. STATUS ignores pools of
// other plugins, and configurations of no pool.
func TestStatusOfPool(t *testing.T) {
	stories(t, `
	shell 'mkdir $data'; let type host-local; let small [{"subnet": "10.1.0.0/30"}]; let v6 [{"subnet": "fd00::/64"}]
	either no pool yet: let ipam "subnet": "10.1.0.0/30"
	or full, a /30: let ipam "subnet": "10.1.0.0/30"; has 10.1.0.2
	or full, a /29: let ipam "subnet": "10.1.0.0/29"; has 10.1.0.2 10.1.0.3 10.1.0.4 10.1.0.5 10.1.0.6
	or a /29 with one left: let ipam "subnet": "10.1.0.0/29"; has 10.1.0.2 10.1.0.3 10.1.0.5 10.1.0.6
	or full, IPv6: let ipam "subnet": "fd00::/126"; has fd00::2 fd00::3
	or IPv6 with one left: let ipam "subnet": "fd00::/126"; has fd00::2
	or full, dual, the second: let ipam "ranges": [$v6, $small]; has fd00::2 10.1.0.2
	or full, dual, the first: let ipam "ranges": [$small, $v6]; has fd00::2 10.1.0.2
	or dual, room in both: let ipam "ranges": [[{"subnet": "10.1.0.0/29"}], $v6]; has fd00::2 10.1.0.2
	or another IPAM: let type static; let ipam "subnet": "10.1.0.0/30"; has 10.1.0.2
	or a subnet that is none: let ipam "subnet": "10.1.0.0"; has 10.1.0.2
	chain p0 | p1, "ipam": {"type": "$type", "dataDir": "$data", $ipam}
	status; status statusOnPoolExhausted="ok"
	if full: fails status statusOnPoolExhausted="fail" code=50 `+poolFull+`
	unless full: status statusOnPoolExhausted="fail"
	if no pool: absent $data/$network
	leaves`, acts{"has": func(s *story, w []string) {
		for _, address := range w {
			s.reserve(address, "z\r\neth0")
		}
	}})
}

// TestStatusMakesRoom: an address that the sweep of a STATUS frees counts for its own outcome. One
// that it must not free does not.
func TestStatusMakesRoom(t *testing.T) {
	stories(t, `
	conf statusOnPoolExhausted fail; subnet 0/30; chain bridge | firewall
	status; add a; fails status code=50 `+poolFull+`
	drop a; fails status sweepOnStatus=false code=50 `+poolFull+`
	flock $data/$network/lock; fails status code=50 `+poolFull+`
	unlock; frees`, subnets, acts{"frees": func(s *story, _ []string) {
		eventually(s, "a STATUS that frees the address", func() bool {
			_, err := s.attempt([]string{"status"})
			freed := len(s.entries()) == 0
			s.want(!freed || err == nil, "full of what is dead: %v", err)
			return freed
		})
	}})
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
