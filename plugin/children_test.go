package plugin

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/plugintest/sandbox"
)

// TestChildIsWaitedFor: unwind is killed, and a child of its plugin runs on for a second. The next
// verb waits for the child, and then releases what the child allocated.
func TestChildIsWaitedFor(t *testing.T) {
	each1(t, recoveries, func(t *testing.T, recovery recovery) {
		n := newNode(t)
		n.budget("Children=3m")
		n.chain(p0, p1.delay(1000))
		n.plan(p1.ADD("orphan"))
		a := n.newPod("a")
		n.wantKilled(a.tryAdd())
		n.plan()
		if recovery.name == nextSandbox {
			a.dropNetNS()
		}
		recovery.of(a)
		n.wantClean()
		n.wantBegan("start ADD p0", "end ADD p0", "start ADD p1", "end ADD p1",
			"start DEL p1", "end DEL p1", "start DEL p0")
		n.wantClean()
	})
}

// TestChildrenOfAnOwnerThatDies: a DEL has waited for 6 s for a lock when the unwind process that
// owns the lock is killed. The children of that process's plugin still get the full 5 s to end.
func TestChildrenOfAnOwnerThatDies(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.budget("Children=5s")
	began, goOn, ended := filepath.Join(n.dir, "began"), filepath.Join(n.dir, "go"), filepath.Join(n.dir, "ended")
	n.script("p1", fmt.Sprintf(`[ $CNI_COMMAND = ADD ] && echo "{\"cniVersion\": \"1.0.0\"}" && exit; [ -e %[1]s ] && exit
		touch %[1]s; until [ -e %[2]s ]; do sleep 0.02; done; (sleep 0.3; touch %[3]s) & kill -9 $PPID; wait`,
		began, goOn, ended))
	n.chain(p0, named("p1"))
	a := n.add("a")
	b := n.newPod("b")
	b.ContainerID, b.NetNS = a.ContainerID, a.NetNS
	first := a.beginDel()
	n.awaitFile(began)
	second := b.beginDel()
	time.Sleep(6 * time.Second)
	n.write(goOn, "")
	second.passes()
	n.wantError(first.wait())
	n.awaitFile(ended)
	n.wantLoggedTimes(0, "replacing a lock file")
	n.wantClean()
}

// TestDelEndsALoop: a plugin starts one short program after another in an endless loop, in its ADD
// and in the DEL of the rollback. The runtime's DEL ends both loops.
func TestDelEndsALoop(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.budget("Stop=1s")
	well := filepath.Join(n.dir, "well")
	n.script("p1", fmt.Sprintf(`[ -e %s ] && exit; touch %s/$CNI_COMMAND; while :; do sleep 0.05; done`, well, n.dir))
	n.chain(p0, named("p1"))
	a := n.newPod("a")
	add := a.beginAdd()
	n.awaitFile(filepath.Join(n.dir, "ADD"))
	del := a.beginDel()
	n.awaitFile(filepath.Join(n.dir, "DEL"))
	n.write(well, "")
	del.passes()
	n.wantError(add.wait())
	n.wantClean()
}

// TestDelDuringAdd: the runtime sends the DEL of an attachment whose ADD still runs. The runtime no
// longer waits for that ADD, so the ADD ends and rolls everything back. But if another attachment's
// ADD is releasing this attachment, the DEL waits, and the other ADD continues.
func TestDelDuringAdd(t *testing.T) {
	adds := oneOf("its delegate hangs", "it hangs in its rollback too", "of another attachment")
	each1(t, adds, func(t *testing.T, which choice) {
		n := newNode(t)
		n.hasty()
		n.conf["delegateTimeout"] = nil
		n.chain(p0, p1.delay(700))
		a := n.newPod("a")
		switch {
		case which.is("its delegate hangs"):
			n.plan(p1.ADD("hang-effect"))
			add := a.beginAdd()
			n.awaitCall("ADD p1")
			a.del()
			n.wantError(add.wait(),
				`plugin type="faulty" failed (add): killed: the runtime has sent the DEL of this attachment`)
		case which.is("it hangs in its rollback too"):
			n.plan(p1.ADD("hang-effect"), p1.DEL("hang once"))
			add := a.beginAdd()
			n.awaitCall("ADD p1")
			a.del()
			n.wantError(add.wait())
			n.wantTimes(2, "DEL p1")
			n.wantEnded("DEL p1")
		case which.is("of another attachment"):
			b := a.nextSandbox("b")
			a.add()
			a.dropNetNS()
			n.plan(p1.DEL("late"))
			add := b.beginAdd()
			n.awaitCall("DEL p1")
			a.del()
			add.passes()
			b.del()
		}
		n.wantClean()
	})
}

// TestDaemonOutlivesUnwind: a plugin starts a daemon, and unwind is killed while the next plugin
// runs. That plugin ends, but the daemon does not. The next verb succeeds all the same.
func TestDaemonOutlivesUnwind(t *testing.T) {
	status := recovery{"STATUS", func(p *pod) {
		p.dropNetNS()
		p.until(0, func() { p.status() })
	}}
	each1(t, append(slices.Clone(recoveries), status), func(t *testing.T, recovery recovery) {
		n := newNode(t)
		n.hasty()
		n.chain(p0, p1)
		n.plan(p0.ADD("daemon"), p1.ADD("kill-parent-effect"))
		a := n.newPod("a")
		n.wantKilled(a.tryAdd())
		n.plan()
		recovery.of(a)
		n.wantClean()
		n.wantEnded("ADD p1")
		n.wantCount("daemons", len(leftBy(n, n.callLog()[0].Path, "daemon")), 1)
		n.wantClean()
	})
}

// leftBy returns the child processes that faulty plugins started in a role, "daemon" or "orphan".
// The CNI_PATH of these plugins is path.
func leftBy(t testing.TB, path, role string) []int {
	t.Helper()
	var pids []int
	all, err := facts.Processes()
	for _, pid := range all {
		cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err != nil || !bytes.HasSuffix(cmdline, []byte("\x00"+role+"\x00")) {
			continue
		}
		environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if err == nil && bytes.Contains(environ, []byte("CNI_PATH="+path)) {
			pids = append(pids, pid)
		}
	}
	must(t, err)
	return pids
}

// TestTwoAdds: of two simultaneous ADDs of one container ID, exactly one succeeds, and the plugins
// run only for that one.
func TestTwoAdds(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.chain(bridge, p0.delay(300), p1.delay(100))
	n.plan(everyone.ADD("late"))
	a := n.newPod("a")
	first := a.beginAdd()
	n.awaitCall("ADD p0")
	n.wantError(a.tryAdd(), "is already attached (in the same network namespace); delete it first")
	first.passes()
	n.wantBegan("start ADD p0", "end ADD p0", "start ADD p1", "end ADD p1")
	n.wantCalls("ADD p0", "ADD p1")
	a.wantRecord(journal.Live)
	n.plan()
	a.del()
	n.wantClean()
}

// TestHangingChainsHoldNobodyUp: while a plugin hangs for 16 pods, in ADD or in DEL, another pod's
// ADD and DEL succeed and update the journal.
func TestHangingChainsHoldNobodyUp(t *testing.T) {
	each1(t, []string{"ADD", "DEL"}, func(t *testing.T, verb string) {
		n := newNode(t)
		n.chain(p0)
		var hanging []*pod
		if verb == "DEL" {
			hanging = n.crowd(16, "hanging")
		} else {
			for i := range 16 {
				hanging = append(hanging, n.newPod(fmt.Sprintf("hanging%02d", i)))
			}
		}
		n.plan(inPod("hanging").on(verb, "hold"))
		var requests []*underWay
		for _, p := range hanging {
			if verb == "ADD" {
				requests = append(requests, p.beginAdd())
			} else {
				requests = append(requests, p.beginDel())
			}
		}
		n.awaitHeld(verb, "hanging15", "p0")
		other := n.add("other")
		other.wantRecord(journal.Live)
		other.del()
		other.wantGone()
		n.plan()
		n.shell("rm %s/held/*", n.faultyDir())
		for _, r := range requests {
			r.passes()
		}
		for _, p := range hanging {
			p.del()
		}
		n.wantClean()
	})
}

// headless ends the first thread of this process, and the whole process after a minute. See
// TestMain.
func headless() {
	runtime.LockOSThread()
	go func() {
		time.Sleep(time.Minute)
		os.Exit(0)
	}()
	_, _, _ = unix.RawSyscall(unix.SYS_EXIT, 0, 0, 0)
}

// confined is a shell command that starts unwind, $0, without CAP_SYS_PTRACE. unwind then cannot
// inspect the tests' processes, because they have this capability.
const (
	confined = `exec ` + less + `"$0"`
	less     = `setpriv --bounding-set -sys_ptrace --inh-caps -sys_ptrace `
)

// Shell commands for askOnNode. enter starts a process in the pod's namespace, and waits until that
// process has entered the namespace.
const (
	enter = `nsenter --net="$POD" sleep 60 & while
	[ "$(stat -L -c %i /proc/$!/net/dev)" = "$(stat -L -c %i /proc/1/net/dev)" ]; do :; done; `
	umount = `umount "$POD"; `
	hide   = `mount -t proc -o hidepid=2,gid=12345 proc /proc; `
)

// askOnNode runs shell commands as process 1 of a new PID namespace, and then a verb of unwind.
func (p *pod) askOnNode(verb string, commands ...string) {
	p.Helper()
	script := strings.ReplaceAll(strings.Join(commands, "")+`"$0"`, "$POD", p.NetNS)
	p.askBy(verb, `exec unshare --pid --fork --kill-child --mount-proc sh -c '`+script+`; exit $?' "$0"`)
}

// askBy runs a shell command in a new mount namespace. In the command, $0 is unwind, which gets the
// verb. If the verb is GC, the runtime's list contains only this pod.
func (p *pod) askBy(verb, command string) {
	p.Helper()
	p.outer = "1.1.0" // this version has all verbs
	changes := keys{}
	if verb == "GC" {
		changes = valid(p)
	}
	in := p.input(verb, p.entryOf(p.chainOf(p.plugins()...), changes))
	in.first = command
	out := p.start(in)
	p.want(out.code == 0, "%s", out.stdout)
	p.Logf("%s: %s", verb, out.stderr)
}

// enterHeadless starts a process in the pod's namespace, and waits until the first thread of that
// process has ended.
func (p *pod) enterHeadless() {
	p.Helper()
	cmd := exec.Command("nsenter", "--net="+p.NetNS, fmt.Sprintf("/proc/%d/exe", os.Getpid()))
	cmd.Env = append(os.Environ(), headlessEnv+"=1")
	p.spawn(cmd)
	eventually(p, "the first thread gone", func() bool { return ended(cmd.Process) })
}

// TestConfinedNode runs a STATUS in new PID and mount namespaces, in which the pod's namespace is
// no longer mounted. unwind releases the pod only if unwind can inspect all processes.
func TestConfinedNode(t *testing.T) {
	type test struct {
		name     string
		commands []string
		unknown  bool // unwind cannot tell whether the pod is alive
	}
	tests := []test{
		{"lost", []string{umount}, false},
		{"lost, processes hidden from others", []string{hide, umount}, false},
		{"unknown, lost", []string{umount, less}, true},
		{"unknown, a process inside", []string{enter, umount, less}, true},
		{"unknown, lost, processes hidden", []string{hide, umount, less}, true},
		{"unknown, a process inside, processes hidden", []string{enter, umount, hide, less}, true},
	}
	each1(t, tests, func(t *testing.T, tt test) {
		n := newNode(t)
		n.chain(p0)
		a := n.add("a")
		a.askOnNode("STATUS", tt.commands...)
		if tt.unknown {
			a.wantKept()
		} else {
			n.wantClean()
		}
	})
}

// TestConfinedOrphan: the owner of an address is neither on the GC's list nor in the journal. The
// GC releases the address only if unwind can inspect the network namespaces of all processes.
func TestConfinedOrphan(t *testing.T) {
	each1(t, oneOf("all can be inspected", "not"), func(t *testing.T, which choice) {
		n := newNode(t)
		n.conf["gracePeriod"] = "1ms"
		n.chain(bridge)
		n.reserve(n.ip(7), "orphan", "eth0")
		time.Sleep(10 * time.Millisecond)
		a := n.newPod("a")
		if which.is("all can be inspected") {
			a.askOnNode("GC", enter, umount)
			n.wantReserved(0)
			n.wantClean()
		} else {
			a.askOnNode("GC", enter, umount, less)
			n.wantReserved(1)
		}
	})
}

// TestFirstThreadEnds: a pod is live as long as any thread of a process is in its namespace, even
// if the first thread of that process has ended.
func TestFirstThreadEnds(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.chain(p0)
	a := n.add("a")
	a.enterHeadless()
	a.unpin()
	a.askBy("STATUS", ":")
	a.wantRecord(journal.Live)
	a.askBy("STATUS", confined)
	a.wantRecord(journal.Live)
}

// TestOnThread: facts.OnThread never runs a function on the process's first thread. No goroutine
// runs on the function's thread afterwards.
func TestOnThread(t *testing.T) {
	sandbox.Need(t)
	t.Parallel()
	if os.Getenv(unlockedEnv) == "" {
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestOnThread$", "-test.count=1")
		cmd.Env = append(os.Environ(), unlockedEnv+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
		return
	}
	mine, err := os.Readlink("/proc/self/ns/net")
	must(t, err)
	var first, elsewhere atomic.Int64
	var all sync.WaitGroup
	for i := range 400 {
		all.Go(func() {
			if there, err := os.Readlink("/proc/thread-self/ns/net"); err != nil || there != mine {
				elsewhere.Add(1)
			}
			facts.OnThread(func() {
				if unix.Gettid() == os.Getpid() {
					first.Add(1)
				}
				// Block this thread, so that the Go scheduler needs all others, even the first one.
				_ = unix.Nanosleep(&unix.Timespec{Nsec: 1e6}, nil)
				if i%20 == 0 {
					if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
						t.Error(err)
					}
				}
			})
		})
	}
	all.Wait()
	if first.Load() > 0 || elsewhere.Load() > 0 {
		t.Errorf("%d times it was the first thread; %d times others were in another namespace", first.Load(), elsewhere.Load())
	}
}
