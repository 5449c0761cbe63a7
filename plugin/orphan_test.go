package plugin

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/plugintest/sandbox"
)

// TestOrphanIsWaitedFor: a delegate's child that outlives its unwind and soon ends is waited for, and
// what it takes late is released.
func TestOrphanIsWaitedFor(t *testing.T) {
	stories(t, `
	budget Orphans 3m; chain p0 | p1, "delayMS": 1000
	plan p1 ADD orphan; killed add a; plan
	either then DEL: recover a DEL
	or then ADD: recover a ADD
	or then the next sandbox: drop a; recover a next sandbox
	clean; began start ADD p0, end ADD p0, start ADD p1, end ADD p1, start DEL p1, end DEL p1, start DEL p0`)
}

// TestOrphansOfAnOwnerThatDies: a verb has long waited for a lock when its owner dies. A child of the
// owner's delegate still gets its own time to end.
func TestOrphansOfAnOwnerThatDies(t *testing.T) {
	stories(t, `
	budget Orphans 5s; script p1 '[ $CNI_COMMAND = ADD ] && echo "{\"cniVersion\": \"1.0.0\"}" && exit; [ -e $dir/began ] && exit;
		touch $dir/began; until [ -e $dir/go ]; do sleep 0.02; done; (sleep 0.3; touch $dir/ended) & kill -9 $PPID; wait'
	chain p0 | {"type": "p1"}; add a; as b a; names b $netns/a
	start del a; appears $dir/began; start del b; pause 6s; file $dir/go
	wait del b; fails wait del a; appears $dir/ended; logged 'replacing a lock file' 0`)
}

// TestDelEndsALoop: the plugin of an ADD runs one short program after the other, and never ends, at
// its ADD and at the DEL of its rollback. The runtime's DEL does not wait for as long as they do.
func TestDelEndsALoop(t *testing.T) {
	stories(t, `
	budget Stop 1s; script p1 '[ -e $dir/well ] && exit; touch $dir/$CNI_COMMAND; while :; do sleep 0.05; done'
	chain p0 | {"type": "p1"}
	start add a; appears $dir/ADD; start del a; appears $dir/DEL; file $dir/well
	wait del a; fails wait add a`)
}

// TestDelDuringAdd: an ADD that still runs ends once a DEL of its attachment comes, and rolls everything back: the
// runtime is dead, or has given the ADD up. An ADD of another attachment that releases this one meanwhile is waited
// for, and does not end.
func TestDelDuringAdd(t *testing.T) {
	stories(t, `
	hasty; conf delegateTimeout; chain p0 | p1, "delayMS": 700
	either its delegate hangs: plan p1 ADD hang-effect; start add a; awaits ADD p1; del a
		fails wait add a 'plugin type="faulty" failed (add): killed: the runtime has sent the DEL of this attachment'
	or it hangs in its rollback too: plan p1 ADD hang-effect, p1 DEL hang once; start add a; awaits ADD p1; del a; fails wait add a
		times 2 DEL p1; ends DEL p1
	or of another attachment: sandbox a b; add a; drop a; plan p1 DEL late; start add b; awaits DEL p1; del a; wait add b; del b
	clean`)
}

// TestDaemonOutlivesUnwind: unwind is killed after a delegate has left a daemon. The delegate that still runs ends, and
// the daemon does not. It doesn't hold the attachment up either.
func TestDaemonOutlivesUnwind(t *testing.T) {
	stories(t, `
	hasty; chain p0 | p1
	plan p0 ADD daemon, p1 ADD kill-parent-effect; killed add a; plan
	either then DEL: recover a DEL
	or then ADD: recover a ADD
	or then the next sandbox: recover a next sandbox
	or then STATUS: drop a; until 0 status
	clean; ends ADD p1; daemons`, acts{
		"daemons": func(s *story, _ []string) {
			daemons := leftBy(s, s.callLog()[0].Path, "daemon")
			s.want(len(daemons) == 1, "%d live", len(daemons))
		},
	})
}

// leftBy returns the children in a role, daemon or orphan, of faulty plugins with this CNI_PATH.
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

// TestTwoAdds: of two ADDs of one container ID at once exactly one succeeds, and no delegate runs
// for both at once.
func TestTwoAdds(t *testing.T) {
	stories(t, `
	chain bridge | p0, "delayMS": 300 | p1, "delayMS": 100
	plan * ADD late; start add a; awaits ADD p0
	fails add a 'is already attached (in the same network namespace); delete it first'; wait add a
	began start ADD p0, end ADD p0, start ADD p1, end ADD p1; calls ADD p0, ADD p1; entry a live
	plan; del a`)
}

// TestHangingChainsHoldNobodyUp: beside 16 pods whose delegate hangs, in ADD or in DEL, another pod's
// verbs end, and are in the journal.
func TestHangingChainsHoldNobodyUp(t *testing.T) {
	of16 := func(statement string) (script string) {
		for i := range 16 {
			script += fmt.Sprintf("; %s hanging%02d", statement, i)
		}
		return strings.TrimPrefix(script, "; ")
	}
	stories(t, `
	chain p0; let held $dir/faulty/held
	either ADD: let verb add; let command ADD
	or DEL: let verb del; let command DEL; crowd 16 hanging
	plan pod:hanging $command hold
	`+of16("start $verb")+`
	appears $held/$command.hanging15.p0; add other; entry other live; del other; gone other
	plan; shell 'rm $held/*'
	`+of16("wait $verb")+`
	`+of16("del"))
}

// headless runs this program as one whose first thread has ended: see TestMain.
func headless() {
	runtime.LockOSThread()
	go func() {
		time.Sleep(time.Minute)
		os.Exit(0)
	}()
	_, _, _ = unix.RawSyscall(unix.SYS_EXIT, 0, 0, 0)
}

// confined is a shell's command that starts unwind without the right to inspect processes that have
// more capabilities. The tests' processes then have one more: this right.
const (
	confined = `exec ` + less + `"$0"`
	less     = `setpriv --bounding-set -sys_ptrace --inh-caps -sys_ptrace `
)

// commands are a shell's: enter starts a process in the pod's namespace and waits until it is there;
// confined is as above.
var commands = map[string]string{
	"enter": `nsenter --net="$POD" sleep 60 & while
	[ "$(stat -L -c %i /proc/$!/net/dev)" = "$(stat -L -c %i /proc/1/net/dev)" ]; do :; done; `,
	"umount":   `umount "$POD"; `,
	"hide":     `mount -t proc -o hidepid=2,gid=12345 proc /proc; `,
	"confined": less,
}

// onNode is a shell's command that runs a script as process 1 of a PID namespace, instead of
// unwind.
func (p *pod) onNode(script string) string {
	return `exec unshare --pid --fork --kill-child --mount-proc sh -c '` +
		strings.ReplaceAll(script, "$POD", p.NetNS) + `; exit $?' "$0"`
}

// confinement are statements of these tests.
func confinement() acts {
	// by asks unwind, which is $0, by a shell's command in a mount namespace of its own.
	by := func(s *story, verb string, p *pod, command string) {
		s.outer = "1.1.0" // which has them all
		changes := map[string]any{}
		if verb == "GC" {
			changes = valid(p)
		}
		in := p.input(verb, s.entryOf(s.chainOf(s.plugins(s.node)...), changes))
		in.first = command
		out := s.node.start(in)
		s.want(out.code == 0, "%s", out.stdout)
		s.Logf("%s: %s", verb, out.stderr)
	}
	return acts{
		"confined":   func(s *story, w []string) { by(s, "STATUS", s.who(w[0]), confined) },
		"unconfined": func(s *story, w []string) { by(s, "STATUS", s.who(w[0]), ":") },
		// node VERB POD WORDS: unwind runs where the shell's commands of these words were run before
		"node": func(s *story, w []string) {
			script := ""
			for _, word := range w[2:] {
				script += commands[word]
			}
			by(s, w[0], s.who(w[1]), s.who(w[1]).onNode(script+`"$0"`))
		},
		// headless POD: a process is in it whose first thread has ended
		"headless": func(s *story, w []string) {
			self, err := os.Executable()
			s.must(err)
			cmd := exec.Command("nsenter", "--net="+s.who(w[0]).NetNS, self)
			cmd.Env = append(os.Environ(), headlessEnv+"=1")
			s.spawn(cmd)
			eventually(s, "the first thread gone", func() bool { return ended(cmd.Process) })
		},
	}
}

// TestConfinedNode runs a node in a PID and a mount namespace, with a process 1 and perhaps one in
// the pod.
func TestConfinedNode(t *testing.T) {
	stories(t, `
	chain p0; add a
	either lost: node STATUS a umount
	or lost, processes hidden from others: node STATUS a hide umount
	or unknown, lost: node STATUS a umount confined
	or unknown, a process inside: node STATUS a enter umount confined
	or unknown, lost, processes hidden: node STATUS a hide umount confined
	or unknown, a process inside, processes hidden: node STATUS a enter umount hide confined
	if unknown: entry a; leaves`, confinement())
}

// TestConfinedOrphan: an address that host-local keeps for nobody is released if the network
// namespaces of all processes can be inspected.
func TestConfinedOrphan(t *testing.T) {
	stories(t, `
	conf gracePeriod 1ms; chain bridge; reserve $ip7 orphan eth0; pause 10ms
	either all can be inspected: node GC a enter umount; reserved 0
	or not: node GC a enter umount confined; reserved 1; leaves`, confinement())
}

// TestFirstThreadEnds: a process is in a pod's namespace as long as any of its threads lives.
func TestFirstThreadEnds(t *testing.T) {
	stories(t, `
	chain p0; add a; headless a; unpin a
	unconfined a; entry a live; confined a; entry a live
	leaves`, confinement())
}

// TestOnThread: the thread that enters a network namespace is never the first one, and does nothing
// else afterwards.
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
				// All threads are taken, the first one too.
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
