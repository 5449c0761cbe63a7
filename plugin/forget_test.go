package plugin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	bolt "go.etcd.io/bbolt"

	"cni-unwind/journal"
	"cni-unwind/plugin/undo"
	"cni-unwind/testdata/unwind/env"
)

// TestForget gives up a dead attachment: no DEL runs, what the delegate took stays, the runtime's
// DEL succeeds and runs nothing, and the container ID can be used again.
func TestForget(t *testing.T) {
	stories(t, `
	chain p0 | p1
	plan p1 ADD fail-effect, p1 DEL fail; fails add a
	either intact:
	or damaged: damage a
	forgets; giveup a
	events '' 'forgotten a '; tombstone a given up by an operator; locks 0
	del a; calls; taken a.eth0.p1
	fails giveup a '$network/a/eth0 is not in the journal'
	plan; add a; del a`)
}

// TestForgetRefuses: an attachment that lives, may live, or is being worked on stays unchanged,
// with its lock file.
func TestForgetRefuses(t *testing.T) {
	stories(t, `
	either live: chain p0; add a; let why is live, not dead (its network namespace exists)
	or live, its lock file lost: chain p0; add a; unlocked a
		let why is live, not dead (its network namespace exists)
	or dead, seen from elsewhere: let why is unknown, not dead (its ADD ran in other namespaces
	or dead, locked: let why its lock is held
	or dead, damaged and locked: let why its lock is held
	if dead: chain p0 | p1; plan p1 ADD fail-effect, p1 DEL fail; fails add a
	if damaged: damage a
	if locked: lock a
	if elsewhere: elsewhere a
	count; fails giveup a '$why'; count
	unless damaged: entry a
	leaves`, acts{
		"unlocked": func(s *story, w []string) { s.must(os.Remove(s.store.LockPath(s.who(w[0]).key()))) },
		"elsewhere": func(s *story, w []string) {
			s.who(w[0]).edit(func(g *journal.Generation) { g.Host.MountNS = "mnt:[1]" })
		},
		"count": func(s *story, _ []string) { // the same as before
			count := fmt.Sprint(len(s.node.events()), s.names(filepath.Join(s.stateDir, "locks")), s.tombstone(s.who("a").key()))
			s.want(s.vars["count"] == "" || s.vars["count"] == count, "%s, was %s", count, s.vars["count"])
			s.vars["count"] = count
		},
	})
}

// giveUp forgets the pod's attachment, as a person would.
func (p *pod) giveUp() error {
	return (&Plugin{Stderr: io.Discard, Budgets: undo.DefaultBudgets}).Forget(p.Context(), p.stateDir, p.key())
}

// damage replaces the bytes of the pod's entry.
func (p *pod) damage() {
	p.Helper()
	p.editJournal(func(tx *bolt.Tx) error {
		k := p.key()
		return tx.Bucket([]byte("entries")).Put([]byte(strings.Join([]string{k.Network, k.ContainerID, k.IfName}, "\x00")), []byte(`{"network":`))
	})
}

// forgetEnv makes a process of this program forget an attachment, STATEDIR|NETWORK|CONTAINER, and
// be killed at a point.
const forgetEnv = "UNWIND_TEST_FORGET"

// TestForgetKilled kills the program at each point. Either the entry is there and no event is
// recorded, or it is gone, the event is recorded, and the runtime's DEL runs nothing.
func TestForgetKilled(t *testing.T) {
	if what := strings.Split(os.Getenv(forgetEnv), "|"); len(what) == 3 {
		forgetAndDie(what)
	}
	t.Parallel()
	everyPoint(t, 2, func(t *testing.T, at int) bool {
		s := newStory(t)
		s.tell(`chain p0 | p1; plan p1 ADD fail-effect, p1 DEL fail; fails add a; forgets`)
		n, p := s.node, s.who("a")
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestForgetKilled$")
		cmd.Env = append(os.Environ(), forgetEnv+"="+strings.Join([]string{n.stateDir, n.network, "a"}, "|"), fmt.Sprintf("%s=%d", env.KillAt, at))
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		killed := errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signaled()
		if err != nil && !killed {
			t.Fatalf("%v\n%s", err, out)
		}
		there := p.entry() != nil
		if told := len(n.events()) == 2; told == there || told != (n.tombstone(p.key()) != nil) {
			t.Errorf("there %t, told %t", there, told)
		}
		if there {
			if err := p.giveUp(); err != nil {
				t.Error(err)
			}
		}
		p.mustDel(n.unwind(n.faulty("p0", ""), n.faulty("p1", "")))
		n.wantCalls("the runtime's DEL")
		if locks := n.names(filepath.Join(n.stateDir, "locks")); len(locks) > 0 {
			t.Errorf("lock files: %v", locks)
		}
		return killed
	})
}

// forgetAndDie does not return.
func forgetAndDie(what []string) {
	at, _ := strconv.Atoi(os.Getenv(env.KillAt))
	p := &Plugin{Stderr: os.Stderr, Budgets: undo.DefaultBudgets, Point: func(string) {
		if at--; at == 0 {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	}}
	if err := p.Forget(context.Background(), what[0], journal.Key{Network: what[1], ContainerID: what[2], IfName: "eth0"}); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}
