package plugin

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/containernetworking/cni/libcni"
)

// TestDELOfPodsFromBefore installs unwind on a node with pods. DELs through unwind release all they
// have, with their network namespace and without it.
func TestDELOfPodsFromBefore(t *testing.T) {
	stories(t, `
	chain masquerading bridge dual | {"type": "tuning", "mtu": 1400, "dataDir": "$dir/tuning"}
		| {"type": "bandwidth", "capabilities": {"bandwidth": true}} | portmap | firewall | p5
	limited a; past add a; remember a
	either its network namespace there:
	or its network namespace gone: drop a
	del a; vanished a
	del a`, acts{"limited": func(s *story, w []string) {
		s.who(w[0]).CapabilityArgs["bandwidth"] = map[string]any{"egressRate": 8000000, "egressBurst": 8000000}
	}})
}

// TestStaleOwnerIsNoRival: a pod gets an address that by the journal another one still has. The
// plain chain deleted that one, and its namespace exists, without the address. host-local's file names the
// new owner, so its DEL removes its rules.
func TestStaleOwnerIsNoRival(t *testing.T) {
	stories(t, `
	chain bridge | firewall
	add a
	lose $data/$network/$a; flush a
	lowest; add b; given b $a; entry a live; remember b
	del b; gone b; vanished b
	drop a; sweep`, flushing)
}

// TestLongContainerID: host-local's record of an owner whose ID is longer than any runtime's is still
// that owner's: its DEL is shown its own address, and takes its rule.
func TestLongContainerID(t *testing.T) {
	stories(t, `
	chain bridge | firewall
	either 4094: long 4094
	or 4095: long 4095
	or 20000: long 20000
	give add a CNI_CONTAINERID=$long; open $ip2
	give del a CNI_CONTAINERID=$long; closed $ip2; entries 0`, keepers)
}

// TestNewSandbox (Azure CNS #4350): a pool has one address, and a pod gets a new sandbox. It gets
// the address if the old sandbox is certainly gone. Otherwise the old one keeps all it has.
func TestNewSandbox(t *testing.T) {
	stories(t, `
	chain {"type": "bridge", "bridge": "$bridge", "isGateway": true, "ipam": {"type": "host-local",
		"dataDir": "$data", "ranges": [[{"subnet": "$subnet", "rangeStart": "$ip7", "rangeEnd": "$ip7"}]]}} | p1
	add a
	either dead, its namespace gone: drop a
	or dead, of an earlier boot: reboot a
	or alive, its namespace there:
	or alive, a process inside, no path: process a; unpin a
	or alive, held open, no path, no process: hold a; unpin a
	forgets; sandbox a b
	if dead: add b; calls DEL p1, ADD p1
	if alive: fails add b 'no IP addresses available'; calls; entry a live 2
	if held: end
	del b a`)
}

// A duplicate is an address of a living pod that host-local gives out once more, since it lost the
// file (Azure CNS #4210: the same address under another owner is an error, never adopted).

// TestDuplicateAddress: an ADD that gets the address of a living pod fails. That pod keeps all it
// has, and the other one leaves nothing. When the address is free, the other pod can have it.
func TestDuplicateAddress(t *testing.T) {
	stories(t, `
	chain bridge | firewall
	add a; forget $a
	fails add b 'plugin type="bridge" failed (add): duplicate address $a: already in use by $network/a/eth0'
	shell 'test -z "$(nsenter --net=$netns/b ip -o link show type veth)"'
	gone b; reserved 0; counters 'duplicate_addresses 1' 'rollbacks bridge complete 1'
	del b; open $a; entry a live; pings a
	del a
	lowest; add b; given b $a; pings b
	del b`)
}

// TestNoDuplicate: two pods have one address where that is no error. unwind counts an address that two networks
// give out on one bridge.
func TestNoDuplicate(t *testing.T) {
	stories(t, `
	let chain bridge | firewall
	either not on the other's interface any more:
	or another network over the same subnet:
	or another network on the same bridge: let chain {"type": "bridge", "bridge": "$bridge", "isGateway": true, "ipam": $hostlocal}
	or static: let chain p0, "address": "$ip7/24"
	or loopback: let chain loopback
	or link-local: let chain p0, "address": "fe80::7/64"
	chain $chain; add a
	if not on: flush a; forget $a
	if another network: network other o
	add b; given b $a
	if another network over: counters
	if another network on: counters 'duplicate_addresses 1'
	del a b; sweep`, flushing)
}

// flushing is a statement: an interface loses its addresses.
var flushing = acts{"flush": func(s *story, w []string) {
	run(s, "nsenter", "--net="+s.who(w[0]).NetNS, "ip", "address", "flush", "dev", "eth0")
}}

// TestFreedByPod: spiderpool frees what the pod has, whichever of its sandboxes a DEL names. The DEL of
// the pod's old sandbox failed, or passed before unwind was killed or lost the record. Its next sandbox
// lives or is being added, and no DEL of the old one frees its address: not that of a sweep, and not the
// runtime's second one. Once the next one is gone, nothing is pending.
func TestFreedByPod(t *testing.T) {
	stories(t, `
	by-pod; add a; held 1
	either it failed: breaks bridge; fails del a; sandbox a b; add b; works bridge
	or it failed, and the next is being added: breaks bridge; fails del a; sandbox a b
		plan p1 ADD hold; start add b; appears $dir/faulty/held/ADD.b.p1; works bridge
	or unwind was killed: kill undone 2 del a; was-killed; sandbox a b; add b
	or it passed: del a; sandbox a b; add b
	held 1
	either sweep: sweep
	or STATUS: status
	or GC: gc
	or the runtime's second DEL: del a
	held 1; entry b
	if being added: plan; lose $dir/faulty/held/ADD.b.p1; wait add b
	entry b live 2; del b; held 0; sweep; entries 0`, byPod)
}

// byPod are statements about a stand-in for spiderpool (testdata/standin/spiderpool.go).
var byPod = acts{
	// by-pod: the chain is a bridge with it, and p1
	"by-pod": func(s *story, _ []string) {
		s.vars["holds"] = filepath.Join(s.dir, "held")
		s.mkdir(s.vars["holds"])
		s.link("spiderpool", filepath.Join(s.path[2], "standin"))
		s.chain = []string{fmt.Sprintf(`{"type": "bridge", "bridge": %q, "dir": %q, "ipam": {"type": "spiderpool"}}`, s.bridge, s.vars["holds"]), "p1"}
	},
}

// podman is a statement: podman POD: adds it as podman does. That is no pod of Kubernetes. If it has static
// addresses and the first plugin of the list does not declare "ips", the plugin gets that capability in
// place of its own.
var podman = acts{"podman": func(s *story, w []string) {
	p := s.who(w[0])
	p.Args = [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAME", w[0]}}
	list := s.list(p, false)
	if first := list.Plugins[0]; p.CapabilityArgs["ips"] != nil && !first.Network.Capabilities["ips"] {
		var err error
		list.Plugins[0], err = libcni.InjectConf(first, map[string]any{"capabilities": map[string]bool{"ips": true}})
		s.must(err)
	}
	s.vars[w[0]] = address(s, p.mustAdd(list))
}}

// TestStaticAddressOfPodman: bridge, which declares no capability, gets the static addresses of podman's
// container, and the host port works. After its rules were flushed, podman reloads the network by a DEL and
// an ADD. The same list gives a pod of Kubernetes any address, as without unwind.
func TestStaticAddressOfPodman(t *testing.T) {
	stories(t, `
	either as unwindctl writes the entry: conf capabilities {"ips": true, "portMappings": true}
	or none are declared: conf capabilities
	chain masquerading bridge IPv4 | portmap
	capabilities a {"ips": ["$ip9"], "portMappings": [{"hostPort": 20999, "containerPort": 80, "protocol": "tcp"}]}
	podman a; given a $ip9
	if unwindctl: port $ip9; flush $ip9
	del a; podman a; given a $ip9
	if unwindctl: port $ip9
	del a; capabilities pod {"ips": ["$ip9"]}; add pod; shell 'test $pod != $ip9'; del pod`, hostPorts, podman)
}
