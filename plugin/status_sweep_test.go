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
		"steady": func(s *story, _ []string) { s.steady("taken", fmt.Sprint(s.taken())) },
	})
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

// TestStatusReleasesEmpty: a STATUS, and the sweep after a failed ADD, release an address whose
// owner host-local never wrote, also if they cannot know that the pool is full (as of flannel).
func TestStatusReleasesEmpty(t *testing.T) {
	stories(t, `
	chain bridge; add a; del a; reserve $ip2; reserved 1
	either STATUS: status
	or a failed ADD: status; reserve $ip2; chain bridge | p1; plan p1 ADD fail; fails add b
	reserved 0; leaves`)
}

// TestCutOffReservation: a power loss leaves a host-local file of a dead pod empty or cut off. The record
// and the file go with the next sweep. A living pod's file of the same pool stays.
func TestCutOffReservation(t *testing.T) {
	stories(t, `
	chain bridge | firewall; add container; add other; reboot container
	one-in 3
	let file $data/$network/$container
	either empty: cut 0 0
	or zeros: cut 0 12
	or in the container ID: cut 4 4
	or before the interface: cut 10 10
	or in the interface: cut 12 12
	or in the interface, then zeros: cut 12 15
	each by STATUS GC sweep
	swept $by container; owners '$other other eth0'; del other`, acts{
		"swept": func(s *story, w []string) {
			eventually(s, w[1]+" is gone", func() bool { sweeps[w[0]](s.node, s.plugins(s.node)); return s.who(w[1]).entry() == nil })
		},
		"cut": func(s *story, w []string) { // to this many bytes, and fills it up with zeros
			file := s.value("$file")
			run(s, "sh", "-ec", fmt.Sprintf("touch -r %[1]s %[1]s.ref; truncate -s %[2]s %[1]s; truncate -s %[3]s %[1]s; touch -r %[1]s.ref %[1]s; rm %[1]s.ref",
				file, w[0], w[1]))
		},
	})
}

// TestEmptiedFileOfALivePod: an address whose file somebody emptied stays a living pod's.
func TestEmptiedFileOfALivePod(t *testing.T) {
	stories(t, `
	chain bridge; add a; reserve $ip2
	either STATUS: status
	or unwindctl sweep: sweep
	reserved 1; add b; reserved 2
	del b; del a; chain bridge | p1; plan p1 ADD fail; fails add c
	reserved 0; leaves`)
}

// sweepsAll runs STATUS until the journal has just this many entries, since each has only two seconds.
func (n *node) sweepsAll(but int, chain ...string) {
	n.Helper()
	eventually(n, "a STATUS after which nothing dead is left", func() bool {
		if out := n.ask("STATUS", "1.0.0", nil, chain...); out.code != 0 {
			n.Errorf("STATUS: %s", out.stdout)
		}
		return len(n.entries()) == but
	})
}
