package plugin

import (
	"testing"

	"github.com/vishvananda/netlink"
)

// The chain of these tests has something keyed by container ID (bridge's masquerading, portmap,
// host-local) and something keyed by address (firewall). "past" is what happens past unwind, so that
// the journal cannot see it.

// TestAddedAgainPastTheJournal: a container ID is deleted and added again while the journal cannot
// see it. Undoing the ADD on record must not touch what the later one has. The DEL of the later one
// leaves nothing of both.
func TestAddedAgainPastTheJournal(t *testing.T) {
	stories(t, `
	chain bridge, "ipMasq": true | firewall | portmap
	add a; past del a
	either live, its namespace gone: drop a; entries 1; move a later
	or live, of an earlier boot: reboot a; move a later
	or a DEL pending, in the same namespace: state a deleting
	or cut off, in the same namespace: cutoff a
	or cut off, in another namespace: cutoff a; drop a; move a later
	either another address:
	or the same address: lowest
	past add a; remember a
	sweeps unchanged a; entry a
	del a; vanished a`)
}

// TestDeletedPastTheJournal is the opposite: the later ADD was deleted too, past the journal. Then
// nothing keeps the one on record.
func TestDeletedPastTheJournal(t *testing.T) {
	stories(t, `
	chain bridge, "ipMasq": true | firewall | portmap
	add a; past del a; drop a; move a later
	past add a
	sweep; entry a
	past del a; drop a; sweep; gone a`)
}

// TestStaticAddressAgain: two containers have the same static address. The first is dead, and the
// second was added past the journal. The first one's firewall rules belong to the second by now.
func TestStaticAddressAgain(t *testing.T) {
	stories(t, `
	chain static | firewall
	add old; drop old
	past add next; remember next
	sweeps unchanged next
	past del next; drop next; sweep`)
}

// TestLateDELAtAnothersPath: a container's DEL comes late, and by now another container's namespace
// is at its path. No delegate is shown that namespace.
func TestLateDELAtAnothersPath(t *testing.T) {
	stories(t, `
	chain bridge, "ipMasq": true | firewall | portmap
	either a tombstone, after a sweep: add a; drop a; sweep; tombstone a
	or a second DEL, with the result: add a; cached a del a; drop a
	or its ADD failed: plan p3 ADD fail
		chain bridge, "ipMasq": true | firewall | portmap | p3
		fails add a; drop a
		chain bridge, "ipMasq": true | firewall | portmap
	or never added through unwind: past add a; cached a past del a; drop a
	either the other added through unwind: let past
	or the other added past unwind: let past past
	takes b a; $past add b; remember b
	del a; unchanged b
	$past del b`)
}

// TestTombstoneAnswersItsOwn: a container ID is swept, then added again past the journal. The DEL
// of that ADD undoes it.
func TestTombstoneAnswersItsOwn(t *testing.T) {
	stories(t, `
	chain bridge, "ipMasq": true | firewall | portmap
	add a; drop a; sweep
	either in another namespace: move a later
	or at the same path: move a a
	past add a; remember a
	del a; vanished a`)
}

// TestADDAfterAnUnseenDEL: an attachment is added through unwind, deleted past it, and added again
// in the same namespace.
func TestADDAfterAnUnseenDEL(t *testing.T) {
	stories(t, `
	chain bridge, "ipMasq": true | firewall | portmap
	add a; past del a
	add a; remember a
	del a; vanished a`)
}

// TestADDOverAnUnseenADD: unwind refuses to add an attachment that already lives, and takes nothing
// from it.
func TestADDOverAnUnseenADD(t *testing.T) {
	stories(t, `
	chain bridge, "ipMasq": true | firewall | portmap
	either never on record:
	or an earlier one on record: add a; past del a
	past add a; remember a
	fails add a 'is already attached'; unchanged a
	del a`)
}

// TestRollbackBesideAnother: an ADD fails in a namespace in which another container has the
// interface, whether libcni's cache knows that container or not.
func TestRollbackBesideAnother(t *testing.T) {
	stories(t, `
	chain bridge, "ipMasq": true | firewall | portmap
	past add b; remember b
	into a b
	either the other cached: fails add a
	or the other not cached: uncached b fails add a
	unchanged b
	past del b`)
}

// TestLaterADDOfAnotherChain: a later ADD, past the journal, has a chain with more plugins than the
// one on record. Sweeps keep both. The runtime's DEL leaves nothing of either.
func TestLaterADDOfAnotherChain(t *testing.T) {
	stories(t, `
	chain bridge, "ipMasq": true
	add a; past del a; drop a; move a later
	chain bridge, "ipMasq": true | firewall | portmap
	past add a; drop a
	sweep; entry a live
	del a`)
}

// TestLaterADDIsUndoneOnce: there is a later ADD, past the journal, and a delegate of the one on
// record whose DEL fails. Neither the runtime's next DEL, which still has the later ADD's result,
// nor a sweep undoes the later ADD again.
func TestLaterADDIsUndoneOnce(t *testing.T) {
	stories(t, `
	chain bridge | earlier
	add a
	chain bridge
	past del a
	chain bridge | later
	past add a
	plan earlier DEL fail
	fails del a; fails del a
	drop a; sweep
	times 1 DEL later
	plan; del a`)
}

// TestUndoneADDComesAgain: unwind has undone an ADD, while an earlier one has a pending DEL. The ADD
// comes again past the journal, with the same MAC and IP address. A sweep takes nothing from it.
func TestUndoneADDComesAgain(t *testing.T) {
	stories(t, `
	conf capabilities {"mac": true}
	chain bridge, "capabilities": {"mac": true} | earlier
	add a
	chain bridge, "capabilities": {"mac": true}
	past del a
	chain bridge, "capabilities": {"mac": true} | later
	capabilities a {"mac": "02:00:00:00:00:07"}; lowest; past add a
	plan earlier DEL fail
	fails del a
	lowest; past add a
	plan; forgets
	sweep; calls
	del a`)
}

// TestUndoneADDInTheCache: a sweep undid c's newer ADD, whose result libcni's cache still has, and c
// has an older pending DEL. Its next pass takes the cached ADD for one that the journal did not see.
// It must not be shown the cached address, which b has by now.
func TestUndoneADDInTheCache(t *testing.T) {
	stories(t, `
	conf gracePeriod 1ns
	chain pooled | p1, "rules": true | p2
	add c; let older $c
	plan p1 DEL fail
	fails del c
	lowest; add a; given a $older
	plan
	again c c2; add c2; drop c2
	sweep; entry c2 deleting 1 1
	add b; given b $c2; has c2
	del a; rules $b.p1
	del b; sweep; del c2`)
}

// TestADDInTheHostsNetNS: the runtime adds an interface to its own namespace on purpose. The DEL
// removes the interface there.
func TestADDInTheHostsNetNS(t *testing.T) {
	stories(t, `
	chain bridge; own a
	add a; on-host a yes; del a; on-host a no`, acts{
		"own": func(s *story, w []string) {
			s.env = append(s.env, "CNI_NETNS_OVERRIDE=TRUE")
			s.who(w[0]).NetNS, s.who(w[0]).IfName = "/proc/self/ns/net", "h"+s.bridge
		},
		"on-host": func(s *story, w []string) {
			_, err := netlink.LinkByName(s.who(w[0]).IfName)
			s.want((err == nil) == (w[1] == "yes"), "%v", err)
		},
	})
}
