package plugin

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"cni-unwind/plugin/facts"
)

// TestOrphanIsWaitedFor: a delegate that outlives its unwind and soon ends is not killed, and what
// it takes late is released.
func TestOrphanIsWaitedFor(t *testing.T) {
	stories(t, `
	budget Orphans 3m; chain p0 | p1, "delayMS": 1000
	plan p1 ADD orphan; killed add a; plan
	either then DEL: recover a DEL
	or then ADD: recover a ADD
	or then the next sandbox: drop a; recover a next sandbox
	clean; began start ADD p0, end ADD p0, start ADD p1, end ADD p1, start DEL p1, end DEL p1, start DEL p0`)
}

// TestOrphanIsEnded: a delegate that outlives its unwind for too long is killed, with its children,
// before anything else happens to the attachment.
func TestOrphanIsEnded(t *testing.T) {
	stories(t, `
	hasty; chain p0 | p1, "delayMS": 600000
	either orphan: let mode orphan
	or kill-parent: let mode kill-parent
	or kill-parent-effect: let mode kill-parent-effect
	either in ADD: let call ADD p1; plan p1 ADD $mode; killed add a
	or in DEL: let call DEL p1; plan p1 DEL $mode; add a; killed del a
	plan
	either then DEL: recover a DEL
	or then ADD: recover a ADD
	or then the next sandbox: recover a next sandbox
	or then STATUS: drop a; until 0 status
	clean; ends $call; orphans`, acts{"orphans": func(s *story, _ []string) {
		left := leftBy(s, s.callLog()[0].Path, "orphan")
		s.want(len(left) == 0, "%v live", left)
	}})
}

// TestOrphansOfAnOwnerThatDies: a verb has long waited for a lock when its owner dies. The owner's
// delegate still gets its own time to end.
func TestOrphansOfAnOwnerThatDies(t *testing.T) {
	stories(t, `
	budget Orphans 5s; script p1 '[ $CNI_COMMAND = ADD ] && echo "{\"cniVersion\": \"1.0.0\"}" && exit; [ -e $dir/began ] && exit;
		touch $dir/began; until [ -e $dir/go ]; do sleep 0.02; done; kill -9 $PPID; sleep 0.3; touch $dir/ended'
	chain p0 | {"type": "p1"}; add a; as b a; names b $netns/a
	start del a; appears $dir/began; start del b; pause 6s; file $dir/go
	wait del b; fails wait del a; appears $dir/ended; logged 'killing orphaned plugin' 0`)
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

// TestDelDuringAdd: a DEL ends an ADD of its attachment that still runs, and rolls everything back: the
// runtime is dead, or has given the ADD up. An unwind that does not stop is killed. An ADD of another
// attachment that releases this one meanwhile is waited for, and not signalled.
func TestDelDuringAdd(t *testing.T) {
	stories(t, `
	hasty; conf delegateTimeout; chain p0 | p1, "delayMS": 700
	either its delegate hangs: plan p1 ADD hang-effect; start add a; awaits ADD p1; del a
		fails wait add a 'plugin type="faulty" failed (add): killed because unwind was told to stop'
	or it hangs in its rollback too: plan p1 ADD hang-effect, p1 DEL hang; start add a; awaits ADD p1; start del a; awaits DEL p1; plan
	if rollback: wait del a; fails wait add a
	or it does not react: budget Stop 1s; plan p1 ADD hang-effect; start add a; awaits ADD p1; signal STOP a; del a; fails wait add a
	or of another attachment: sandbox a b; add a; drop a; plan p1 DEL late; start add b; awaits DEL p1; del a; wait add b; del b
	clean`, acts{
		"signal": func(s *story, w []string) {
			lock, err := s.store.LookAtLock(s.who(w[1]).key())
			s.must(err)
			s.want(lock.Owner > 1, "the unwind at work: %d", lock.Owner)
			s.must(syscall.Kill(lock.Owner, map[string]syscall.Signal{"STOP": syscall.SIGSTOP}[w[0]]))
		},
	})
}

// TestDaemonOutlivesUnwind: unwind is killed after a delegate has left a daemon. The next verb ends
// the delegate that still runs, and not the daemon, which does not hold the attachment up either.
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
