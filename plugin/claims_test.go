package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/plugintest/sandbox"
)

// turn is one of the two verbs of a race. A faulty plugin holds up the call that fault describes.
type turn struct {
	fault fault
	pod   *pod
	ended bool
	begun *underWay
}

// await waits until the verb has ended or, if goOn is false, until the plugin holds up the call. If
// goOn is true, await lets the plugin continue. await returns after the given time at the latest,
// because one verb may wait for the other.
func (t *turn) await(most time.Duration, goOn bool) {
	file := t.pod.heldFile(t.fault.verb, t.pod.ContainerID, t.fault.instance)
	for end := time.Now().Add(most); !t.ended && time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if _, err := os.Lstat(file); err == nil && !goOn {
			return
		}
		_ = os.Remove(file)
		select {
		case <-t.begun.done:
			t.ended = true
		default:
		}
	}
}

// race starts the first verb, and waits until a plugin holds up the call that ofFirst describes. It
// then does the same with the second verb. Finally, it lets the first continue, then the second.
func (n *node) race(first *pod, ofFirst fault, second *pod, ofSecond fault) {
	n.Helper()
	one, other := &turn{fault: ofFirst, pod: first}, &turn{fault: ofSecond, pod: second}
	n.plan(one.fault)
	one.begin()
	one.await(time.Second, false)
	n.plan(one.fault, other.fault)
	other.begin()
	other.await(time.Second, false)
	one.fault.mode = "ok"
	n.plan(one.fault, other.fault)
	one.await(time.Second, true)
	other.fault.mode = "ok"
	n.plan(one.fault, other.fault)
	for _, t := range []*turn{other, one} {
		t.await(sandbox.Patience, true)
		n.want(t.ended, "%s of %s does not end", t.fault.verb, t.pod.ContainerID)
	}
}

func (t *turn) begin() {
	if t.fault.verb == "ADD" {
		t.begun = t.pod.beginAdd()
	} else {
		t.begun = t.pod.beginDel()
	}
}

// wantAllOfADD checks that the pod has everything that p0, p1 and p2 created in its ADD.
func (p *pod) wantAllOfADD() {
	p.Helper()
	r, err := p.cni.GetNetworkListCachedResult(p.wrapped(), &p.RuntimeConf)
	must(p, err)
	taken, rules, a := p.taken(), p.addressRules(), address(p, r)
	for _, instance := range []string{"p0", "p1", "p2"} {
		p.want(slices.Contains(taken, p.ContainerID+".eth0."+instance), "taken: %q", taken)
	}
	p.want(slices.Contains(rules, a+".p1"), "rules: %q, not of %s", rules, a)
}

// TestLateDELAgainstClaim: A's DEL failed twice, so unwind freed A's address, and B gets that
// address. A's late DEL begins in each phase of B's ADD. Conversely, B's ADD begins in each phase
// of A's DEL. Both verbs end, even if one waits for the other. Afterwards, B has its rule. After
// B's DEL, nothing of A is left. If the journal has no record of A, the late DEL runs A's whole
// chain; otherwise, it runs only p1. For A and B with the same container ID, see the comment below.
func TestLateDELAgainstClaim(t *testing.T) {
	type phase struct {
		name  string
		fault fault
	}
	olds := oneOf("no entry", "swept", "a DEL pending", "same container ID")
	const aFirst = "A comes first"
	adds := []phase{
		{"the address is given, not claimed", p0.ADD("hold-effect")},
		{"the address is claimed", p1.ADD("hold")},
		{"the rule is made", p1.ADD("hold-effect")},
		{"B is live", p2.ADD("ok")},
		{aFirst, p2.ADD("ok")},
	}
	dels := []phase{
		{"the rule is there", p1.DEL("hold")},
		{"the rule is removed", p1.DEL("hold-effect")},
		{"p1 fails", p1.DEL("fail")},
		{"the address is free", p0.DEL("hold-effect")},
	}
	each3(t, olds, adds, dels, func(t *testing.T, old choice, add, del phase) {
		n := newNode(t)
		n.chain(single, p1.rules(), p2)
		a := n.add("a")
		n.plan(p1.DEL("fail"))
		n.wantError(a.tryDel())
		n.wantError(a.tryDel())
		n.plan()
		n.wantReserved(0)
		same := old.is("same container ID")
		switch {
		case old.is("no entry"):
			n.remove(n.stateDir)
		case old.is("swept"):
			n.gc()
			n.wantClean()
			n.forgetCalls()
		}
		var b *pod
		if same {
			b = a.again()
		} else {
			b = n.newPod("b")
		}
		if add.name == aFirst {
			n.race(a, del.fault, b, add.fault)
		} else {
			n.race(b, add.fault, a, del.fault)
		}
		n.plan()
		n.wantLoggedTimes(0, "msg=deferred attachment="+n.network+"/b/eth0")
		// With the same container ID, A's DEL undoes B as well, and A's rule may stay until the next pod
		// with the address is deleted.
		if same && add.name != aFirst {
			b.del()
			n.wantClean()
		} else {
			b.wantAllOfADD()
			b.wantRecord(journal.Live)
		}
		if !same {
			a.del()
			b.wantAllOfADD()
			b.wantRecord(journal.Live)
		}
		b.del()
		n.sweep()
		n.wantClean()
		if !same {
			n.wantRules()
		}
		n.wantClean()
	})
}

// awaitTries waits until the pod's record counts this many tries of the last step's DEL.
func (p *pod) awaitTries(count int) {
	p.Helper()
	eventually(p, "on record as tried", func() bool {
		e := p.record()
		return e != nil && e.Steps[len(e.Steps)-1].Tries == count
	})
}

// killCaller waits until the newest call of a faulty plugin is the given one. It then kills the
// unwind process that made this call, as a runtime does at its timeout.
func (n *node) killCaller(call string) {
	n.Helper()
	var last logged
	eventually(n, call, func() bool {
		if all := n.callLog(); len(all) > 0 {
			last = all[len(all)-1]
		}
		return last.Command+" "+last.Instance == call
	})
	status := read(n, fmt.Sprintf("/proc/%d/stat", last.PID))
	parent, err := strconv.Atoi(strings.Fields(status[strings.LastIndex(status, ")"):])[2])
	must(n, err)
	must(n, syscall.Kill(parent, syscall.SIGKILL))
}

// TestRuleOfKilledADD: p1 creates a rule for the pod's address, and then crashes or hangs. unwind
// rolls the ADD back in reverse order, so p1's DEL runs while the pod still has the address, and
// finds the rule.
func TestRuleOfKilledADD(t *testing.T) {
	ends := oneOf("crash-effect", "hang-effect")
	each1(t, ends, func(t *testing.T, end choice) {
		n := newNode(t)
		n.conf["delegateTimeout"] = "10s"
		n.chain(single, p1.rules(), p2)
		n.plan(p1.ADD(end.name))
		text := "netplugin failed"
		if end.is("hang-effect") {
			text = "killed: delegateTimeout (10s) has passed"
		}
		n.wantError(n.pod("a").tryAdd(), `plugin type="faulty" failed (add): `+text)
		n.wantCalls("ADD p0", "ADD p1", "DEL p1", "DEL p0")
		n.wantReserved(0)
		n.wantRules()
		n.wantClean()
	})
}

// TestRuleBeforeAddress: p1's DEL, which finds p1's rule by the pod's address, fails. unwind frees
// the address only after the second try. Until then, the rule cannot apply to another pod.
func TestRuleBeforeAddress(t *testing.T) {
	ends := oneOf(
		"it works again",
		"it works again for a sweep",
		"it keeps failing until the runtime's DEL",
		"it keeps failing until a sweep",
	)
	each1(t, ends, func(t *testing.T, end choice) {
		n := newNode(t)
		n.chain(single, p1.rules())
		a := n.add("a")
		ruleOfA := a.address + ".p1"
		n.plan(p1.DEL("fail"))
		n.wantError(a.tryDel())
		n.wantReserved(1)
		n.wantRules(ruleOfA)
		if end.has("it works again") {
			n.plan()
			if end.is("it works again") {
				a.del()
			} else {
				a.dropNetNS()
				n.sweep()
				a.wantGone()
			}
			n.wantReserved(0)
			n.wantRules()
			n.wantClean()
			return
		}
		n.wantError(a.tryDel())
		n.wantReserved(0)
		n.wantRules(ruleOfA)
		b := n.add("b")
		b.wantAddress(a.address)
		n.forgetCalls()
		n.plan()
		if end.has("the runtime's DEL") {
			a.del()
		} else {
			a.dropNetNS()
			n.sweep()
		}
		a.wantGone()
		n.wantPrevious()
		n.wantRules(ruleOfA) // the rule now belongs to b
		b.del()
		n.wantRules()
		n.wantClean()
	})
}

// TestAddressOfAnotherStore: an IPAM plugin other than host-local frees a pod's address, and
// another pod gets it. In the first pod's late DEL, a plugin that removes rules by address doesn't
// get the address. This is also true after a sweep has deleted the first pod's record.
func TestAddressOfAnotherStore(t *testing.T) {
	frees := oneOf(
		"it frees, then fails",
		"its DEL is killed after it freed",
		"the runtime's DEL comes after a sweep",
		"it comes after the journal was lost",
	)
	each1(t, frees, func(t *testing.T, free choice) {
		n := newNode(t)
		n.chain(p0.address(n.ip(7)+"/24"), p1.rules())
		a := n.add("a")
		switch {
		case free.is("it frees, then fails"):
			n.plan(p0.DEL("fail-effect"), p1.DEL("fail"))
			n.wantError(a.tryDel())
			n.wantError(a.tryDel())
		case free.is("its DEL is killed after it freed"):
			n.mustKill("undone", 2, a.tryDel)
		case free.is("the runtime's DEL comes after a sweep"):
			a.dropNetNS()
			n.sweep()
		case free.is("it comes after the journal was lost"):
			a.dropNetNS()
			n.sweep()
			n.remove(n.stateDir)
		}
		b := n.add("b")
		n.plan()
		ruleOfB := n.ip(7) + ".p1"
		n.wantRules(ruleOfB)
		n.forgetCalls()
		a.del()
		n.wantRules(ruleOfB)
		b.wantRecord(journal.Live)
		b.del()
		n.wantRules()
		n.wantClean()
	})
}

// TestCacheReadOnly: a sweep cannot remove a released attachment from libcni's cache. The sweep
// deletes the record all the same, and the DELs don't run again. The runtime's late DEL takes
// nothing from the next owner of the address.
func TestCacheReadOnly(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.chain(single, p1.rules())
	a := n.add("a")
	a.dropNetNS()
	n.forgetCalls()
	cache := filepath.Join(n.dir, "cache")
	n.shell("mount --bind %[1]s %[1]s && mount -o remount,ro,bind %[1]s", cache)
	n.sweep()
	a.wantGone()
	n.wantCalls("DEL p1", "DEL p0")
	n.sweep()
	n.wantCalls()
	n.shell("umount %s", cache)
	b := n.add("b")
	b.wantAddress(a.address)
	a.del()
	n.wantRules(a.address + ".p1")
	b.del()
	n.wantRules()
	n.wantClean()
}

// TestHangingDELFreesAddress: p1 hangs at each DEL until the runtime kills unwind. The runtime's
// third DEL frees the address, so another pod can get the address while p1 still hangs.
func TestHangingDELFreesAddress(t *testing.T) {
	ends := oneOf("p1 works again", "another pod gets the address")
	each1(t, ends, func(t *testing.T, end choice) {
		n := newNode(t)
		n.budget("Children=500ms")
		n.chain(single, p1.rules())
		a := n.add("a")
		n.plan(p1.DEL("hang"))
		del := a.beginDel()
		a.awaitTries(1)
		n.killCaller("DEL p1")
		n.wantError(del.wait())
		n.wantReserved(1)
		n.forgetCalls()
		del = a.beginDel()
		a.awaitTries(2)
		n.killCaller("DEL p1")
		n.wantError(del.wait())
		n.wantReserved(1)
		n.forgetCalls()
		del = a.beginDel()
		n.killCaller("DEL p1")
		n.wantError(del.wait())
		n.wantReserved(0)
		if end.is("p1 works again") {
			n.plan()
			a.del()
			a.wantGone()
			n.wantReserved(0)
			n.wantRules(a.address + ".p1")
		} else {
			n.hasty()
			b := n.add("b")
			b.wantAddress(a.address)
			n.wantRules(b.address + ".p1")
			n.plan()
			b.del()
			n.sweep()
			a.wantGone()
		}
		n.wantClean()
	})
}

// emptyHostPort removes the rules from portmap's iptables chain for an address.
func (n *node) emptyHostPort(address string) {
	n.Helper()
	for _, rule := range n.rules("-A CNI-DN-") {
		if strings.Contains(rule, " "+address+":") {
			run(n, "iptables", "-w", "-t", "nat", "-F", strings.Fields(rule)[1])
		}
	}
}

// TestHostPortKeepsAddress: portmap's DEL fails, so its rule still forwards to the pod's address.
// The address stays reserved until the machine reboots or portmap's DEL succeeds. The sweep in
// which that DEL succeeds also frees the address.
func TestHostPortKeepsAddress(t *testing.T) {
	releases := oneOf("by a DEL", "by a sweep")
	ends := oneOf("portmap works again", "the machine was started again")
	each2(t, releases, ends, func(t *testing.T, release, end choice) {
		n := newNode(t)
		n.chain(bridge, portmap)
		a := n.add("a")
		repairPortmap := n.breakPlugin("portmap")
		if release.is("by a DEL") {
			n.wantError(a.tryDel(), "portmap (code 999)")
		} else {
			a.dropNetNS()
			n.status()
		}
		n.wantHostPorts(a.address, 1)
		n.wantReserved(1)
		n.sweep()
		n.wantReserved(1)
		a.wantPending("bridge", "portmap")
		if end.is("the machine was started again") {
			if release.is("by a DEL") {
				a.dropNetNS()
			}
			a.ofEarlierBoot()
			n.sweep()
			n.wantReserved(0)
			a.wantPending("portmap")
		}
		repairPortmap()
		n.sweep()
		a.wantGone()
		n.wantReserved(0)
		n.wantClean()
	})
}

// TestHostPortsUnlisted: unwind needs no program that lists firewall rules. Such a program may fail
// or hang.
func TestHostPortsUnlisted(t *testing.T) {
	each1(t, []string{"exit 1", "exec sleep 100"}, func(t *testing.T, how string) {
		n := newNode(t)
		n.chain(bridge, portmap)
		dir := filepath.Join(n.dir, "unlisted")
		n.mkdir(dir)
		for _, program := range []string{"iptables-save", "ip6tables-save", "nft"} {
			must(n, os.WriteFile(filepath.Join(dir, program), []byte("#!/bin/sh\n"+how+"\n"), 0o700))
		}
		n.env = append(n.env, "PATH="+dir+":"+os.Getenv("PATH"))
		a := n.add("a")
		a.del()
		n.wantReserved(0)
		a.wantGone()
		n.wantClean()
	})
}

// TestRulesOfOthers: a rule that forwards to a pod's address, but belongs to another container,
// doesn't keep the address reserved.
func TestRulesOfOthers(t *testing.T) {
	others := oneOf("a chain without a jump", "a network on the same subnet")
	each1(t, others, func(t *testing.T, other choice) {
		n := newNode(t)
		n.chain(bridge, portmap)
		a := n.newPod("a")
		if other.is("a chain without a jump") {
			chain := "CNI-DN-" + n.network
			n.shell("iptables -w -t nat -N %s", chain)
			n.shell("iptables -w -t nat -A %s -p tcp --dport 9 -j DNAT --to-destination %s:80", chain, n.ip(2))
			a.add()
			a.wantAddress(n.ip(2))
			n.wantHostPorts(n.ip(2), 2)
			a.del()
			n.wantReserved(0)
			a.wantGone()
			n.shell("iptables -w -t nat -F %[1]s; iptables -w -t nat -X %[1]s", chain)
		} else {
			b := n.newNetworkOn("o", "other").add("b")
			b.wantAddress(n.ip(2))
			a.add()
			a.wantAddress(n.ip(2))
			n.wantHostPorts(n.ip(2), 2)
			a.del()
			n.wantReserved(0)
			a.wantGone()
			n.wantHostPorts(n.ip(2), 1)
			b.del()
		}
		n.wantClean()
	})
}

// TestHostPortBeforeBoot: a record with a host port is from an earlier boot, and the binary of the
// plugin that forwards the port is missing. A sweep frees the address. The plugin's DEL stays
// pending until the binary is back.
func TestHostPortBeforeBoot(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	ports := "exec " + filepath.Join(n.path[1], "portmap")
	n.script("ports", ports)
	n.chain(bridge, object(`{"type": "ports", "capabilities": {"portMappings": true}}`))
	a := n.add("a")
	n.remove(filepath.Join(n.path[0], "ports"))
	a.reboot()
	n.sweep()
	n.wantReserved(0)
	a.wantPending("ports")
	n.script("ports", ports)
	n.sweep()
	a.wantGone()
	n.wantClean()
}
