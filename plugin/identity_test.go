package plugin

import (
	"fmt"
	"os"
	"testing"
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
// No sweep and no late DEL of the first life takes anything of the second one. The DEL of the second
// one leaves nothing.
func TestSameADDAgain(t *testing.T) {
	stories(t, sameAgain+`
	add a
	either past unwind: past del a; drop a; move a later; past add a
	or past unwind, at the same path: past del a; drop a; move a a; past add a
	or past unwind, after a sweep: drop a; sweep; tombstone a; move a later; past add a
	or while the journal is read-only: break read-only file system; del a; drop a; move a later; add a; mend
	remember a
	sweeps unchanged a
	if after a sweep: names a $netns/a; cached a del a; names a $netns/later; unchanged a
	either its namespace exists:
	or its namespace is gone: drop a
	or its namespace is gone, and the DEL has no path: drop a; names a
	del a; vanished a`)
}

// TestSameADDAtTheSamePath: the same, at the path of the first life. Without a file of host-local's, only the
// interface there shows the second life, so its namespace must exist when its DEL comes.
func TestSameADDAtTheSamePath(t *testing.T) {
	stories(t, sameAgain+`
	add a; drop a; sweep; tombstone a
	move a a; past add a; remember a
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
	was-killed; drop b
	if pending: tries del b
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
