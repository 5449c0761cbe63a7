package plugin

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"cni-unwind/plugin/internal/host"
)

// TestOrphanIsWaitedFor: a delegate that outlives its unwind and soon ends is not killed, and what
// it takes late is released.
func TestOrphanIsWaitedFor(t *testing.T) {
	stories(t, `
	chain p0 | p1, "delayMS": 1000
	plan p1 ADD orphan; killed add a; plan
	either then DEL: recover a DEL
	or then ADD: recover a ADD
	or then the next sandbox: drop a; recover a next sandbox
	left; began start ADD p0, end ADD p0, start ADD p1, end ADD p1, start DEL p1, end DEL p1, start DEL p0`)
}

// TestOrphanIsEnded: a delegate that outlives its unwind for too long is killed, with its children,
// before anything else happens to the attachment. An orphan would have taken effect after 1.5 s.
func TestOrphanIsEnded(t *testing.T) {
	stories(t, `
	hasty; chain p0 | p1, "delayMS": 1500
	either orphan: let mode orphan
	or kill-parent: let mode kill-parent
	or kill-parent-effect: let mode kill-parent-effect
	either in ADD: let call ADD p1; plan p1 ADD $mode; killed add a
	or in DEL: let call DEL p1; plan p1 DEL $mode; add a; killed del a
	plan
	either then DEL: recover a DEL
	or then ADD: recover a ADD
	or then the next sandbox: recover a next sandbox
	left
	if orphan: since 1500ms; left
	ended $call`)
}

// TestDelDuringAdd: a DEL waits for an ADD of the same attachment by an unwind that lives. If that
// takes too long, the DEL is refused, for the runtime to retry, and no process is killed.
func TestDelDuringAdd(t *testing.T) {
	stories(t, `
	hasty; conf delegateTimeout 20s
	either soon over: chain p0 | p1, "delayMS": 1500
	or not in time: chain p0 | p1, "delayMS": 6500
	plan p1 ADD late; start add a; awaits ADD p1
	if soon: del a; times 1 DEL p1
	if not: fails del a code=11; times 0 DEL p1
	wait add a
	del a`)
}

// history returns the starts and ends of the faulty plugins' calls in order, as "start VERB
// instance" and "end VERB instance".
func (n *node) history() (lines []string) {
	n.Helper()
	for _, l := range n.wholeLog() {
		lines = append(lines, fmt.Sprintf("%s %s %s", l.Phase, l.Command, l.Instance))
	}
	return lines
}

// running waits until a delegate has started.
func (n *node) running(call string) {
	n.Helper()
	eventually(n, call, func() bool { return slices.Contains(n.calls(), call) })
}

// TestDaemonDoesNotPin: a delegate leaves a daemon that has all its descriptors. The daemon delays
// neither its own verb nor the next, and lives on.
func TestDaemonDoesNotPin(t *testing.T) {
	stories(t, `
	hasty; chain p0 | p1; plan p0 ADD daemon, p0 DEL daemon
	add a; unlocked a; del a; left
	daemons`, acts{
		"unlocked": func(s *story, w []string) {
			locked, _, err := s.store.Locked(s.who(w[0]).key())
			s.want(!locked && err == nil, "%t, %v", locked, err)
		},
		"daemons": func(s *story, _ []string) { // that of the ADD and that of the DEL
			daemons := daemonsOf(s, s.callLog()[0].Path)
			s.want(len(daemons) == 2, "%d live", len(daemons))
		},
	})
}

// daemonsOf returns the daemons left by faulty plugins with this CNI_PATH.
func daemonsOf(t testing.TB, path string) []int {
	t.Helper()
	var pids []int
	all, err := host.Processes()
	for _, pid := range all {
		cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err != nil || !bytes.HasSuffix(cmdline, []byte("\x00daemon\x00")) {
			continue
		}
		environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if err == nil && bytes.Contains(environ, []byte("CNI_PATH="+path)) {
			pids = append(pids, pid)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	return pids
}

// TestTwoAdds: of two ADDs of one container ID at once exactly one succeeds, and no delegate runs
// for both at once.
func TestTwoAdds(t *testing.T) {
	t.Parallel()
	n := newNode(t).hasty()
	list := n.unwind(n.faulty("p0", `, "delayMS": 100`), n.faulty("p1", `, "delayMS": 100`))
	p := n.pod("a")
	n.plan(map[string]map[string]string{"*": {"ADD": "late"}})
	errs := make(chan error)
	for range 2 {
		go func() {
			_, err := p.add(list)
			errs <- err
		}()
	}
	var refused []error
	for range 2 {
		if err := <-errs; err != nil {
			refused = append(refused, err)
		}
	}
	if len(refused) != 1 || !strings.Contains(refused[0].Error(), "is already added, in the same network namespace; run its DEL first") {
		t.Errorf("refused: %v; want one", refused)
	}
	if got, want := strings.Join(n.history(), ", "), "start ADD p0, end ADD p0, start ADD p1, end ADD p1"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if all := n.entries(); len(all) != 1 || len(all[0].Generations) != 1 {
		t.Errorf("the journal has %+v, want one entry with one generation", all)
	}
	p.mustDel(list)
	n.nothingLeft()
}

// TestStopped: an unwind that gets SIGTERM rolls its ADD back and says so.
func TestStopped(t *testing.T) {
	stories(t, `
	hasty; conf delegateTimeout; chain p0 | p1 | p2 | p3; plan p2 ADD hang-effect
	start add a; awaits ADD p2; stop a
	fails wait add a 'plugin type="faulty" failed (add): killed because unwind was asked to stop'`, acts{
		"stop": func(s *story, w []string) {
			pid, err := s.store.Owner(s.who(w[0]).key())
			s.must(err)
			s.want(pid > 1, "the unwind at work: %d", pid)
			s.must(syscall.Kill(pid, syscall.SIGTERM))
		},
	})
}
