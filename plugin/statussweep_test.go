package plugin

import (
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/plugintest/sandbox"
)

// TestStatusSweeps: a STATUS releases dead attachments, even those of other networks. It releases
// no live attachment, none whose lock is held, and none if sweepOnStatus is false. It does not wait
// for locks.
func TestStatusSweeps(t *testing.T) {
	sandbox.Concurrent(t)
	deaths := oneOf(
		"namespace gone",
		"ADD cut off in its first delegate",
		"ADD cut off after its first result, namespace gone",
		"ADD and its DEL failed",
		"DEL failed",
		"earlier boot",
	)
	each1(t, deaths, func(t *testing.T, death choice) {
		n := newNode(t)
		n.chain(p0, p1, p2, p3)
		live := n.add("live")
		a := n.newPod("a")
		switch {
		case death.is("namespace gone"):
			a.add()
			a.dropNetNS()
		case death.is("ADD cut off in its first delegate"):
			n.plan(p0.ADD("kill-parent-effect"))
			n.wantKilled(a.tryAdd())
			a.awaitLock()
		case death.is("ADD cut off after its first result, namespace gone"):
			n.plan(p2.ADD("kill-parent-effect"))
			n.wantKilled(a.tryAdd())
			a.awaitLock()
			a.dropNetNS()
		case death.is("ADD and its DEL failed"):
			n.plan(p2.ADD("fail-effect"), p1.DEL("fail"))
			n.wantError(a.tryAdd())
		case death.is("DEL failed"):
			a.add()
			n.plan(p2.DEL("fail"))
			n.wantError(a.tryDel())
		case death.is("earlier boot"):
			a.add()
			a.ofEarlierBoot()
		}
		n.plan()
		taken := n.taken()
		another := n.newNetwork("of-another")
		another.status(keys{"sweepOnStatus": false})
		n.wantTaken(taken...)
		if !death.is("ADD cut off in its first delegate") {
			unlock := a.lock()
			another.status()
			unlock()
			n.wantTaken(taken...)
		}
		n.until(1, func() { another.status() })
		live.wantRecord(journal.Live, 4)
		n.wantTaken("live.eth0.p0", "live.eth0.p1", "live.eth0.p2", "live.eth0.p3")
		live.del()
		n.wantClean()
	})
}

// TestStatusHasNoList: a runtime's list of valid attachments is for GC. If the list is on the stdin
// of a STATUS, unwind ignores it, and no plugin gets it. A GC with the same list releases the
// attachment.
func TestStatusHasNoList(t *testing.T) {
	each1(t, []string{validKey, slipKey}, func(t *testing.T, key string) {
		n := newNode(t)
		n.chain(p0, p1, p2, p3)
		a := n.add("a")
		n.forgetCalls()
		list := keys{key: rawJSON(`[]`)}
		n.status(list)
		n.versions("1.0.0", "1.1.0")
		n.status(list)
		n.wantCount("calls", len(n.callLog()), 4)
		for _, l := range n.callLog() {
			n.want(l.Command == "STATUS" && l.Stdin[validKey] == nil && l.Stdin[slipKey] == nil,
				"%s: %v", l.Command, l.Stdin)
		}
		a.wantRecord(journal.Live, 4)
		n.versions("1.0.0", "1.0.0")
		n.gc(list)
		n.wantClean()
	})
}

// TestStatusReleasesEmpty: a STATUS, and the sweep after a failed ADD, release an address if its
// file is empty and host-local never wrote an owner. They do so even if the pool is not full.
func TestStatusReleasesEmpty(t *testing.T) {
	each1(t, oneOf("STATUS", "a failed ADD"), func(t *testing.T, by choice) {
		n := newNode(t)
		n.chain(bridge)
		a := n.add("a")
		a.del()
		n.reserve(n.ip(2))
		n.wantReserved(1)
		n.status()
		if by.is("a failed ADD") {
			n.reserve(n.ip(2))
			n.chain(bridge, p1)
			n.plan(p1.ADD("fail"))
			n.wantError(n.newPod("b").tryAdd())
		}
		n.wantReserved(0)
	})
}

// TestCutOffReservation: a power loss has emptied or truncated the host-local file of a dead pod.
// The next sweep removes the file and the record. It keeps the file of a live pod in the same pool.
func TestCutOffReservation(t *testing.T) {
	type cut struct {
		name         string
		kept, zeroed string // sizes in bytes: after the cut, and with zeros added
	}
	cuts := []cut{
		{"empty", "0", "0"},
		{"zeros", "0", "12"},
		{"in the container ID", "4", "4"},
		{"before the interface", "10", "10"},
		{"in the interface", "12", "12"},
		{"in the interface, then zeros", "12", "15"},
	}
	each2(t, cuts, []string{"status", "gc", "sweep"}, func(t *testing.T, cut cut, by string) {
		n := newNode(t)
		n.chain(bridge, firewall)
		container, other := n.add("container"), n.add("other")
		container.reboot()
		n.shell("iptables -D CNI-FORWARD -s %[1]s/32 -j ACCEPT; "+
			"iptables -D CNI-FORWARD -d %[1]s/32 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
			container.address) // rules do not survive a reboot
		n.shell("touch -r %[1]s %[1]s.ref; truncate -s %[2]s %[1]s; truncate -s %[3]s %[1]s; "+
			"touch -r %[1]s.ref %[1]s; rm %[1]s.ref", n.poolFile(container.address), cut.kept, cut.zeroed)
		n.until(1, func() {
			switch by {
			case "status":
				n.status()
			case "gc":
				n.gc()
			case "sweep":
				n.sweep()
			}
		})
		n.wantOwners(other.address + " other eth0")
		other.del()
		n.wantClean()
	})
}

// TestEmptiedFileOfALivePod: a live pod keeps its address after somebody has emptied the address's
// file.
func TestEmptiedFileOfALivePod(t *testing.T) {
	each1(t, oneOf("STATUS", "unwindctl sweep"), func(t *testing.T, by choice) {
		n := newNode(t)
		n.chain(bridge)
		a := n.add("a")
		n.reserve(n.ip(2))
		if by.is("STATUS") {
			n.status()
		} else {
			n.sweep()
		}
		n.wantReserved(1)
		b := n.add("b")
		n.wantReserved(2)
		b.del()
		a.del()
		n.chain(bridge, p1)
		n.plan(p1.ADD("fail"))
		n.wantError(n.newPod("c").tryAdd())
		n.wantReserved(0)
	})
}

// TestSlowDELBehindStatus: the DELs of three failed ADDs take longer than a STATUS may take, and
// the DEL of a fourth fails. The runtime calls only STATUS, several times. Each STATUS ends while
// the slow DELs run. Each slow DEL runs once, is not killed, and succeeds.
func TestSlowDELBehindStatus(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.budget("Status=8s") // at a load average of 25, a STATUS that waits for nothing took over 2 s
	n.versions("1.1.0", "1.0.0")
	n.chain(p0, p1)
	n.plan(p1.ADD("fail"), p0.DEL("fail"))
	slow := []*pod{n.newPod("a"), n.newPod("b"), n.newPod("c")}
	for _, p := range slow {
		n.wantError(p.tryAdd())
	}
	worst := n.newPod("worst")
	n.wantError(worst.tryAdd())
	n.pauseLast(4, 0)
	n.forgetCalls()
	n.plan(p0.DEL("hold"), inPod("worst").DEL("fail"))
	n.libcniStatus()
	for _, p := range slow {
		n.awaitHeld("DEL", p.ContainerID, "p0")
	}
	time.Sleep(8500 * time.Millisecond)
	n.libcniStatus()
	n.libcniStatus()
	for _, p := range slow {
		p.wantDELs(1)
	}
	n.plan(inPod("worst").DEL("fail"))
	for _, p := range slow {
		n.letGo("DEL", p.ContainerID, "p0")
	}
	n.awaitSweep()
	for _, p := range slow {
		p.wantDELs(1)
		p.wantGone()
	}
	worst.wantRecord(journal.RollingBack, 1)
	n.plan()
	n.sweep()
	n.wantClean()
}

// TestStatusOpensJournalOnce: a STATUS opens the journal once, however many DELs are pending, and
// starts no sweep while none of them is due. ADD and DEL of another pod each open it twice.
func TestStatusOpensJournalOnce(t *testing.T) {
	each1(t, []int{1, 300}, func(t *testing.T, many int) {
		n := newNode(t)
		a := n.addOwing("a", 7)
		a.copies(many, "")
		n.pauseLast(many, 4*time.Minute)
		a.retryIn(4 * time.Minute)
		n.wantCount("openings", n.openings(func() { n.status() }), 1)
		a.wantDELs(0)
		n.plan()
		b := n.newPod("b")
		// a slow DEL opens the journal once more, so the test repeats ADD and DEL until the DEL is fast
		eventually(n, "a pair that opens the journal so often", func() bool {
			return n.openings(b.add) == 2 && n.openings(b.del) == 2
		})
	})
}

// openings returns how often a request opens the journal's file.
func (n *node) openings(request func()) (count int) {
	n.Helper()
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	must(n, err)
	defer func() { _ = unix.Close(fd) }()
	// the kernel merges equal events that follow each other; IN_CLOSE events separate the openings
	_, err = unix.InotifyAddWatch(fd, n.store.Path(), unix.IN_OPEN|unix.IN_CLOSE)
	must(n, err)
	request()
	events := make([]byte, 1<<20)
	size, err := unix.Read(fd, events)
	must(n, err)
	for at := 0; at < size; at += unix.SizeofInotifyEvent { // events on a file contain no name
		if binary.NativeEndian.Uint32(events[at+4:])&unix.IN_OPEN != 0 {
			count++
		}
	}
	return count
}

// sweepOfStatus runs a STATUS that starts a sweep, and waits until a plugin holds the sweep's first
// DEL of the pod.
func (n *node) sweepOfStatus() (a *pod) {
	n.Helper()
	n.budget("Status=2s")
	n.versions("1.1.0", "1.0.0")
	n.chain(p0, p1)
	a = n.add("a")
	a.dropNetNS()
	n.forgetCalls()
	n.plan(inPod("a").DEL("hold"))
	n.libcniStatus()
	n.awaitHeld("DEL", "a", "p1")
	return a
}

// sweepLock is the lock file of a sweep that a STATUS started. It contains the sweep's process ID.
func (n *node) sweepLock() string { return filepath.Join(n.stateDir, "sweep.lock") }

// TestOneSweepBehindStatus: while a sweep that a STATUS started runs, the sweep of another STATUS
// exits immediately. After five minutes, another sweep may run, but it does not release the
// attachment that the first sweep works on.
func TestOneSweepBehindStatus(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	runningFor := func(d time.Duration) {
		n.Helper()
		must(n, os.Chtimes(n.sweepLock(), time.Time{}, time.Now().Add(-d)))
	}
	a := n.sweepOfStatus()
	b := n.add("b")
	b.dropNetNS()
	n.libcniStatus()
	runningFor(4 * time.Minute)
	n.libcniStatus()
	b.wantRecord(journal.Live)
	runningFor(6 * time.Minute)
	n.libcniStatus()
	b.awaitGone()
	a.wantDELs(1)
	runningFor(time.Hour)
	n.plan()
	n.letGo("DEL", "a", "p1")
	n.awaitSweep()
	a.wantGone()
	n.wantClean()
}

// TestSweepBehindStatusEnds: SIGTERM ends the sweep that a STATUS started, and the plugin that the
// sweep runs. The sweep starts no further plugin, and records that the interrupted DEL was tried.
// The next sweep completes the work.
func TestSweepBehindStatusEnds(t *testing.T) {
	sandbox.Concurrent(t)
	t.Parallel()
	n := newNode(t)
	a := n.sweepOfStatus()
	b := n.add("b")
	b.dropNetNS()
	pid, err := strconv.Atoi(strings.TrimSpace(read(n, n.sweepLock())))
	must(n, err)
	must(n, syscall.Kill(pid, syscall.SIGTERM))
	n.awaitSweep()
	a.wantRecord(journal.Deleting, 2)
	var tries []int // in the order of the chain
	for _, step := range a.record().Steps {
		tries = append(tries, step.Tries)
	}
	n.want(slices.Equal(tries, []int{0, 1}), "tries: %v", tries)
	n.wantEnded("DEL p1")
	n.plan()
	n.status()
	a.wantGone()
	b.wantGone()
	n.wantClean()
}

// TestSweepBehindStatusInherits: the process that a STATUS starts has a session of its own, no
// descriptor of the runtime, and no CNI_COMMAND. Its arguments and environment, which others may
// read, do not contain the configuration. Its plugins do not inherit the sweep's lock.
func TestSweepBehindStatusInherits(t *testing.T) {
	sandbox.Concurrent(t)
	t.Parallel()
	n := newNode(t)
	n.script("spy", fmt.Sprintf(`cat >/dev/null; if [ $CNI_COMMAND = ADD ]; then echo "{\"cniVersion\": \"1.0.0\"}"; exit; fi
		p=/proc/$PPID; cd %s; cat $p/cmdline >args; cat $p/environ >environ; cut -d" " -f1,5,6 $p/stat >ids
		ls -l $p/fd >fds; ls -l /proc/self/fd >its-fds`, n.dir))
	n.versions("1.1.0", "1.0.0")
	n.chain(object(`{"type": "spy", "password": "s3cret"}`))
	a := n.add("a")
	a.dropNetNS()
	leaked := filepath.Join(n.dir, "leaked")
	n.write(leaked, "")
	a.give("STATUS", given{env: map[string]string{"MARK": "1"}, first: ": && exec 7<" + leaked})
	a.wantGone()
	file := func(name string) string { return read(n, filepath.Join(n.dir, name)) }
	args, environ, fds, itsFDs := file("args"), file("environ"), file("fds"), file("its-fds")
	n.want(strings.HasSuffix(args, "/unwind\x00sweep\x00"), "arguments %q", args)
	n.want(!strings.Contains(args+environ, "s3cret"), "%s %s", args, environ)
	n.want(strings.Contains(environ, "MARK=1\x00") && strings.Contains(environ, "CNI_PATH=") &&
		!strings.Contains(environ, "CNI_COMMAND"), "environment %s", environ)
	for _, what := range []string{" 0 -> /memfd:unwind (deleted)", " 1 -> /dev/null", " 2 -> /dev/null", "/sweep.lock"} {
		n.want(strings.Contains(fds, what), "no %s in %s", what, fds)
	}
	n.want(!strings.Contains(fds, "/leaked") && !strings.Contains(itsFDs, "sweep.lock"), "%s %s", fds, itsFDs)
	var pid, group, session int
	_, err := fmt.Sscan(file("ids"), &pid, &group, &session)
	n.want(err == nil && pid == group && pid == session, "process, group, session: %s", file("ids"))
	n.wantClean()
}

// TestSweepIsForStatus: only a STATUS can start `unwind sweep`, the process that sweeps for it.
func TestSweepIsForStatus(t *testing.T) {
	sandbox.Concurrent(t)
	each1(t, oneOf("a person", "with a configuration"), func(t *testing.T, who choice) {
		n := newNode(t)
		n.chain(p0)
		a := n.add("a")
		a.dropNetNS()
		cmd := exec.Command(filepath.Join(n.path[0], "unwind"), "sweep")
		if who.is("with a configuration") {
			cmd.Stdin = strings.NewReader(n.entryOf(n.chainOf(n.plugins()...), nil))
		}
		out, err := cmd.CombinedOutput()
		n.want(err != nil && strings.Contains(string(out), "run unwindctl sweep instead"), "%v: %s", err, out)
		a.wantRecord(journal.Live)
		n.sweep()
		n.wantClean()
	})
}
