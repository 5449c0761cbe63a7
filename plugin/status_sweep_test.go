package plugin

import (
	"fmt"
	"testing"
)

// TestStatusSweeps: a STATUS releases the dead attachments of its own network and of any other, and
// nothing else: none that lives or is being worked on, and nothing where sweeping is disabled. It
// waits for no lock.
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
