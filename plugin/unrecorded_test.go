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
	or a DEL pending: state a deleting; drop a; move a later
	or cut off: cutoff a; drop a; move a later
	or cut off, at the same path: cutoff a; drop a; move a a
	either another address:
	or the same address: lowest
	past add a; remember a
	sweeps unchanged a; entry a
	del a; vanished a`)
}

// TestLateDELAtAnothersPath: a container's DEL comes late, and by now another container's namespace
// is at its path. No delegate is shown that namespace.
func TestLateDELAtAnothersPath(t *testing.T) {
	stories(t, `
	chain bridge, "ipMasq": true | firewall | portmap
	either a tombstone, after a sweep: add a; drop a; sweep; tombstone a
	or a DEL pending: add a; breaks portmap; fails del a; drop a; works portmap
	or its ADD failed: plan p3 ADD fail
		chain bridge, "ipMasq": true | firewall | portmap | p3
		fails add a; drop a
		chain bridge, "ipMasq": true | firewall | portmap
	either the other added through unwind: let past
	or the other added past unwind: let past past
	takes b a; $past add b; remember b
	del a; unchanged b
	$past del b`)
}

// TestUnknownDELAtAnothersPath: the same, and the journal has nothing of the container whose DEL comes
// late. The journal must have the other container: as without unwind, the delegates get the path.
func TestUnknownDELAtAnothersPath(t *testing.T) {
	stories(t, `
	chain bridge, "ipMasq": true | firewall | portmap
	either a second DEL, with the result: add a; cached a del a; drop a
	or never added through unwind: past add a; cached a past del a; drop a
	takes b a; add b; remember b
	del a; unchanged b
	del b`)
}

// TestUndonePastTheJournal: an attachment was undone, by a sweep or past the journal, and is added
// again, past it or through unwind. The DEL of that ADD undoes it.
func TestUndonePastTheJournal(t *testing.T) {
	stories(t, `
	chain bridge, "ipMasq": true | firewall | portmap
	add a
	either swept, in another namespace: drop a; sweep; move a later; past add a
	or swept, at the same path: drop a; sweep; move a a; past add a
	or swept, at the same path, which is gone: drop a; sweep; move a a; past add a
	or deleted past it, added through unwind: past del a; add a
	remember a
	if which is gone: drop a
	del a; vanished a`)
}

// TestADDOverAnUnseenADD: unwind refuses to add an attachment that already lives, and takes nothing
// from it.
func TestADDOverAnUnseenADD(t *testing.T) {
	stories(t, `
	chain bridge, "ipMasq": true | firewall | portmap
	either never on record:
	or an earlier one on record: add a; past del a; move a later
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
	names a $netns/b; let cache $dir/cache/results/$network-b-eth0
	either the other cached: fails add a
	or the other not cached: shell 'mv $cache $cache.away'; fails add a; shell 'mv $cache.away $cache'
	unchanged b
	past del b`)
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
