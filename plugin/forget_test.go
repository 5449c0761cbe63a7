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
)

// giveUp forgets the pod's attachment, as a person would.
func (p *pod) giveUp() error {
	return (&Plugin{Stderr: io.Discard, Budgets: undo.DefaultBudgets}).Forget(p.Context(), p.stateDir, p.key())
}

// stuck is a pod whose ADD failed and whose DELs always fail.
func stuck(n *node) *pod {
	n.Helper()
	p := n.pod("a")
	n.plan(map[string]map[string]string{"p1": {"ADD": "fail-effect", "DEL": "fail"}})
	if _, err := p.add(n.unwind(n.faulty("p0", ""), n.faulty("p1", ""))); err == nil {
		n.Fatal("the ADD succeeded")
	}
	return p
}

// TestForget gives up a dead attachment: no DEL runs, what the delegate took stays, the runtime's
// DEL succeeds and runs nothing, and the container ID can be used again.
func TestForget(t *testing.T) {
	t.Parallel()
	for _, damaged := range []bool{false, true} {
		t.Run(fmt.Sprintf("damaged %t", damaged), func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			p := stuck(n)
			if damaged {
				p.damage()
			}
			n.forgetCalls()
			if err := p.giveUp(); err != nil {
				t.Fatal(err)
			}
			if events := n.events(); len(events) != 2 || !strings.HasPrefix(events[1], "forgotten a ") {
				t.Errorf("history: %v", events)
			}
			if tomb := n.tombstone(p.key()); tomb == nil || tomb.Reason != "a person gave it up" {
				t.Errorf("tombstone %+v", tomb)
			}
			if locks := n.names(filepath.Join(n.stateDir, "locks")); len(locks) > 0 {
				t.Errorf("lock files: %v", locks)
			}
			list := n.unwind(n.faulty("p0", ""), n.faulty("p1", ""))
			p.mustDel(list)
			n.wantCalls("given up, and the runtime's DEL")
			if taken := n.taken(); len(taken) != 1 || taken[0] != "a.eth0.p1" {
				t.Errorf("taken: %v, want what p1 took", taken)
			}
			if err := p.giveUp(); err == nil || !strings.Contains(err.Error(), "the journal has no "+p.key().String()) {
				t.Errorf("once more: %v", err)
			}
			n.plan(nil)
			p.mustAdd(list)
			p.mustDel(list)
			n.nothingLeft()
		})
	}
}

// damage replaces the bytes of the pod's entry.
func (p *pod) damage() {
	p.Helper()
	p.editJournal(func(tx *bolt.Tx) error {
		k := p.key()
		return tx.Bucket([]byte("entries")).Put([]byte(strings.Join([]string{k.Network, k.ContainerID, k.IfName}, "\x00")), []byte(`{"network":`))
	})
}

// TestForgetRefuses: an attachment that lives, may live, or is being worked on stays unchanged,
// with its lock file.
func TestForgetRefuses(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		make func(n *node) *pod
		want string
	}{
		{"live", func(n *node) *pod {
			p := n.pod("a")
			p.mustAdd(n.unwind(n.faulty("p0", "")))
			return p
		}, "is not dead but live (its network namespace is there)"},
		{"live, its lock file lost", func(n *node) *pod {
			p := n.pod("a")
			p.mustAdd(n.unwind(n.faulty("p0", "")))
			if err := os.Remove(n.store.LockPath(p.key())); err != nil {
				n.Fatal(err)
			}
			return p
		}, "is not dead but live (its network namespace is there)"},
		{"seen from elsewhere", func(n *node) *pod {
			p := stuck(n)
			p.edit(func(g *journal.Generation) { g.Host.MountNS = "mnt:[1]" })
			return p
		}, "is not dead but unknown (its ADD ran in other namespaces"},
		{"locked", func(n *node) *pod {
			p := stuck(n)
			lock, err := (&journal.Store{Dir: n.stateDir}).TryAcquire(p.key())
			if err != nil {
				n.Fatal(err)
			}
			n.Cleanup(lock.Release)
			return p
		}, "its lock is held"},
		{"damaged, and locked", func(n *node) *pod {
			p := stuck(n)
			p.damage()
			lock, err := (&journal.Store{Dir: n.stateDir}).TryAcquire(p.key())
			if err != nil {
				n.Fatal(err)
			}
			n.Cleanup(lock.Release)
			return p
		}, "its lock is held"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			p := c.make(n)
			events, locks := len(n.events()), fmt.Sprint(n.names(filepath.Join(n.stateDir, "locks")))
			if err := p.giveUp(); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %s", err, c.want)
			}
			if got := fmt.Sprint(n.names(filepath.Join(n.stateDir, "locks"))); got != locks {
				t.Errorf("lock files %v, were %v", got, locks)
			}
			if got := len(n.events()); got != events || n.tombstone(p.key()) != nil {
				t.Errorf("%d events, want %d", got, events)
			}
			if strings.HasPrefix(c.name, "damaged") {
				return
			}
			if p.entry() == nil {
				t.Error("it is gone")
			}
		})
	}
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
		n := newNode(t)
		p := stuck(n)
		n.forgetCalls()
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestForgetKilled$")
		cmd.Env = append(os.Environ(), forgetEnv+"="+strings.Join([]string{n.stateDir, n.network, "a"}, "|"), fmt.Sprintf("%s=%d", killAtEnv, at))
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
	at, _ := strconv.Atoi(os.Getenv(killAtEnv))
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
