package plugin

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/facts"
)

// TestScratchNetNS removes the network namespace before the DEL of plugins that need a namespace to
// clean up. Without unwind, something remains after the DEL, which shows that there is something to
// remove. With unwind, the DEL succeeds, and nothing remains.
func TestScratchNetNS(t *testing.T) {
	type test struct {
		name  string
		chain []pluginConf
		fails bool // whether the DEL fails without unwind
	}
	const nftables = `"ipMasqBackend": "nftables"`
	tuning := object(`{"type": "tuning", "mtu": 1400, "mac": "02:00:00:00:00:09", "promisc": true,
		"allmulti": true, "txQLen": 700}`)
	tests := []test{
		{"bridge, IPv4", []pluginConf{masquerading("bridge", "IPv4")}, false},
		{"bridge, IPv6", []pluginConf{masquerading("bridge", "IPv6")}, false},
		{"bridge, dual", []pluginConf{masquerading("bridge", "dual")}, false},
		{"bridge, dual, nftables", []pluginConf{masquerading("bridge", "dual").with(nftables)}, false},
		{"ptp, IPv4", []pluginConf{masquerading("ptp", "IPv4")}, false},
		{"ptp, IPv6", []pluginConf{masquerading("ptp", "IPv6")}, false},
		{"ptp, dual", []pluginConf{masquerading("ptp", "dual")}, false},
		{"ptp, dual, nftables", []pluginConf{masquerading("ptp", "dual").with(nftables)}, false},
		{"sbr", []pluginConf{bridge, sbr}, true},
		{"tuning", []pluginConf{bridge, tuning}, false},
	}
	each2(t, tests, oneOf("plain", "unwind"), func(t *testing.T, tt test, by choice) {
		n := newNode(t)
		chain := slices.Clone(tt.chain)
		if tt.name == "tuning" {
			chain[1] = tuning.with(`"dataDir": "%s/tuning"`, n.dir)
		}
		n.chain(chain...)
		a := n.newPod("a")
		if by.is("plain") {
			a.addPast()
		} else {
			a.add()
		}
		a.remember()
		a.dropNetNS()
		a.awaitUnlinked()
		if by.is("plain") {
			if err := a.tryDelPast(); tt.fails {
				n.wantError(err)
			} else {
				must(n, err)
			}
			n.want(a.whole(a.seen.marks) != "", "the plain chain leaves nothing")
			return
		}
		a.del()
		a.wantVanished()
		n.wantAbsent(a.NetNS)
		n.wantClean()
	})
}

// awaitUnlinked waits until the host ends of the pod's interfaces are gone.
func (p *pod) awaitUnlinked() {
	p.Helper()
	there := func(link string) bool {
		_, err := netlink.LinkByName(link)
		return err == nil
	}
	eventually(p, "the host's ends of the interfaces are gone", func() bool {
		return !slices.ContainsFunc(p.seen.marks.links, there)
	})
}

// TestNetNSOfDEL: when the DEL comes, the pod's network namespace may be at its path, elsewhere, or
// gone. If it is gone, plugin p0 gets the path that the runtime sent. Otherwise, p0 gets a path to
// the namespace. If the namespace has no path, p0 gets the path of a descriptor that unwind holds.
// In all cases, nothing of the pod remains, and other containers keep their interfaces.
func TestNetNSOfDEL(t *testing.T) {
	places := oneOf(
		"named by the runtime",
		"not named",
		"gone",
		"gone and not named",
		"gone, a file at its path",
		"gone, another at its path",
		"at a path that the runtime names",
		"at no path, a process inside",
		"at no path, a process inside, not named",
	)
	each1(t, places, func(t *testing.T, place choice) {
		n := newNode(t)
		n.chain(masquerading("bridge", "dual"), p0)
		a := n.add("a")
		a.remember()
		const held = "held" // a descriptor that unwind holds open
		own := a.NetNS      // a path to the pod's own namespace, or ""
		shown := a.NetNS    // the CNI_NETNS that p0 gets
		switch {
		case place.is("not named"):
			a.NetNS = ""
		case place.is("gone"):
			a.dropNetNS()
			own = ""
		case place.is("gone and not named"):
			a.dropNetNS()
			a.NetNS = ""
			own, shown = "", ""
		case place.is("gone, a file at its path"):
			a.dropNetNS()
			n.write(a.NetNS, "")
			own = ""
		case place.is("gone, another at its path"):
			a.dropNetNS()
			n.makeOther("a")
			own = ""
		case place.is("at a path that the runtime names"):
			path := a.bindNetNS("bound")
			a.unpin()
			a.NetNS = path
			own, shown = path, path
		case place.is("at no path, a process inside"):
			own = netnsOf(a.processInside())
			a.unpin()
			shown = held
		case place.is("at no path, a process inside, not named"):
			own = netnsOf(a.processInside())
			a.unpin()
			a.NetNS = ""
			shown = held
		}
		n.forgetCalls()
		a.del()
		got := n.callLog()[0].NetNS
		if matched, err := path.Match("/proc/[1-9]*/fd/[1-9]*", got); err == nil && matched {
			got = held
		}
		n.want(got == shown, "shown %q, not %q", got, shown)
		a.NetNS = own
		a.wantVanished()
		n.wantOthersLinked()
		n.wantClean()
	})
}

// TestDELNamesHostNetNS: a DEL's CNI_NETNS leads to the wrong namespace. It leads either to the
// host's own, because the process ID in the path was reused, or to another pod's, because the path
// was reused. The DEL succeeds, and no plugin gets that path.
func TestDELNamesHostNetNS(t *testing.T) {
	befores := oneOf(
		"added",
		"swept",
		"refused",
		"never added",
		"another pod is there",
		"swept, another pod is there with its address",
	)
	each1(t, befores, func(t *testing.T, before choice) {
		n := newNode(t)
		n.chain(bridge, p1)
		wrong := fmt.Sprintf("/proc/%d/ns/net", os.Getpid()) // the DEL's CNI_NETNS
		a := n.newPod("a")
		recordWrong := func() {
			a.edit(func(e *journal.Record) { e.Added.NetNS.Path = wrong })
		}
		var b *pod
		switch {
		case before.is("added"):
			a.add()
			a.dropNetNS()
			recordWrong()
		case before.is("swept"):
			a.add()
			recordWrong()
			a.dropNetNS()
			n.sweep()
			a.wantGone()
		case before.is("refused"):
			a.NetNS = wrong
			n.wantCode(a.tryAdd(), 8)
		case before.is("another pod is there"):
			a.add()
			a.dropNetNS()
			b = n.newPod("b")
			b.takePath(a)
			b.add()
			wrong = a.NetNS
		case before.is("swept, another pod is there with its address"):
			a.add()
			a.dropNetNS()
			n.sweep()
			a.wantGone()
			n.assignLowest()
			b = n.newPod("b")
			b.takePath(a)
			b.add()
			b.wantAddress(a.address)
			wrong = a.NetNS
		}
		n.forgetCalls()
		a.NetNS = wrong
		a.del()
		a.del()
		for _, l := range n.callLog() {
			n.want(l.NetNS != wrong, "a delegate was shown %s", l.NetNS)
		}
		n.wantCalls("DEL p1", "DEL p1")
		if b != nil {
			b.del()
		}
		n.wantClean()
	})
}

// TestDELNamesAnother: a DEL's path leads to a namespace that is in no record. unwind undoes the
// recorded ADD in that ADD's own namespace. If the path is in no record either, the DEL may be for
// an unrecorded ADD. unwind then also runs the plugins' DELs with that path, as a runtime does
// without unwind.
func TestDELNamesAnother(t *testing.T) {
	places := oneOf("it is elsewhere", "it is at the path of its ADD")
	each1(t, places, func(t *testing.T, where choice) {
		n := newNode(t)
		n.chain(masquerading("bridge", "dual"), p0)
		a := n.add("a")
		a.remember()
		own := a.NetNS
		if where.is("it is elsewhere") {
			a.bindNetNS("bound")
			a.NetNS = n.makeOther("x")
		} else {
			own = netnsOf(a.processInside())
			a.unpin()
			n.makeOther("a")
		}
		n.forgetCalls()
		a.del()
		if where.is("it is elsewhere") {
			n.wantCalls("DEL p0", "DEL p0")
		} else {
			n.wantCalls("DEL p0")
		}
		a.NetNS = own
		a.wantVanished()
		n.wantClean()
	})
}

// TestNamespaceOutOfReach: the pod's namespace is not at its path and has no process, but it is
// mounted elsewhere. bridge gets that mount's path. Without a path, bridge's nat chain would stay.
func TestNamespaceOutOfReach(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.chain(bridge.masq())
	a := n.add("a")
	a.remember()
	a.bindNetNS("pin")
	a.unpin()
	a.del()
	a.wantVanished()
	n.wantRecords(0)
}

// bindNetNS also mounts the pod's network namespace at another path, and returns that path.
func (p *pod) bindNetNS(name string) (path string) {
	p.Helper()
	return p.mountNetNS(name, unix.MS_BIND)
}

// mountNetNS bind-mounts the pod's network namespace at another path, or moves its mount there,
// depending on flags.
func (p *pod) mountNetNS(name string, flags uintptr) (path string) {
	p.Helper()
	path = filepath.Join(p.dir, name)
	p.write(path, "")
	p.mount(p.NetNS, path, "", flags, "")
	return path
}

// makeOther creates the namespace of another container, with an interface eth0, and returns its
// path.
func (n *node) makeOther(name string) (path string) {
	n.Helper()
	path = n.netns(name)
	run(n, "nsenter", "--net="+path, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "peer0")
	return path
}

// wantOthersLinked checks that other containers, if there are any, still have their eth0.
func (n *node) wantOthersLinked() {
	n.Helper()
	for _, name := range n.names(filepath.Join(n.dir, "netns")) {
		path := filepath.Join(n.dir, "netns", name)
		if seen, err := facts.InterfaceAt(path, ""); err == nil && seen.Netns.Known() {
			links := n.links(path)
			n.want(slices.Contains(links, "peer0") == slices.Contains(links, "eth0"), "%v", links)
		}
	}
}

// addMacvlan adds a pod with a macvlan interface, which has no host end.
func (n *node) addMacvlan() *pod {
	n.Helper()
	n.chain(object(`{"type": "macvlan", "master": %q, "ipam": %s}`, n.hostVeth("IPv4"), n.hostLocal(n.subnet)))
	return n.add("a")
}

// wantLinkedAt checks that a path leads to the given namespace, which has the interface eth0.
func (n *node) wantLinkedAt(path string, own journal.NetNS) {
	n.Helper()
	seen, err := facts.InterfaceAt(path, "")
	n.want(err == nil && seen.Netns.Same(own) && slices.Contains(n.links(path), "eth0"), "%+v (%v)", seen, err)
}

func (n *node) wantUnlinkedAt(path string) {
	n.Helper()
	n.want(!slices.Contains(n.links(path), "eth0"), "%q", n.links(path))
}

// TestMountedElsewhere: the namespace of a live pod is mounted at another path instead of its own.
// The pod has a macvlan interface, so no host end shows that the pod is live. unwind keeps the
// attachment while the namespace is mounted anywhere, and runs the DEL in that namespace.
func TestMountedElsewhere(t *testing.T) {
	mounts := oneOf(
		"the mount is moved",
		"bound a second time",
		"bound a second time, another one at its path",
		"below another mount",
	)
	each1(t, mounts, func(t *testing.T, mount choice) {
		n := newNode(t)
		a := n.addMacvlan()
		seen, err := facts.InterfaceAt(a.NetNS, "")
		must(n, err)
		own := seen.Netns
		var path string
		switch {
		case mount.is("the mount is moved"):
			path = a.mountNetNS("moved", unix.MS_MOVE)
		case mount.is("bound a second time"):
			path = a.bindNetNS(`a b"c\d`)
			a.unpin()
		case mount.is("bound a second time, another one at its path"):
			path = a.bindNetNS("bound")
			a.unpin()
			n.makeOther("a")
		case mount.is("below another mount"):
			path = a.bindNetNS("below")
			a.unpin()
			n.mount("/dev/null", path, "", unix.MS_BIND, "")
		}
		n.status()
		n.sweep()
		n.status()
		n.sweep()
		a.wantRecord(journal.Live, 1)
		n.wantReserved(1)
		if mount.is("below another mount") {
			must(n, unix.Unmount(path, unix.MNT_DETACH))
		}
		n.wantLinkedAt(path, own)
		a.del()
		n.wantUnlinkedAt(path)
		n.wantOthersLinked()
		n.wantClean()
	})
}

// TestCoveredPod: another mount covers the directory of the network namespaces. For example, the
// first `ip netns add` on a node bind-mounts that directory over itself. unwind keeps the pod whose
// namespace is covered, because nothing proves that the pod is dead.
func TestCoveredPod(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := n.addMacvlan()
	seen, err := facts.InterfaceAt(a.NetNS, "")
	must(n, err)
	dir := filepath.Join(n.dir, "netns")
	n.mount(dir, dir, "", unix.MS_BIND, "")
	n.status()
	for _, f := range n.sweep() {
		n.want(f.Verdict == decide.Unknown, "%s: %s (%s)", f.Key, f.Verdict, f.Reason)
	}
	a.wantRecord(journal.Live, 1)
	n.wantReserved(1)
	must(n, unix.Unmount(dir, unix.MNT_DETACH))
	n.wantLinkedAt(a.NetNS, seen.Netns)
	a.del()
	n.wantUnlinkedAt(a.NetNS)
	n.wantClean()
}

// The stand-ins for providers' plugins (testdata/standin) store each address that they have
// assigned in a file of its own.

// heldDir is the directory with the files of the stand-ins.
func (n *node) heldDir() string { return filepath.Join(n.dir, "held") }

// wantHeld checks the number of addresses that the stand-ins have assigned and not released.
func (n *node) wantHeld(count int) {
	n.Helper()
	n.wantCount("held", len(n.names(n.heldDir())), count)
}

// standIn installs a provider plugin's stand-in. uninstall removes it, so that its DELs fail.
func (n *node) standIn(plugin string) (uninstall func()) {
	n.Helper()
	n.link(plugin, filepath.Join(n.path[2], "standin"))
	return func() { must(n, os.Remove(filepath.Join(n.path[0], plugin))) }
}

// TestShownToProviders: the DELs of kube-ovn and sriov release the address, even if the container's
// namespace is gone or has another ADD's interface. The DELs of terway and ovn-kubernetes fail if
// the namespace is gone. All four behave the same with unwind and without it.
func TestShownToProviders(t *testing.T) {
	plugins := []string{"terway", "kube-ovn", "sriov", "ovn-k8s-cni-overlay"}
	befores := oneOf(
		"gone, and the runtime names it",
		"gone after a DEL that failed",
		"with an interface of another before an ADD that fails",
		"with the interface of an earlier ADD",
	)
	choices := oneOf("plain", "unwind")
	each3(t, choices, plugins, befores, func(t *testing.T, by choice, plugin string, before choice) {
		needsNetNS := plugin == "terway" || plugin == "ovn-k8s-cni-overlay"
		if needsNetNS && before.has("with") {
			t.Skip("the real plugin's ADD fails if the namespace has the interface")
		}
		n := newNode(t)
		n.mkdir(n.heldDir())
		provider := object(`{"type": %q, "dir": %q}`, plugin, n.heldDir())
		n.chain(provider)
		uninstall := n.standIn(plugin)
		a := n.newPod("a")
		tryAdd, tryDel := a.tryAdd, a.tryDel
		if by.is("plain") {
			tryAdd, tryDel = a.tryAddPast, a.tryDelPast
		}
		occupy := func() { // creates eth0, with its peer in another namespace
			run(n, "nsenter", "--net="+a.NetNS, "ip", "link", "add", "eth0", "type", "veth",
				"peer", "name", "far0", "netns", n.netns("far"))
		}
		switch {
		case before.is("gone, and the runtime names it"):
			must(n, tryAdd())
			a.dropNetNS()
		case before.is("gone after a DEL that failed"):
			must(n, tryAdd())
			uninstall()
			n.wantError(tryDel())
			a.dropNetNS()
			n.standIn(plugin)
		case before.is("with an interface of another before an ADD that fails"):
			n.chain(provider, p1.failing("ADD"))
			occupy()
			n.wantError(tryAdd())
		case before.is("with the interface of an earlier ADD"):
			must(n, tryAdd())
			uninstall()
			n.wantError(tryDel())
			n.standIn(plugin)
			occupy()
			must(n, tryAdd())
		}
		if needsNetNS { // see LIMITS, "Plugins that need the namespace"
			n.wantError(tryDel())
			n.wantHeld(1)
			return
		}
		must(n, tryDel())
		n.wantHeld(0)
		if by.is("plain") {
			return
		}
		if before.has("interface of another") {
			n.want(slices.Contains(n.links(a.NetNS), "eth0"), "another's interface is gone")
		}
		n.wantClean()
	})
}

// TestGoesWithNetNS: ovn-kubernetes' DEL fails once the namespace is gone, for example after a
// reboot. A sweep then skips this DEL, and runs the other plugin's, so that no record stays.
func TestGoesWithNetNS(t *testing.T) {
	whens := oneOf("the runtime forgot the pod", "the runtime's DEL failed", "a reboot")
	each1(t, whens, func(t *testing.T, when choice) {
		n := newNode(t)
		n.mkdir(n.heldDir())
		n.chain(object(`{"type": "ovn-k8s-cni-overlay", "dir": %q}`, n.heldDir()), p1)
		n.standIn("ovn-k8s-cni-overlay")
		a := n.add("a")
		a.dropNetNS()
		n.forgetCalls()
		switch {
		case when.is("the runtime's DEL failed"):
			n.wantError(a.tryDel())
		case when.is("a reboot"):
			a.ofEarlierBoot()
		}
		n.sweep()
		n.wantRecords(0)
		n.wantCalls("DEL p1")
	})
}

// TestNextPodAtSamePath: while a sweep, or the ADD of A's next sandbox, runs pod A's DELs, the
// runtime replaces A's network namespace with pod B's at the same path. unwind keeps A's namespace
// open, and gives it to bridge's DEL, which then removes A's interface, not B's. p0's DEL gets no
// CNI_NETNS, because the path now leads to B's namespace.
func TestNextPodAtSamePath(t *testing.T) {
	each1(t, []string{"sweep", "status", "gc", "ADD"}, func(t *testing.T, by string) {
		n := newNode(t)
		n.chain(bridge, p0, p2)
		a := n.newPod("a")
		n.mustKill("added", 1, a.tryAdd)
		n.wantCount("ports", len(n.ports()), 1)
		n.plan(p2.DEL("hold"))
		var sweeping *underWay
		var c *pod
		switch by {
		case "sweep":
			sweeping = n.beginSweep()
		case "status":
			sweeping = n.beginStatus()
		case "gc":
			sweeping = n.beginGC()
		case "ADD":
			c = a.nextSandbox("c")
			sweeping = c.beginAdd()
		}
		n.awaitHeld("DEL", "a", "p2")
		a.unpin()
		b := n.newPod("b")
		b.takePath(a)
		b.add()
		b.remember()
		n.wantCount("ports", len(n.ports()), 2)
		n.plan()
		n.letGo("DEL", "a", "p2")
		sweeping.passes()
		if c != nil {
			c.del()
		}
		a.wantGone()
		i := slices.IndexFunc(n.callLog(), func(l logged) bool {
			return l.Command == "DEL" && l.ContainerID == "a" && l.Instance == "p0"
		})
		n.want(i >= 0 && n.callLog()[i].NetNS == "", "shown %q", n.callLog()[max(0, i)].NetNS)
		n.wantCount("ports", len(n.ports()), 1)
		n.wantReserved(1)
		b.wantUnchanged()
		b.wantPing()
		b.del()
		n.wantClean()
	})
}
