package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"cni-unwind/journal"
)

// TestDELOfPodsFromBefore installs unwind on a node with a pod. The pod's DEL through unwind
// releases all its resources, whether or not its network namespace still exists.
func TestDELOfPodsFromBefore(t *testing.T) {
	places := oneOf("its network namespace there", "its network namespace gone")
	each1(t, places, func(t *testing.T, netns choice) {
		n := newNode(t)
		n.chain(
			masquerading("bridge", "dual"),
			object(`{"type": "tuning", "mtu": 1400, "dataDir": %q}`, n.tuningDir()),
			object(`{"type": "bandwidth", "capabilities": {"bandwidth": true}}`),
			portmap, firewall, p5)
		a := n.newPod("a")
		a.CapabilityArgs["bandwidth"] = map[string]any{"egressRate": 8000000, "egressBurst": 8000000}
		a.addPast()
		a.remember()
		if netns.is("its network namespace gone") {
			a.dropNetNS()
		}
		a.del()
		a.wantVanished()
		a.del()
		n.wantClean()
	})
}

// TestStaleOwnerIsNoRival: pod b gets an address that, according to the journal, pod a still has.
// Pod a was deleted without unwind; its namespace exists, but its interface no longer has the
// address. host-local's file names b as the owner, so b's DEL removes b's rules.
func TestStaleOwnerIsNoRival(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.chain(bridge, firewall)
	a := n.add("a")
	n.remove(n.poolFile(a.address))
	a.flushAddresses()
	n.assignLowest()
	b := n.add("b")
	b.wantAddress(a.address)
	a.wantRecord(journal.Live)
	b.remember()
	b.del()
	b.wantGone()
	b.wantVanished()
	a.dropNetNS()
	n.sweep()
	n.wantClean()
}

// TestRulesOfNextOwner: a pod is gone but not released yet, and a new pod already has its address.
// There are three reasons: at a reboot, the network got a new name, dataDir or IPAM plugin; another
// network has the same subnet; or unwind was off. A sweep undoes the old pod's ADD, but firewall's
// rules for the new pod stay.
func TestRulesOfNextOwner(t *testing.T) {
	elsewhere := oneOf("a new name", "a new dataDir", "a new IPAM plugin", "another network", "off")
	each1(t, elsewhere, func(t *testing.T, from choice) {
		n := newNode(t)
		at := func(dir string) pluginConf {
			return object(`{"type": "bridge", "bridge": %q, "isGateway": true,
				"ipam": {"type": "host-local", "subnet": %q, "dataDir": %q}}`, n.bridge, n.subnet, filepath.Join(n.dir, dir))
		}
		assigned := object(`{"type": "bridge", "bridge": %q, "isGateway": true,
			"ipam": {"type": "static", "addresses": [{"address": "%s"}]}}`, n.bridge, n.prefix(4, 2))
		n.chain(at("before"), firewall)
		if from.is("off") {
			n.chain(assigned, firewall)
		}
		a, next := n.add("a"), n
		a.dropNetNS()
		if !from.is("another network") && !from.is("off") {
			a.ofEarlierBoot()
		}
		switch {
		case from.is("a new name") || from.is("another network"):
			next = n.newNetworkOn("", "next")
			next.bridge = n.bridge
			next.chain(at("before"), firewall)
		case from.is("a new dataDir"):
			n.chain(at("after"), firewall)
		case from.is("a new IPAM plugin"):
			n.chain(assigned, firewall)
		}
		var b *pod
		if from.is("off") {
			a.delPast()
			b = n.addPast("b")
		} else {
			b = next.add("b")
		}
		b.wantAddress(a.address)
		n.wantOpen(b.address)
		next.status()
		a.wantGone()
		n.wantOpen(b.address)
		b.del()
		n.wantClosed(b.address)
		n.wantClean()
	})
}

// TestUnreadableInSweep: as in TestRulesOfNextOwner, but the journal becomes unreadable while a sweep
// undoes the old pod's ADD. The rules of the new owner stay.
func TestUnreadableInSweep(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	faulty := filepath.Join(n.path[2], "faulty")
	mesh := object(`{"type": "mesh", "dir": %q, "instance": "mesh"}`, n.faultyDir())
	n.link("mesh", faulty)
	n.chain(bridge, firewall, mesh)
	a := n.add("a")
	a.dropNetNS()
	next := n.newNetworkOn("z", "next")
	next.chain(bridge, firewall)
	b := next.add("b")
	b.wantAddress(a.address)
	n.remove(filepath.Join(n.path[0], "mesh"))
	n.script("mesh", fmt.Sprintf("chmod 770 %s; exec %s", n.stateDir, faulty))
	_ = next.tryStatus()
	n.wantOpen(b.address)
	must(t, os.Chmod(n.stateDir, 0o700))
	n.remove(filepath.Join(n.path[0], "mesh"))
	n.link("mesh", faulty)
	n.until(1, func() { n.sweep() })
	b.del()
	n.wantClean()
}

// TestSameSubnet: two networks have the same subnet, and each address belongs to a pod of each
// network. The first network uses firewall; the second may also use it. A sweep finds the first
// network's pods dead. It removes the rules for their addresses, unless the second network uses
// firewall and its pods are alive.
func TestSameSubnet(t *testing.T) {
	each2(t, oneOf("both", "the first"), oneOf("all", "the first's"), func(t *testing.T, walled, dead choice) {
		n := newNode(t)
		next := n.newNetworkOn("z", "next")
		n.chain(bridge, firewall)
		next.chain(bridge)
		if walled.is("both") {
			next.chain(bridge, firewall)
		}
		var all []*pod
		for i := range 4 {
			a, b := n.add(fmt.Sprint("a", i)), next.add(fmt.Sprint("b", i))
			b.wantAddress(a.address)
			if a.dropNetNS(); dead.is("all") {
				b.dropNetNS()
			}
			all = append(all, b)
		}
		n.status()
		for _, b := range all {
			n.want(n.open(b.address) == (walled.is("both") && dead.is("the first's")), "%s: its rules are wrong", b.address)
		}
		for _, b := range all {
			b.del()
		}
		n.wantClean()
	})
}

// TestLongContainerID: unwind recognizes host-local's file even if the owner's container ID is
// longer than any runtime's. The owner's DEL gets the owner's address, and removes the rule for it.
func TestLongContainerID(t *testing.T) {
	each1(t, []int{4094, 4095, 20000}, func(t *testing.T, length int) {
		n := newNode(t)
		n.chain(bridge, firewall)
		long := given{env: map[string]string{"CNI_CONTAINERID": strings.Repeat("a", length)}}
		a := n.newPod("a")
		a.give("ADD", long)
		n.wantOpen(n.ip(2))
		a.give("DEL", long)
		n.wantClosed(n.ip(2))
		n.wantRecords(0)
		n.wantClean()
	})
}

// TestNewSandbox (Azure CNS #4350): a pool has only one address, and the pod that has it gets a new
// sandbox. If the old sandbox is certainly dead, the new sandbox gets the address. Otherwise the
// old sandbox keeps its address and all other resources.
func TestNewSandbox(t *testing.T) {
	olds := oneOf(
		"dead, its namespace gone",
		"dead, of an earlier boot",
		"alive, its namespace there",
		"alive, a process inside, no path",
		"alive, held open, no path, no process",
	)
	each1(t, olds, func(t *testing.T, old choice) {
		n := newNode(t)
		n.chain(object(`{"type": "bridge", "bridge": %q, "isGateway": true, "ipam": {"type": "host-local",
			"dataDir": %q, "ranges": [[{"subnet": %q, "rangeStart": %[4]q, "rangeEnd": %[4]q}]]}}`,
			n.bridge, n.dataDir(), n.subnet, n.ip(7)), p1)
		a := n.add("a")
		end := func() {}
		switch {
		case old.is("dead, its namespace gone"):
			a.dropNetNS()
		case old.is("dead, of an earlier boot"):
			a.reboot()
		case old.is("alive, a process inside, no path"):
			a.processInside()
			a.unpin()
		case old.is("alive, held open, no path, no process"):
			end = a.hold()
			a.unpin()
		}
		n.forgetCalls()
		b := a.nextSandbox("b")
		if old.has("dead") {
			b.add()
			n.wantCalls("DEL p1", "ADD p1")
		} else {
			n.wantError(b.tryAdd(), "no IP addresses available")
			n.wantCalls()
			a.wantRecord(journal.Live, 2)
		}
		end()
		b.del()
		a.del()
		n.wantClean()
	})
}

// TestNewSandboxAfterSeveral: the runtime sends only one DEL for each of three dead sandboxes, as
// CRI-O does, and p1's DEL fails. unwind doesn't free a sandbox's address until p1's DEL has been
// tried twice. The pod's next ADD tries it again for all three sandboxes, not only for the last
// one, so none of them keeps its address.
func TestNewSandboxAfterSeveral(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.budget("Release=60s Step=30s") // as on a node, Release is twice Step
	n.chain(bridge, p1)
	a := n.add("a")
	old := []*pod{a, a.nextSandbox("b"), a.nextSandbox("c")}
	old[1].add()
	old[2].add()
	n.plan(p1.DEL("fail"))
	for _, p := range old {
		n.wantError(p.tryDel())
		p.dropNetNS()
	}
	n.wantReserved(3)
	d := a.nextSandbox("d")
	d.add()
	n.wantReserved(1)
	n.plan()
	d.del()
	n.sweep()
	n.wantClean()
}

// A duplicate is a live pod's address that host-local assigns to another pod, because host-local's
// file for the address was lost. unwind reports an error instead of giving the address a new owner
// (Azure CNS #4210).

// TestDuplicateAddress: an ADD that gets the address of a live pod fails, and leaves nothing. The
// live pod keeps all its resources. After the live pod's DEL, the other pod can get the address.
func TestDuplicateAddress(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.chain(bridge, firewall)
	a := n.add("a")
	n.loseReservation(a.address)
	b := n.newPod("b")
	n.wantError(b.tryAdd(), fmt.Sprintf(
		`plugin type="bridge" failed (add): duplicate address %s: already in use by %s/a/eth0`,
		a.address, n.network))
	n.shell(`test -z "$(nsenter --net=%s ip -o link show type veth)"`, b.NetNS)
	b.wantGone()
	n.wantReserved(0)
	n.wantCounters("duplicate_addresses 1", "rollbacks bridge complete 1")
	b.del()
	n.wantOpen(a.address)
	a.wantRecord(journal.Live)
	a.wantPing()
	a.del()
	n.assignLowest()
	b.add()
	b.wantAddress(a.address)
	b.wantPing()
	b.del()
	n.wantClean()
}

// TestNoDuplicate: in these cases, two pods may have the same address. If two networks assign the
// address on the same bridge, unwind counts a duplicate, but the ADD succeeds.
func TestNoDuplicate(t *testing.T) {
	cases := oneOf(
		"not on the other's interface any more",
		"another network over the same subnet",
		"another network on the same bridge",
		"static",
		"loopback",
		"link-local",
	)
	each1(t, cases, func(t *testing.T, which choice) {
		n := newNode(t)
		switch {
		case which.is("another network on the same bridge"):
			n.chain(object(`{"type": "bridge", "bridge": %q, "isGateway": true, "ipam": %s}`,
				n.bridge, n.hostLocal(n.subnet)))
		case which.is("static"):
			n.chain(p0.address(n.ip(7) + "/24"))
		case which.is("loopback"):
			n.chain(loopback)
		case which.is("link-local"):
			n.chain(p0.address("fe80::7/64"))
		default:
			n.chain(bridge, firewall)
		}
		a := n.add("a")
		if which.is("not on the other's interface any more") {
			a.flushAddresses()
			n.loseReservation(a.address)
		}
		of := n
		if which.has("another network") {
			of = n.newNetworkOn("o", "other")
		}
		b := of.add("b")
		b.wantAddress(a.address)
		switch {
		case which.is("another network over the same subnet"):
			of.wantCounters()
		case which.is("another network on the same bridge"):
			of.wantCounters("duplicate_addresses 1")
		}
		a.del()
		b.del()
		n.sweep()
		n.wantClean()
	})
}

// flushAddresses removes the addresses of the pod's interface.
func (p *pod) flushAddresses() {
	p.Helper()
	run(p, "nsenter", "--net="+p.NetNS, "ip", "address", "flush", "dev", "eth0")
}

// TestFreedByPod: spiderpool's DEL releases the pod's address, whichever sandbox the DEL is for.
// The first DEL of the pod's old sandbox failed, succeeded, or was interrupted because unwind was
// killed. While the pod's next sandbox is live or being added, no DEL of the old sandbox may
// release the address: neither a DEL in a sweep nor the runtime's second DEL. After the next
// sandbox's DEL, a sweep leaves nothing pending.
func TestFreedByPod(t *testing.T) {
	dels := oneOf(
		"it failed",
		"it failed, and the next is being added",
		"unwind was killed",
		"it passed",
	)
	lates := oneOf("sweep", "STATUS", "GC", "the runtime's second DEL")
	each2(t, dels, lates, func(t *testing.T, del, late choice) {
		n := newNode(t)
		n.mkdir(n.heldDir())
		n.standIn("spiderpool")
		n.chain(object(`{"type": "bridge", "bridge": %q, "dir": %q, "ipam": {"type": "spiderpool"}}`,
			n.bridge, n.heldDir()), p1)
		a := n.add("a")
		n.wantHeld(1)
		var b *pod
		var add *underWay
		switch {
		case del.is("it failed"):
			repairBridge := n.breakPlugin("bridge")
			n.wantError(a.tryDel())
			b = a.nextSandbox("b")
			b.add()
			repairBridge()
		case del.is("it failed, and the next is being added"):
			repairBridge := n.breakPlugin("bridge")
			n.wantError(a.tryDel())
			b = a.nextSandbox("b")
			n.plan(p1.ADD("hold"))
			add = b.beginAdd()
			n.awaitHeld("ADD", "b", "p1")
			repairBridge()
		case del.is("unwind was killed"):
			n.mustKill("undone", 2, a.tryDel)
			b = a.nextSandbox("b")
			b.add()
		case del.is("it passed"):
			a.del()
			b = a.nextSandbox("b")
			b.add()
		}
		n.wantHeld(1)
		switch {
		case late.is("sweep"):
			n.sweep()
		case late.is("STATUS"):
			n.status()
		case late.is("GC"):
			n.gc()
		case late.is("the runtime's second DEL"):
			a.del()
		}
		n.wantHeld(1)
		b.wantKept()
		if add != nil {
			n.plan()
			n.letGo("ADD", "b", "p1")
			add.passes()
		}
		b.wantRecord(journal.Live, 2)
		b.del()
		n.wantHeld(0)
		n.sweep()
		n.wantRecords(0)
		n.wantClean()
	})
}

// addByPodman adds the pod as podman does, without a Kubernetes namespace in CNI_ARGS. If the pod
// has static addresses, and the first plugin of the list doesn't declare the capability "ips",
// podman replaces that plugin's capabilities with "ips".
func (p *pod) addByPodman() {
	p.Helper()
	p.Args = [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAME", p.ContainerID}}
	list := p.wrapped()
	if first := list.Plugins[0]; p.CapabilityArgs["ips"] != nil && !first.Network.Capabilities["ips"] {
		var err error
		list.Plugins[0], err = libcni.InjectConf(first, map[string]any{"capabilities": map[string]bool{"ips": true}})
		must(p, err)
	}
	must(p, p.addBy(list))
}

// TestStaticAddressOfPodman: a podman container gets its static address from bridge, although
// bridge declares no capability. If unwind's entry declares portMappings, the host port works, too.
// After the port's rules were flushed, podman reloads the network with a DEL and an ADD. As without
// unwind, a Kubernetes pod with the same conflist does not get its static address.
func TestStaticAddressOfPodman(t *testing.T) {
	entries := oneOf("as unwindctl writes the entry", "none are declared")
	each1(t, entries, func(t *testing.T, entry choice) {
		n := newNode(t)
		portWorks := entry.is("as unwindctl writes the entry")
		n.conf["capabilities"] = nil
		if portWorks {
			n.conf["capabilities"] = map[string]bool{"ips": true, "portMappings": true}
		}
		n.chain(masquerading("bridge", "IPv4"), portmap)
		static := n.ip(9)
		a := n.newPod("a")
		a.CapabilityArgs = keys{"ips": []string{static},
			"portMappings": []keys{{"hostPort": 20999, "containerPort": 80, "protocol": "tcp"}}}
		a.addByPodman()
		a.wantAddress(static)
		if portWorks {
			n.wantHostPorts(static, 1)
			n.emptyHostPort(static)
		}
		a.del()
		a.addByPodman()
		a.wantAddress(static)
		if portWorks {
			n.wantHostPorts(static, 1)
		}
		a.del()
		kubernetes := n.newPod("pod")
		kubernetes.CapabilityArgs = keys{"ips": []string{static}}
		kubernetes.add()
		n.want(kubernetes.address != static, "it has the static address")
		kubernetes.del()
		n.wantClean()
	})
}
