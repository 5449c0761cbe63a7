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

// TestScratchNetNS removes the network namespace before the DEL of plugins that need one to clean
// up. The plain chain leaves something, which shows that there is something to remove. unwind
// leaves nothing, and succeeds.
func TestScratchNetNS(t *testing.T) {
	type test struct {
		name  string
		chain []pluginConf
		fails bool // the DEL of the plain chain
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

// awaitUnlinked waits until the host's ends of the pod's interfaces are gone.
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

// TestNetNSOfDEL: a pod's network namespace may be anywhere when its DEL comes. Delegates are shown
// the pod's own if it can be found, by a descriptor of unwind's where no path leads to it, never
// another one, and nothing is left. If it is gone, they are shown what the runtime names.
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
		const held = "held" // a descriptor of unwind's
		own := a.NetNS      // a path of the pod's own namespace, or ""
		shown := a.NetNS    // what the delegates see
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

// TestDELNamesHostNetNS: a DEL's CNI_NETNS is the host's own network namespace, or another pod's,
// since its path is that of a process that is the host's by now, or was used again. A DEL that has
// undone everything passes. No delegate is shown it.
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
		wrong := fmt.Sprintf("/proc/%d/ns/net", os.Getpid()) // what the DEL names
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

// TestDELNamesAnother: a DEL names a namespace that is no record's, nor another attachment's in the
// journal. If the path is not the record's either, it is taken for another ADD's: its delegates get
// the path, as without unwind. The ADD on record is undone too, in its own namespace.
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

// TestNamespaceOutOfReach: the pod's namespace exists, but no path leads the DEL to it, and it has
// no process: it is pinned by a mount elsewhere, or the kernel is about to remove it. Without a
// namespace bridge would leave its nat chain.
func TestNamespaceOutOfReach(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.budget("HostLink=100ms")
	n.chain(bridge.masq())
	a := n.add("a")
	a.remember()
	a.bindNetNS("pin")
	a.unpin()
	a.del()
	a.wantVanished()
	n.wantRecords(0)
}

// bindNetNS mounts the pod's network namespace at another path, too.
func (p *pod) bindNetNS(name string) (path string) {
	p.Helper()
	return p.mountNetNS(name, unix.MS_BIND)
}

// mountNetNS binds the pod's network namespace to another path, or moves it there.
func (p *pod) mountNetNS(name string, flags uintptr) (path string) {
	p.Helper()
	path = filepath.Join(p.dir, name)
	p.write(path, "")
	p.mount(p.NetNS, path, "", flags, "")
	return path
}

// makeOther makes the namespace of another container, with an eth0, at a path of this name.
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

// addMacvlan adds a pod with a macvlan, which has no end on the host.
func (n *node) addMacvlan() *pod {
	n.Helper()
	n.chain(object(`{"type": "macvlan", "master": %q, "ipam": %s}`, n.hostVeth("IPv4"), n.hostLocal(n.subnet)))
	return n.add("a")
}

// wantLinkedAt checks that the namespace is at a path and has its interface.
func (n *node) wantLinkedAt(path string, own journal.NetNS) {
	n.Helper()
	seen, err := facts.InterfaceAt(path, "")
	n.want(err == nil && seen.Netns.Same(own) && slices.Contains(n.links(path), "eth0"), "%+v (%v)", seen, err)
}

func (n *node) wantUnlinkedAt(path string) {
	n.Helper()
	n.want(!slices.Contains(n.links(path), "eth0"), "%q", n.links(path))
}

// TestMountedElsewhere: the namespace of a pod with a macvlan, which has no end on the host, moves
// from its path to another one. It lives as long as it is mounted, and a DEL runs in it.
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

// TestCoveredPod: another mount covers the directory of the network namespaces, as the node's first
// `ip netns add` does, which binds the directory over itself. The pod below
// is kept, since nothing says that it is dead.
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

// Stand-ins for providers' plugins (testdata/standin) keep a file for each attachment whose address
// they hold.

// heldDir is the directory of these files.
func (n *node) heldDir() string { return filepath.Join(n.dir, "held") }

// wantHeld checks how many addresses they hold.
func (n *node) wantHeld(count int) {
	n.Helper()
	n.wantCount("held", len(n.names(n.heldDir())), count)
}

// standIn installs the stand-in for a provider's plugin. Where it is not installed, a DEL fails.
func (n *node) standIn(plugin string) (uninstall func()) {
	n.Helper()
	n.link(plugin, filepath.Join(n.path[2], "standin"))
	return func() { must(n, os.Remove(filepath.Join(n.path[0], plugin))) }
}

// TestShownToProviders: where the plain chain's DEL frees what a provider's plugin holds, so does
// unwind's, although the container's network namespace is gone or must not be shown. Once it is
// gone, the DELs of terway and ovn-kubernetes fail in both.
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
		occupy := func() { // the other end is elsewhere
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

// TestNextPodAtSamePath: a sweep runs A's DELs. Meanwhile the runtime removes A's network
// namespace, and makes pod B at the same path. The DEL of bridge still runs in A's namespace, so
// A's interface goes and B's stays; that of p0, which may take its path for a name, is shown none.
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
