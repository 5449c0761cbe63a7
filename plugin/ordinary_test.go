package plugin

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/sweep"
)

// In the tests of this file, an operator or the machine does something ordinary. If the DEL
// succeeds without unwind, it must also succeed with unwind. unwind must not retry the pending DELs
// forever.

// tire changes each pending DEL of the pod's newest record so that its next failure counts as the
// 300th, at which unwind may drop the DEL. If the record says that the chain lacked the plugin at
// the last failure, tire makes the record say the same of all 299 failures.
func (p *pod) tire() {
	p.Helper()
	p.edit(func(e *journal.Record) {
		for i := range e.Steps {
			s := &e.Steps[i]
			s.Failures, s.Absent, s.Next = 299, min(s.Absent, 1)*299, journal.Next{}
		}
	})
}

// wantDropped checks that, according to the history, a plugin's DELs were dropped for exactly these
// containers.
func (n *node) wantDropped(plugin string, containers ...string) {
	n.Helper()
	var got []string
	for _, e := range n.recorded() {
		if e.Kind == journal.Dropped && slices.Equal(e.Plugins, []string{plugin}) {
			got = append(got, e.ContainerID)
		}
	}
	slices.Sort(got)
	n.wantEqual("dropped", got, containers)
}

// removeLeakedRules removes, at the end of the test, the rules that leaked without unwind.
func (n *node) removeLeakedRules() {
	n.Cleanup(func() {
		chains := map[string]bool{}
		for _, rule := range n.rules(fmt.Sprintf(`name: \"%s\"`, n.network)) {
			run(n, "sh", "-c", "iptables -w -t nat "+strings.Replace(rule, "-A", "-D", 1))
			chains[rule[strings.LastIndex(rule, " ")+1:]] = true
		}
		for chain := range chains {
			if strings.HasPrefix(chain, "CNI-") {
				run(n, "sh", "-c", "iptables -w -t nat -F "+chain+"; iptables -w -t nat -X "+chain)
			}
		}
	})
}

// TestOneIDOnePath: after a failed DEL, a container is added again with the same ID and the same
// CNI_NETNS, and unwind is killed in this second ADD. The runtime's next DEL contains the first
// ADD's result, but it undoes both ADDs, and leaves nothing.
func TestOneIDOnePath(t *testing.T) {
	each1(t, oneOf("bridge's DEL fails", "the last plugin's"), func(t *testing.T, first choice) {
		n := newNode(t)
		n.chain(bridge.masq(), p1)
		a := n.add("a")
		if first.is("bridge's DEL fails") {
			repairBridge := n.breakPlugin("bridge")
			n.wantError(a.tryDel())
			repairBridge()
		} else {
			n.plan(p1.DEL("fail"))
			n.wantError(a.tryDel())
			n.plan()
		}
		a.dropNetNS()
		a.move("a")
		n.mustKill("added", 1, a.tryAdd)
		a.del()
		a.wantGone()
		n.wantReserved(0)
		n.wantTaken()
		n.wantClean()
	})
}

// TestMeshUninstalled: a chained plugin stops working, and is removed from the conflist. The
// runtime's DELs of older pods then succeed, as without unwind, but the plugin's own DELs stay
// pending. Sweeps retry them until they succeed or are dropped.
func TestMeshUninstalled(t *testing.T) {
	removals := oneOf("its binary is deleted", "its daemon is gone", "it crashes")
	orders := oneOf("containerd deletes, then the namespace goes", "the namespaces go first")
	ends := oneOf("it comes back", "it stays away")
	each4(t, oneOf("chain", "chainFile"), removals, orders, ends,
		func(t *testing.T, in, removal, order, end choice) {
			n := newNode(t)
			setChain := n.chain
			if in.is("chainFile") {
				setChain = func(plugins ...pluginConf) { n.chainInFile(plugins...) }
			}
			faultyPlugin := filepath.Join(n.path[2], "faulty")
			install := func() { n.script("mesh", "exec "+faultyPlugin) }
			install()
			mesh := object(`{"type": "mesh", "dir": %q, "instance": "mesh"}`, n.faultyDir())
			setChain(bridge, mesh)
			a, b, c, d := n.add("a"), n.add("b"), n.add("c"), n.add("d")
			faultyMesh := faulty("mesh")
			switch {
			case removal.is("its binary is deleted"):
				n.remove(filepath.Join(n.path[0], "mesh"))
			case removal.is("its daemon is gone"):
				n.plan(faultyMesh.DEL("fail"))
			case removal.is("it crashes"):
				n.plan(faultyMesh.DEL("crash"))
			}
			n.wantError(a.tryDel(), "mesh")
			a.wantRecord(journal.Deleting, 2)
			setChain(bridge)
			if order.is("containerd deletes, then the namespace goes") {
				a.del()
				a.wantRecord(journal.Deleting, 1)
				a.dropNetNS()
				a.NetNS = ""
				a.del()
				b.del()
				b.dropNetNS()
				b.NetNS = ""
				b.del()
			} else {
				a.dropNetNS()
				a.NetNS = ""
				a.del()
				b.dropNetNS()
				b.NetNS = ""
				b.del()
			}
			a.wantRecord(journal.Deleting, 1)
			b.wantRecord(journal.Deleting, 1)
			n.wantReserved(2)
			n.wantLogged(staysPending)
			if end.is("it comes back") {
				install()
				n.plan()
				n.until(2, func() { n.sweep() })
			} else {
				n.status()
				_ = n.tryGC()
				n.wantRecords(4)
				a.tire()
				b.tire()
				_ = n.tryGC()
				n.wantRecords(2)
				n.wantDropped("mesh", "a", "b")
				n.want(n.counters()["dropped_deletes mesh"] == 0, "nobody needs to act, but monitoring is told")
				n.remove(filepath.Join(n.faultyDir(), "taken", "a.eth0.mesh"))
				n.remove(filepath.Join(n.faultyDir(), "taken", "b.eth0.mesh"))
			}
			n.plan()
			setChain(bridge, mesh)
			install()
			c.del()
			d.del()
			n.wantClean()
		})
}

// TestPluginChanged: a chained plugin's configuration changes, for example its kubeconfig or its
// token. The plugin then rejects the ADD's configuration, with one of several error codes. So
// unwind runs the DEL with the present configuration, at the runtime's DEL or in a sweep that knows
// the chain.
func TestPluginChanged(t *testing.T) {
	undoes := oneOf("DEL", "STATUS", "it left the chain, its binary is there")
	each2(t, []int{1, 4, 7, 11, 100, 999}, undoes, func(t *testing.T, code int, undo choice) {
		n := newNode(t)
		n.chain(bridge, p1.failing("DEL").code(code))
		a := n.add("a")
		n.chain(bridge, p1.code(code))
		switch {
		case undo.is("DEL"):
			a.del()
			n.wantLogged("DEL succeeded with the chain")
		case undo.is("STATUS"):
			a.dropNetNS()
			n.until(0, func() { n.status() })
		case undo.is("it left the chain, its binary is there"):
			n.chain(bridge)
			a.del()
			a.wantRecord(journal.Deleting, 1)
			n.chain(bridge, p1)
			n.until(0, func() { n.gc() })
		}
		n.wantClean()
	})
}

// TestServerMoves: a plugin's configuration names a server that no longer responds, so the plugin's
// DEL hangs. The conflist now names another server. unwind ends the first DEL, and runs the DEL with
// the present configuration, at the runtime's DEL and in a sweep.
func TestServerMoves(t *testing.T) {
	each1(t, oneOf("DEL", "STATUS"), func(t *testing.T, undo choice) {
		n := newNode(t)
		n.budget("Recorded=1s")
		n.chain(bridge, p1.mode("DEL", "hang"))
		a, b := n.add("a"), n.add("b")
		n.chain(bridge, p1)
		if undo.is("DEL") {
			a.del()
			b.del()
			n.wantLogged("its configuration has changed")
		} else {
			a.dropNetNS()
			b.dropNetNS()
			n.until(0, func() { n.status() })
		}
		n.wantClean()
	})
}

// TestHangingPluginLeaves: a plugin's daemon no longer responds, so the plugin's DEL hangs, and the
// operator removes the plugin from the chain, or replaces it. The runtime's DEL of an older pod
// waits for the plugin only for a short time. In a sweep, a slow DEL of the plugin may take all of
// the sweep's time.
func TestHangingPluginLeaves(t *testing.T) {
	each1(t, oneOf("it is removed", "it is replaced"), func(t *testing.T, change choice) {
		n := newNode(t)
		n.budget("Recorded=1s")
		n.link("daemon", filepath.Join(n.path[2], "faulty"))
		n.chain(bridge, p1.with(`"type": "daemon", "delayMS": 3000`)) // the delay of the mode "late"
		a := n.add("a")
		n.plan(p1.DEL("hang"))
		n.chain(bridge)
		if change.is("it is replaced") {
			n.chain(bridge, p2)
		}
		n.wantWithin(30*time.Second, a.del)
		n.wantLogged("the plugin has left the chain")
		n.wantReserved(0)
		n.wantTaken("a.eth0.p1")
		a.wantRecord(journal.Deleting, 1)
		if change.is("it is replaced") {
			n.wantTimes(1, "DEL p2")
		}
		a.dropNetNS()
		n.plan(p1.DEL("late"))
		n.until(0, func() { n.sweep() })
		n.wantClean()
	})
}

// TestPluginReplaced: an upgrade replaces a plugin with one that has another name, and the old one
// fails or is gone. At the runtime's DEL, the new plugin releases what the old one created, as
// without unwind. The old plugin's own DEL stays pending. If the new plugin's DEL fails, too, the
// runtime gets the error, and its next DEL or a sweep retries both.
func TestPluginReplaced(t *testing.T) {
	first := oneOf("its DEL succeeds", "its first DEL fails", "unwind is killed before it")
	each3(t, oneOf("chain", "chainFile"), oneOf("is gone", "fails"), first, func(t *testing.T, in, old, first choice) {
		n := newNode(t)
		setChain := n.chain
		if in.is("chainFile") {
			setChain = func(plugins ...pluginConf) { n.chainInFile(plugins...) }
		}
		before := filepath.Join(n.path[0], "net-v1")
		n.link("net-v1", filepath.Join(n.path[1], "bridge"))
		setChain(bridge.masq().with(`"type": "net-v1"`), p1)
		a := n.add("a")
		n.remove(before)
		if old.is("fails") {
			n.script("net-v1", "exit 1")
		}
		n.link("net-v2", filepath.Join(n.path[1], "bridge"))
		setChain(bridge.masq().with(`"type": "net-v2"`), p1)
		if first.is("its first DEL fails") {
			n.remove(filepath.Join(n.path[0], "net-v2"))
			n.wantError(a.tryDel(), "net-v2")
			a.wantRecord(journal.Deleting, 2)
			n.link("net-v2", filepath.Join(n.path[1], "bridge"))
		}
		if first.is("unwind is killed before it") {
			n.mustKill("undone", 2, a.tryDel) // after p1's DEL and the old plugin's
			n.wantReserved(1)
		}
		a.del()
		n.wantReserved(0)
		a.wantRecord(journal.Deleting, 1)
		if first.is("its DEL succeeds") { // else, p1's DEL runs again
			n.wantTimes(1, "DEL p1")
		}
		a.dropNetNS()
		n.remove(filepath.Join(n.path[0], "net-v2"))
		if old.is("fails") {
			n.remove(before)
		}
		n.link("net-v1", filepath.Join(n.path[1], "bridge"))
		n.until(0, func() { n.sweep() })
		n.wantClean()
	})
}

// TestPluginReplacedBeforeSweep: as in TestPluginReplaced, but a pod's namespace is already gone.
// The old plugin's DEL first fails in a sweep, or in a DEL that the runtime sends before the chain
// names the new plugin. The runtime's next DEL still runs the new plugin.
func TestPluginReplacedBeforeSweep(t *testing.T) {
	each1(t, oneOf("STATUS", "DEL"), func(t *testing.T, by choice) {
		n := newNode(t)
		version := func(kind string) pluginConf {
			return object(`{"type": %q, "dir": %q, "instance": "net"}`, kind, n.faultyDir())
		}
		n.link("net-v1", filepath.Join(n.path[2], "faulty"))
		n.chain(bridge, version("net-v1"))
		a, b := n.add("a"), n.add("b")
		n.remove(filepath.Join(n.path[0], "net-v1"))
		n.link("net-v2", filepath.Join(n.path[2], "faulty"))
		a.dropNetNS()
		if by.is("STATUS") {
			n.chain(bridge, version("net-v2"))
			n.status()
			b.wantRecord(journal.Live)
		} else {
			n.chain(bridge)
			a.del()
			n.chain(bridge, version("net-v2"))
		}
		a.wantRecord(journal.Deleting, 1)
		n.wantTaken("a.eth0.net", "b.eth0.net")
		a.del()
		n.wantTaken("b.eth0.net")
		b.del()
		n.wantTaken()
		n.wantReserved(0)
		b.dropNetNS()
		n.link("net-v1", filepath.Join(n.path[2], "faulty"))
		n.until(0, func() { n.sweep() })
		n.wantClean()
	})
}

// TestSuccessors: a chained plugin is replaced with one that has another name. What the new plugin
// needs is still there when its DEL runs: the address for firewall and portmap, the interface, and
// the arguments that the runtime sends now. DELs that have succeeded don't run again.
func TestSuccessors(t *testing.T) {
	needs := oneOf("rules", "ports", "interface", "arguments")
	each1(t, needs, func(t *testing.T, need choice) {
		n := newNode(t)
		n.removeLeakedRules()
		path := filepath.Join(n.path[2], "faulty")
		switch {
		case need.is("rules"):
			path = filepath.Join(n.path[1], "firewall")
		case need.is("ports"):
			path = filepath.Join(n.path[1], "portmap")
		}
		version := func(kind string) pluginConf {
			return object(`{"type": %q, "dir": %q, "instance": "net", "capabilities": {"portMappings": %t, "mac": true}}`,
				kind, n.faultyDir(), need.is("ports"))
		}
		n.link("net-v1", path)
		n.chain(bridge, p0, version("net-v1"), p1)
		a := n.add("a")
		n.remove(filepath.Join(n.path[0], "net-v1"))
		switch {
		case need.is("rules") || need.is("ports"):
			n.link("net-v2", path)
		case need.is("interface"):
			n.script("net-v2", `[ $CNI_COMMAND != DEL ] || nsenter --net=$CNI_NETNS ip link show $CNI_IFNAME >&2 || exit 1
				exec `+path)
		case need.is("arguments"):
			a.CapabilityArgs["mac"] = "02:00:00:00:00:01"
			n.script("net-v2", `c=$(cat); echo "$c" | grep -q 02:00:00 || exit 1
				echo "$c" | exec `+path)
		}
		n.chain(bridge, p0, version("net-v2"), p1)
		a.del()
		n.wantReserved(0)
		n.wantCount("rules", len(n.rules(" "+a.address+"/32 ", "destination "+a.address+":")), 0)
		n.wantTaken()
		a.wantRecord(journal.Deleting, 1)
		a.dropNetNS()
		a.NetNS = ""
		if !need.is("interface") {
			a.del()
		}
		n.wantTimes(1, "DEL p0")
		n.wantTimes(1, "DEL p1")
		n.link("net-v1", path)
		n.until(0, func() { n.sweep() })
		n.wantClean()
	})
}

// TestSuccessorOnce: three plugins are replaced, two of which have the same type. A new plugin's
// DEL would fail if it ran again after a success. Each of these DELs succeeds and doesn't run
// again, even if it failed at first because a server was down.
func TestSuccessorOnce(t *testing.T) {
	each1(t, oneOf("up", "down at first"), func(t *testing.T, server choice) {
		n := newNode(t)
		path, down := filepath.Join(n.path[2], "faulty"), filepath.Join(n.dir, "down")
		version := func(kind, instance string) pluginConf {
			return object(`{"type": %q, "dir": %q, "instance": %q}`, kind, n.faultyDir(), instance)
		}
		n.link("x-v1", path)
		n.link("y-v1", path)
		n.chain(bridge, version("x-v1", "x"), version("y-v1", "y"), version("y-v1", "z"))
		a := n.add("a")
		for _, name := range []string{"x", "y"} {
			n.remove(filepath.Join(n.path[0], name+"-v1"))
			n.script(name+"-v2", fmt.Sprintf(`in=$(cat); instance=$(echo "$in" | grep -o '"instance":"[xyz]"' | cut -d'"' -f4)
				[ $CNI_COMMAND != DEL ] || [ ! -e %s -a -e %s/taken/a.eth0.$instance ] || exit 1
				echo "$in" | exec %s`, down, n.faultyDir(), path))
		}
		n.chain(bridge, version("x-v2", "x"), version("y-v2", "y"), version("y-v2", "z"))
		if server.is("down at first") {
			n.write(down, "")
			n.wantError(a.tryDel(), "x-v2", "y-v2")
			n.remove(down)
		}
		a.del()
		n.wantTaken()
		n.wantReserved(0)
		a.dropNetNS()
		n.link("x-v1", path)
		n.link("y-v1", path)
		n.until(0, func() { n.sweep() })
		n.wantClean()
	})
}

// TestSuccessorOfAllocator: a main plugin that assigns addresses itself is replaced. The new one's
// DEL gets the address, because the old one's DEL never ran.
func TestSuccessorOfAllocator(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	path := filepath.Join(n.path[2], "faulty")
	version := func(kind string) pluginConf {
		return object(`{"type": %q, "dir": %q, "instance": "net", "address": "%s/24"}`, kind, n.faultyDir(), n.ip(7))
	}
	n.link("net-v1", path)
	n.chain(version("net-v1"))
	a := n.add("a")
	n.remove(filepath.Join(n.path[0], "net-v1"))
	n.script("net-v2", `c=$(cat); echo "$c" | grep -q '"ips":\[{' || exit 1
		echo "$c" | exec `+path)
	n.chain(version("net-v2"))
	a.del()
	n.wantTaken()
	n.link("net-v1", path)
	a.dropNetNS()
	n.until(0, func() { n.sweep() })
	n.wantClean()
}

// TestUnknownChainLater: a plugin has left the chain, and its DEL has failed. At the next DEL, the
// chain cannot be read. So the plugin's failure is an error like any other.
func TestUnknownChainLater(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.link("mesh", filepath.Join(n.path[2], "faulty"))
	file := n.chainInFile(bridge, p1.with(`"type": "mesh"`))
	a := n.add("a")
	n.plan(p1.DEL("fail"))
	n.chainInFile(bridge)
	a.del()
	n.remove(file)
	n.wantError(a.tryDel(), "DEL incomplete", "mesh")
	n.plan()
	a.del()
	n.wantClean()
}

// TestNewArgument: a plugin is upgraded, declares a new capability, and its DEL needs an argument
// that the ADD did not get. Once the runtime's DEL contains that argument, the DEL succeeds.
func TestNewArgument(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	upgraded := filepath.Join(n.dir, "upgraded")
	n.script("mesh", fmt.Sprintf(`c=$(cat); [ ! -e %s ] || echo "$c" | grep -q 02:00:00 || exit 1
		echo "$c" | exec %s`, upgraded, filepath.Join(n.path[2], "faulty")))
	mesh := object(`{"type": "mesh", "dir": %q, "instance": "mesh"}`, n.faultyDir())
	n.chain(bridge, mesh)
	a := n.add("a")
	n.write(upgraded, "")
	n.chain(bridge, mesh.with(`"capabilities": {"mac": true}`))
	n.wantError(a.tryDel(), "mesh")
	a.CapabilityArgs["mac"] = "02:00:00:00:00:01"
	a.del()
	n.wantClean()
}

// TestOtherNetworksSTATUS: a plugin with host ports has left the chain of a second network. The
// first network's STATUS, which doesn't know the second network's chain, also tries the plugin's
// DEL. That does not keep unwind from dropping the DEL later.
func TestOtherNetworksSTATUS(t *testing.T) {
	t.Parallel()
	first := newNode(t)
	first.chain(bridge)
	n := first.newNetwork("other")
	n.removeLeakedRules()
	n.chain(bridge, portmap)
	a := n.add("a")
	n.breakPlugin("portmap")
	n.chain(bridge)
	a.del()
	a.dropNetNS()
	a.edit(func(e *journal.Record) { e.Steps[0].Next = journal.Next{} })
	first.status()
	a.tire()
	n.status()
	n.wantDropped("portmap", "a")
	a.wantGone()
}

// TestCheckAfterChanges: CHECK of an older pod succeeds even if a plugin has left the chain, or now
// rejects its recorded configuration. Nomad, for example, removes the network of a container whose
// CHECK fails.
func TestCheckAfterChanges(t *testing.T) {
	changes := oneOf("it left the chain", "its configuration changed", "the version, too", "it hung before")
	each1(t, changes, func(t *testing.T, change choice) {
		n := newNode(t)
		n.budget("Recorded=1s")
		if change.is("it hung before") {
			n.chain(bridge, p1.mode("CHECK", "hang"))
		} else {
			n.chain(bridge, p1.failing("CHECK"))
		}
		a := n.add("a")
		if !change.is("it hung before") {
			n.wantError(a.tryCheck())
		}
		switch {
		case change.is("it hung before"):
			n.chain(bridge, p1)
		case change.is("it left the chain"):
			n.chain(bridge)
		case change.is("its configuration changed"):
			n.chain(bridge, p1)
		case change.is("the version, too"):
			n.versions("1.0.0", "0.4.0")
			n.chain(bridge, p1)
		}
		a.check()
		n.chain(bridge, p1)
		a.del()
		n.wantClean()
	})
}

// pickyPortmap installs a portmap that prints failure and exits with 1 while file exists, unless
// portmap's configuration contains text.
func (n *node) pickyPortmap(file, text, failure string) {
	n.Helper()
	n.script("portmap", fmt.Sprintf(`conf=$(cat)
		if [ -e %s ] && ! echo "$conf" | grep -q '%s'; then
			echo '%s'; exit 1
		fi
		printf "%%s" "$conf" | exec %s`, file, text, failure, filepath.Join(n.path[1], "portmap")))
}

// TestVersionCorrected: while a pod has a host port, a new portmap is installed that rejects the
// chain's cniVersion. Then the conflist's cniVersion is corrected. portmap's DEL must find its
// ADD's rules, so it gets the recorded configuration, but with the corrected cniVersion.
func TestVersionCorrected(t *testing.T) {
	each1(t, oneOf("DEL", "sweep"), func(t *testing.T, by choice) {
		n := newNode(t)
		old := filepath.Join(n.dir, "old")
		n.pickyPortmap(old, `"cniVersion":"0.4.0"`, `{"code": 1, "msg": "incompatible CNI versions"}`)
		n.chain(bridge, portmap)
		a := n.add("a")
		n.write(old, "")
		n.wantError(a.tryDel(), "portmap")
		n.wantHostPorts(a.address, 1)
		n.versions("1.0.0", "0.4.0")
		if by.is("DEL") {
			a.del()
		} else {
			a.dropNetNS()
			n.until(0, func() { n.status() })
		}
		n.wantClean()
	})
}

// TestHostPortRenewed: portmap rejects its recorded configuration, and its DEL succeeds with the
// present one.
func TestHostPortRenewed(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	down := filepath.Join(n.dir, "down")
	n.pickyPortmap(down, "markMasqBit", `{"code": 999, "msg": "down"}`)
	n.chain(bridge, portmap)
	a := n.add("a")
	n.write(down, "")
	n.wantError(a.tryDel(), "portmap")
	n.chain(bridge, portmap.with(`"markMasqBit": 14`))
	a.del()
	a.wantGone()
	n.wantReserved(0)
	n.wantClean()
}

// TestIPAMReplaced: the conflist names another IPAM plugin, and host-local no longer works. The DEL
// succeeds with the present configuration, and unwind itself removes host-local's file.
func TestIPAMReplaced(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.chain(bridge)
	a, b := n.add("a"), n.add("b")
	n.script("host-local", "exit 1")
	n.chain(static)
	a.del()
	n.wantReserved(1)
	b.dropNetNS()
	n.until(0, func() { n.status() })
	n.wantReserved(0)
	n.wantClean()
}

// TestPluginDirectoryMoves: the runtime now uses another plugin directory, and a binary in the old
// one is gone or broken. The runtime's DEL runs the plugins in the new directory, as without
// unwind. A sweep runs the plugins in the old directory, but an IPAM plugin may be in either one.
func TestPluginDirectoryMoves(t *testing.T) {
	run := func(by string, spoil func(n *node, old string)) {
		t.Run(by, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			unwind, present, old := n.path[0], n.path[1], filepath.Join(n.dir, "old")
			n.mkdir(old)
			for _, plugin := range []string{"bridge", "host-local", "portmap"} {
				must(t, os.Symlink(filepath.Join(present, plugin), filepath.Join(old, plugin)))
			}
			n.usePath(unwind, old)
			n.chain(bridge, portmap)
			a := n.add("a")
			n.usePath(unwind, present)
			spoil(n, old)
			if strings.HasPrefix(by, "DEL") {
				a.del()
			} else {
				a.dropNetNS()
				n.until(0, func() { n.status() })
			}
			n.wantClean()
		})
	}
	withoutIPAM := func(n *node, old string) { n.remove(filepath.Join(old, "host-local")) }
	run("DEL, no host-local", withoutIPAM)
	run("STATUS, no host-local", withoutIPAM)
	run("DEL, a broken portmap", func(n *node, old string) {
		n.remove(filepath.Join(old, "portmap"))
		must(n, os.WriteFile(filepath.Join(old, "portmap"), []byte("#!/none\n"), 0o755))
	})
}

// TestArgsOfDEL: a plugin is upgraded, and its verbs now need an argument in CNI_ARGS that the ADD
// did not get. The runtime was upgraded, too, and sends the argument with CHECK and DEL. If the
// container is added again first, unwind doesn't use the second ADD's arguments to undo the first.
func TestArgsOfDEL(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	upgraded := filepath.Join(n.dir, "upgraded")
	n.script("mesh", fmt.Sprintf(`case "$CNI_ARGS" in *K8S_POD_UID=u*) ;; *)
		if [ -e %s ]; then echo '{"code": 4, "msg": "K8S_POD_UID is missing"}'; exit 1; fi
	esac
	exec %s`, upgraded, filepath.Join(n.path[2], "faulty")))
	n.chain(bridge, object(`{"type": "mesh", "dir": %q, "instance": "mesh"}`, n.faultyDir()))
	a, b := n.add("a"), n.add("b")
	n.write(upgraded, "")
	n.wantError(a.tryCheck(), "K8S_POD_UID is missing")
	n.wantError(b.tryDel(), "K8S_POD_UID is missing")
	for _, p := range []*pod{a, b} {
		p.Args = append(p.Args, [2]string{"K8S_POD_UID", "u"})
	}
	a.check()
	a.del()
	b.dropNetNS()
	b.move("again")
	b.add()
	n.wantRecords(2) // the second ADD's arguments may be those of another pod
	b.del()
	n.wantClean()
}

// TestArgsInAnotherOrder: containerd sends the arguments in random order. If a DEL fails, the same
// arguments in another order are no reason to retry it at once.
func TestArgsInAnotherOrder(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.chain(bridge, p1)
	a := n.add("a")
	slices.Reverse(a.Args)
	n.plan(p1.DEL("fail"))
	n.wantError(a.tryDel(), "p1")
	n.wantTimes(1, "DEL p1")
	n.plan()
	a.del()
	n.wantClean()
}

// TestReconnected: a container leaves a network, but the DEL fails. The container then joins
// another network with the same interface name, as with "podman network disconnect" and "podman
// network connect". The retry of the DEL finds the same container and namespace, but must not
// remove the new network's interface.
func TestReconnected(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.chain(bridge)
	a := n.add("a")
	repair := n.breakPlugin("bridge")
	n.wantError(a.tryDel(), "bridge")
	repair()
	n.shell("nsenter --net=%s ip link del eth0", a.NetNS)
	other := n.newNetwork("other")
	b := other.newPod("b")
	b.ContainerID, b.NetNS = a.ContainerID, a.NetNS
	b.add()
	n.until(1, func() { n.sweep() })
	n.want(slices.Contains(n.links(b.NetNS), "eth0"), "the new network's interface is gone")
	b.del()
	n.wantClean()
}

// TestProviderReplaced: the provider is replaced, and the network's name with it, while a pod runs.
// containerd then sends the pod's DEL under the new name. As without unwind, the new provider's
// plugin gets the pod's namespace. Like OVN-Kubernetes', it fails without one. Once the sandbox is
// gone, a sweep undoes the ADD under the old name.
func TestProviderReplaced(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.chain(bridge.masq())
	a := n.add("a")
	other := n.newNetwork("other")
	other.chain(named("strict"))
	b := other.newPod("b")
	b.ContainerID, b.NetNS = a.ContainerID, a.NetNS
	n.script("strict", "exit 1")
	n.wantError(b.tryDel(), "strict") // the new provider does not run yet
	n.script("strict", "exec nsenter --net=$CNI_NETNS true")
	b.del()
	n.want(slices.Contains(n.links(a.NetNS), "eth0"), "the DEL of the new network removed the old interface")
	a.dropNetNS()
	n.until(0, func() { n.sweep() })
	n.wantClean()
}

// TestNested: a plugin such as Multus runs in unwind's chain, and itself runs unwind with a second
// chain for the same container. The inner ADD must not wait for the outer ADD. The second chain has
// another interface, or the same one, as with Multus' annotation v1.multus-cni.io/default-network.
func TestNested(t *testing.T) {
	each1(t, oneOf("eth0", "net1"), func(t *testing.T, ifname choice) {
		n := newNode(t)
		inner, result := filepath.Join(n.dir, "inner.json"), filepath.Join(n.dir, "result")
		n.chain(bridge.masq(), firewall)
		n.write(inner, n.entryOf(n.chainOf(n.plugins()...), map[string]any{"name": n.network + "-inner", "logLevel": "debug"}))
		n.script("nest", fmt.Sprintf(`export CNI_IFNAME=%s
			if [ $CNI_COMMAND != ADD ]; then
				conf=$(cat %[2]s); echo "${conf%%%%\}},\"prevResult\": $(cat %[3]s)}" | %[4]s; exit
			fi
			%[4]s <%[2]s >%[3]s; rc=$?; cat %[3]s; exit $rc`, ifname.name, inner, result, filepath.Join(n.path[0], "unwind")))
		n.chain(named("nest"))
		n.budget("Release=2s Step=1s HostLink=1s")
		a := n.add("a")
		n.wantRecords(2)
		n.wantLoggedTimes(0, "deferred")
		a.del()
		n.wantReserved(0)
		n.wantClean()
	})
}

// TestRestartedWhileOff: while unwind is off, nerdctl restarts a container. nerdctl's DEL has no
// CNI_NETNS, so a rule that refers to bridge's iptables chain leaks. The last DEL runs bridge in a
// scratch namespace first, where it fails because of this rule, and then without a namespace.
func TestRestartedWhileOff(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.removeLeakedRules()
	n.chain(bridge.masq())
	a := n.addPast("a")
	a.dropNetNS()
	a.NetNS = ""
	a.delPast()
	a.move("second")
	a.addPast()
	a.dropNetNS()
	a.NetNS = ""
	a.del()
	n.wantRecords(0)
	n.wantReserved(0)
}

// TestScratchTwice: a DEL that fails in a scratch namespace runs there once more. If the two errors
// are the same, the DEL then runs without a namespace. If the errors differ, it does not.
func TestScratchTwice(t *testing.T) {
	fails := func(msg string) string { return `echo "{\"code\": 5, \"msg\": \"` + msg + `\"}"; exit 1` }
	type test struct {
		name   string
		script string // BRIDGE: the plugin's path; RUNS: a file with a line for each run
		runs   []int  // the number of runs after each DEL
		passes bool
		says   []string
	}
	tests := []test{
		{"the same words", `[ -z "$CNI_NETNS" ] && exec BRIDGE; ` + fails("busy"), []int{3}, true, nil},
		{"other words", `[ -z "$CNI_NETNS" ] && exec BRIDGE; ` + fails("busy $$"), []int{2}, false, nil},
		{"it works again", `[ $(wc -l <RUNS) = 2 ] && exec BRIDGE; ` + fails("busy"), []int{2}, true, nil},
		{"without one it fails too", fails("busy"), []int{3, 5}, false, []string{"bridge (code 5)"}},
	}
	each1(t, tests, func(t *testing.T, tt test) {
		n := newNode(t)
		n.chain(bridge)
		a := n.add("a")
		a.dropNetNS()
		a.NetNS = ""
		runs := filepath.Join(n.dir, "runs")
		n.script("bridge", strings.NewReplacer("BRIDGE", filepath.Join(n.path[1], "bridge"), "RUNS", runs).
			Replace("echo x >>RUNS; "+tt.script))
		for i, count := range tt.runs {
			switch err := a.tryDel(); {
			case tt.passes:
				must(n, err)
			case i == 0:
				n.wantError(err, tt.says...)
			default:
				n.wantError(err)
			}
			n.wantCount("runs", strings.Count(read(n, runs), "\n"), count)
		}
		n.remove(filepath.Join(n.path[0], "bridge"))
		n.until(0, func() { n.sweep() })
		n.wantClean()
	})
}

// TestNeverRanAPlugin: an ADD was interrupted before it had a result, and its DELs fail. In the
// end, unwind drops these DELs. But it keeps a DEL longer if an address may depend on that DEL.
func TestNeverRanAPlugin(t *testing.T) {
	places := oneOf("after the address", "before the address", "with a port")
	each1(t, places, func(t *testing.T, place choice) {
		n := newNode(t)
		switch {
		case place.is("after the address"):
			n.chain(bridge, p1)
			n.plan(p1.DEL("fail"))
		case place.is("before the address"):
			n.chain(p1, bridge)
			n.plan(p1.DEL("fail"))
		case place.is("with a port"):
			n.chain(bridge, portmap)
		}
		a := n.add("a")
		a.cutOff()
		a.dropNetNS()
		n.remove(filepath.Join(n.faultyDir(), "taken"))
		repairPortmap := func() {}
		if place.is("with a port") {
			repairPortmap = n.breakPlugin("portmap")
		}
		n.sweep()
		n.sweep()
		a.wantRecord(journal.RollingBack)
		a.tire()
		_ = n.tryGC()
		switch {
		case place.is("after the address"):
			n.wantRecords(0)
			n.wantReserved(0)
			n.wantDropped("faulty", "a")
		case place.is("before the address"):
			n.wantRecords(1)
			n.chain(bridge)
			a.tire()
			_ = n.tryGC()
			n.wantRecords(1)
			a.tire()
			_ = n.tryGC()
			n.wantRecords(0)
			n.wantDropped("faulty", "a")
		case place.is("with a port"):
			n.wantRecords(1)
			repairPortmap()
			n.gc()
			n.wantRecords(0)
		}
		n.wantClean()
	})
}

// bootOn changes all records of the pod as if their ADDs had run in an earlier boot of the machine.
func (p *pod) bootOn(machine string) {
	p.Helper()
	all := p.records()
	must(p, p.store.Update(context.Background(), func(tx *journal.Tx) error {
		for _, e := range slices.Backward(all) { // the oldest first
			must(p, tx.Delete(e))
			e.Added.Host.BootID, e.Added.Host.Machine = earlier, machine
			e.Number = 0
			for _, e.State = range []journal.State{journal.Adding, e.State} {
				must(p, tx.Put(e))
			}
		}
		return nil
	}))
}

// TestEarlierBoot: a sweep runs no DEL for an attachment of an earlier boot, unless unwind can
// prove that the machine is the same. Instead of a DEL, the sweep only removes the host-local files
// of all the attachment's records. The runtime's own DEL still runs the plugins.
func TestEarlierBoot(t *testing.T) {
	machines := []struct{ name, id string }{{"the machine has no ID", ""}, {"its ID changed", "machine-id:another"}}
	releases := oneOf("sweep", "GC", "STATUS")
	each3(t, oneOf("one record", "two records"), machines, releases,
		func(t *testing.T, records choice, machine struct{ name, id string }, release choice) {
			n := newNode(t)
			n.chain(pooled, p1)
			a := n.newPod("a")
			if records.is("one record") {
				a.add()
				a.dropNetNS()
			} else {
				a.add()
				n.plan(p1.DEL("fail"))
				n.wantError(a.tryDel())
				a.dropNetNS()
				a = a.again()
				a.add()
				a.dropNetNS()
				a.wantRecord(journal.Live, 3, 2)
				n.plan()
			}
			n.forgetCalls()
			a.bootOn(machine.id)
			switch {
			case release.is("sweep"):
				n.sweep()
			case release.is("GC"):
				n.gc()
			case release.is("STATUS"):
				n.status()
			}
			n.wantRecords(0)
			n.wantReserved(0)
			n.wantCalls()
			a.del()
			n.wantCalls("DEL p1", "DEL p0")
		})
}

// TestObservingInAnotherNetwork: a network sets disableGC to true and sweepOnStatus to false. Then
// STATUS and GC of another network keep its attachments, but `unwindctl sweep` may release them.
func TestObservingInAnotherNetwork(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.chain(p0)
	n.conf["disableGC"], n.conf["sweepOnStatus"] = true, false
	a := n.add("a")
	a.dropNetNS()
	n.conf["disableGC"], n.conf["sweepOnStatus"] = nil, nil
	other := n.newNetwork("other")
	b := other.add("b")
	b.dropNetNS()
	other.status()
	n.until(1, func() { other.status() })
	other.gc()
	a.wantKept()
	person := other.worker()
	person.Node.Invoked = false
	n.want(!person.Spares(n.records()[0]), "it is spared")
	n.status()
	n.wantRecords(0)
	n.wantClean()
}

// TestStatusOfOldChain: without unwind, runtimes do not call STATUS of a chain older than CNI
// 1.1.0. So if a plugin of such a chain is missing, unwind's STATUS succeeds and the node stays
// ready. Only new pods fail, as without unwind.
func TestStatusOfOldChain(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.versions("1.1.0", "1.0.0")
	n.chain(p0, named("gone"))
	n.status()
	n.wantWarned(`plugins are missing, so new pods cannot start" missing=gone`)
	n.versions("1.1.0", "1.1.0")
	n.wantCode(n.tryStatus(), 50)
	n.wantClean()
}

// TestGuardAfterOff: many pods are gone. The mass-release guard keeps their attachments, unless
// their DELs ran while unwind was off. While the guard keeps attachments, sweeps still release
// others that die later.
func TestGuardAfterOff(t *testing.T) {
	each1(t, oneOf("deleted while off", "gone without a DEL"), func(t *testing.T, ends choice) {
		n := newNode(t)
		n.chain(bridge)
		all, gone := n.crowd(20, "all"), n.crowd(12, "gone")
		if ends.is("deleted while off") {
			for _, p := range gone {
				p.delPast()
				p.dropNetNS()
			}
			n.gc()
			n.wantRecords(20)
		} else {
			for _, p := range gone {
				p.dropNetNS()
			}
			n.wantError(n.tryGC(), "seem dead")
			n.wantRecords(32)
			n.gc(valid(slices.Concat(all, gone)...))
			n.wantRecords(32)
			x := n.addPast("x")
			all[0].dropNetNS()
			all[1].dropNetNS()
			_ = n.tryGC()
			n.wantRecords(30)
			_ = n.tryStatus()
			n.wantRecords(30)
			_, err := n.plugin().Sweep(n.Context(), n.stateDir, sweep.Options{Force: true})
			must(n, err)
			n.wantRecords(18)
			all[0].del()
			all[1].del()
			x.delPast()
		}
		for _, p := range all {
			p.del()
		}
		n.wantClean()
	})
}
