package plugin

import (
	"fmt"
	"os"
	"testing"

	"github.com/vishvananda/netlink"
)

// An ADD is known by its network namespace. In the tests of this file, the journal doesn't have an
// ADD that has everything else in common with one that it has: the container ID, the address, the
// MAC address. Each has rules by the container ID (bridge, portmap) and by the address (firewall).

// sameAgain is a chain that gives a container the same addresses each time. host-local has no files.
const sameAgain = `
	chain {"type": "bridge", "bridge": "$bridge", "isGateway": true, "ipMasq": true, "capabilities": {"mac": true},
			"ipam": {"type": "static", "addresses": [{"address": "$ip7/24"}]}}
		| firewall | portmap
	capabilities a {"mac": "02:00:00:00:00:07", "portMappings": [{"hostPort": 20000, "containerPort": 80, "protocol": "tcp"}]}
	`

// TestSameADDAgain: a container is restarted under its ID, and the journal has only its first life.
// No sweep takes anything of the second one, and the DEL of the second one leaves nothing.
func TestSameADDAgain(t *testing.T) {
	stories(t, sameAgain+`
	add a
	either past unwind: past del a; drop a; move a later; past add a
	or past unwind, at the same path: past del a; drop a; move a a; past add a
	or past unwind, after a sweep: drop a; sweep; gone a; uncached a; move a later; past add a
	or while the journal is read-only: break read-only file system; del a; drop a; move a later; add a; mend
	remember a
	sweeps unchanged a
	either its namespace exists:
	or its namespace is gone: drop a
	or its namespace is gone, and the DEL has no path: drop a; names a
	del a; vanished a`)
}

// TestAddedAgainAfterAnInterruptedADD: the ADD on record was interrupted, and the container was added
// again at the same path past the journal. The DEL comes once that namespace is gone, with the result
// of the later ADD.
func TestAddedAgainAfterAnInterruptedADD(t *testing.T) {
	stories(t, `
	chain bridge, "ipMasq": true | firewall | portmap
	add a; past del a; cutoff a; drop a; move a a
	past add a; remember a; drop a
	del a; vanished a`)
}

// TestSameADDAtTheSamePath: the same, at the path of the first life, or in the namespace of an ADD that failed.
// Without a file of host-local's, only the interface there shows the second life, so its namespace must exist
// when its DEL comes. After a failed ADD, the runtime's result shows it.
func TestSameADDAtTheSamePath(t *testing.T) {
	stories(t, sameAgain+`
	either swept: add a; drop a; sweep; move a a
	or its ADD failed: script portmap '[ $CNI_COMMAND = DEL ] || exit 1'; fails add a; lose $dir/bin/portmap
	gone a; past add a; remember a
	sweeps unchanged a
	del a; vanished a`)
}

// TestStaleResult: the runtime still has the result of a container's first ADD when the container's
// second ADD is interrupted. The DEL of that one doesn't take the result for its own. bridge names its
// chain of rules after the container, so it may need a second DEL if both have rules.
func TestStaleResult(t *testing.T) {
	stories(t, `
	chain bridge, "ipMasq": true | firewall | portmap
	breaks bridge; add a; remember a; fails del a
	either the first is undone: works bridge; again a b; kill added 1 add b
	or the first is pending: again a b; drop a; kill added 1 add b; works bridge
	or the first is pending, the second past unwind: again a b; drop a; works bridge; forgets
		chain bridge, "ipMasq": true | firewall | portmap | p3; fails past add b 'duplicate allocation'
	unless past: was-killed
	drop b
	if pending: tries del b
	if past: calls DEL p3
	del b; vanished a; gone b; reserved 0`)
}

// TestTwoInterfacesInOneNetwork: bridge names its chain of rules after the container, so its DEL of one
// interface fails as long as the other one lives. As without unwind, the second try passes.
func TestTwoInterfacesInOneNetwork(t *testing.T) {
	stories(t, `
	chain bridge, "ipMasq": true | firewall
	add a; second a b; add b
	either by the runtime: tries del b; del b
	or by a sweep: fails del b; sweep
	or with the namespace gone: drop a; tries del b; del b
	gone b; closed $b; reserved 1; shell 'test $(iptables-save | grep -c " $a/32 .*ACCEPT") = 2'
	del a; clean`)
}

// TestDamagedCache: libcni's cache has files without content, cut off, or of something else, after a power
// loss. They prove nothing.
func TestDamagedCache(t *testing.T) {
	stories(t, `
	chain {"type": "bridge", "bridge": "$bridge", "isGateway": true,
		"ipam": {"type": "host-local", "subnet": "$ip0/29", "dataDir": "$data"}}
	crowd 5
	either empty: tear
	or cut off: tear '{"kind": "cniCacheV1", "containerId": "all0'
	or another attachment's: tear '{"kind": "cniCacheV1", "networkName": "other", "containerId": "b", "ifName": "lo", "netns": "/proc/self/ns/net", "result": {"cniVersion": "1.0.0"}}'
	reboot $all; reserved 5
	either STATUS: status
	or a sweep: sweep
	or the next ADD of a pod: sandbox all02 b; add b; sweep; reserved 1; del b
	reserved 0; entries 0`, acts{"tear": func(s *story, w []string) {
		for _, p := range s.pods {
			s.write(p.cacheFile(), fmt.Sprint(append(w, "")[0]))
		}
	}})
}

// TestPathOfAnotherProcess: the process that a container's path named is gone, and another process has its
// ID. Neither the journal nor libcni's cache has the container.
func TestPathOfAnotherProcess(t *testing.T) {
	stories(t, `
	chain bridge | p1
	past add a; drop a; lose $dir/cache/results/$network-a-eth0
	either the host's: host a
	or another container's: add b; remember b; process b; names a $inside
	del a
	if the host's: reserved 0
	unless the host's: reserved 1; unchanged b; del b`, acts{"host": func(s *story, w []string) {
		s.who(w[0]).NetNS = fmt.Sprintf("/proc/%d/ns/net", os.Getpid())
	}})
}

// TestOldGenerationIsSettledFirst: before the first delegate of the next ADD runs, unwind undoes
// what an earlier ADD of the container ID left, if the old namespace has no process any more.
func TestOldGenerationIsSettledFirst(t *testing.T) {
	stories(t, `
	chain p0 | p1
	either live, namespace gone: add a; forgets; again a b; drop a
	or live, namespace empty: add a; forgets; again a b
	or DEL pending: add a; plan p1 DEL fail; fails del a; forgets; again a b
	or ADD failed: plan p1 ADD fail-effect, p1 DEL fail; fails add a; forgets; again a b
	plan; add b
	if live: calls DEL p1, DEL p0, ADD p0, ADD p1
	unless live: calls DEL p1, ADD p0, ADD p1
	entry b live 2 1; locks 1
	del b`)
}

// TestOldGenerationMovesOn: if the rest of an earlier ADD of the container ID cannot be undone yet,
// the DEL of the next ADD undoes it, after its own, with the path of the old namespace, and keeps an address that both got.
func TestOldGenerationMovesOn(t *testing.T) {
	stories(t, `
	chain p0 | p1 | p2 | p3
	add a
	plan p1 DEL fail, p2 DEL fail; fails del a
	drop a; again a b
	plan p2 DEL fail; add b
	entry b live 5 2; pending b p0 p1 p2 p3 p2
	plan; forgets; del b
	shown b b b b a; calls DEL p3, DEL p2, DEL p1, DEL p0, DEL p2
	chain single | p1; add c; plan p1 DEL fail; fails del c; drop c; again c d; add d; plan p0 DEL fail, p1 DEL fail; fails del d; reserved 1; plan; del d`)
}

// TestAddOverLive: an ADD over an attachment in use is refused before any delegate runs.
func TestAddOverLive(t *testing.T) {
	stories(t, `
	chain bridge | p1 | p2 | p3
	let why in a network namespace with a running process
	add a; forgets
	either same namespace: names b $netns/a; let why in the same network namespace
	or process in the old namespace: process a
	or process in the old namespace, which has no name: process a
	unless same: again a b
	if same: as b a
	if no name: unpin a
	fails add b 'unwind: $network/a/eth0 is already attached ($why); delete it first'
	calls
	entry a live 4 1
	del a`)
}

// TestInterruptedAfterAnother: a container ID is added again without a DEL, and unwind is killed
// before it prints the new result. libcni's cache still has the earlier result, whose namespace
// exists: that is no ADD that the journal did not record, so the next ADD and a sweep undo what is
// left. A DEL of the earlier ADD may be pending.
func TestInterruptedAfterAnother(t *testing.T) {
	stories(t, `
	let more
	either no result: chain p0 | bridge
	or a result of its own: chain bridge | p0
	or no result, beside a pending DEL: chain p0, "ipam": $hostlocal | p1; let more , p1 DEL fail
	add a; again a b
	plan p0 ADD kill-parent-effect$more; killed add b; free b; plan; drop b
	either the next ADD: again b c; add c; del c
	or a sweep: sweep; gone b`)
}

// TestInterruptedOverUnknown: a pod was added past the journal, and still runs. unwind is killed in
// another ADD of the same container ID, in another namespace. A sweep keeps that record: its DELs go
// by the container ID, and would release what the pod has.
func TestInterruptedOverUnknown(t *testing.T) {
	stories(t, `
	chain p0 | bridge
	past add a; again a b
	plan p0 ADD kill-parent-effect; killed add b; free b; plan; drop b
	sweep; reserved 1
	drop a; del b; reserved 0`)
}

// TestPortOfNewGeneration: portmap's rules are keyed by the container ID. The retry of an old DEL
// must not remove the port of the container that has the ID now: neither in the ADD of a pod that
// would settle it, nor in that of one that has its old address, if it were dead.
func TestPortOfNewGeneration(t *testing.T) {
	stories(t, `
	chain static | portmap
	add a; breaks portmap; fails del a
	drop a; again a b; add b; works portmap
	sweep
	port $b; del b; clean`)
}

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
	either after a sweep: add a; drop a; sweep; gone a
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
	fails add a 'is already attached'; locks 0; unchanged a
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
