package agent

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/cmd/unwindctl/internal/metrics"
	"cni-unwind/cmd/unwindctl/internal/nodetest"
	"cni-unwind/journal"
)

// runs runs the reconciler until stop is called.
func (k *reconciling) runs() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		k.run(ctx)
	}()
	return func() {
		cancel()
		<-ended
	}
}

// awaits waits until it says that pods go through unwind.
func (k *reconciling) awaits(want metrics.InUse) {
	k.Helper()
	for end := time.Now().Add(time.Minute); k.inUse() != want && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
	k.is(want)
}

// otherAgent takes the lock as another agent does.
func (k *reconciling) otherAgent() *journal.Lock {
	k.Helper()
	lock, err := (&journal.Store{Dir: k.stateDir()}).LockAgent()
	if err != nil {
		k.Fatal(err)
	}
	return lock
}

// TestReconcileAlone: a second agent of the node waits, and says so once with the process of the
// first, until that has ended.
func TestReconcileAlone(t *testing.T) {
	t.Parallel()
	k := newReconciling(t, nil)
	first := k.otherAgent()
	stop := k.runs()
	time.Sleep(3 * lockEach)
	k.is(metrics.AnotherAgent)
	if got := k.Installed(); got != "" {
		t.Errorf("beside another agent: %s", got)
	}
	first.Release()
	k.awaits(metrics.On)
	if got := k.Installed(); got != nodetest.First {
		t.Errorf("alone: %q", got)
	}
	stop()
	if n := k.says(fmt.Sprintf("another agent of this node (process %d) looks after %s", os.Getpid(), k.Dirs.ConfDir())); n != 1 {
		t.Errorf("said %d times:\n%s", n, k.log)
	}
	if n := k.says("another agent"); n != 1 || k.says(`"in order again" was="waiting to install"`) != 1 {
		t.Errorf("said %d times, or not that it is over:\n%s", n, k.log)
	}
	k.otherAgent().Release() // the end of run gave it back
}

// TestReconcileLockOfUser: any user may open the directory of conflists, and lock it. That stops no
// agent.
func TestReconcileLockOfUser(t *testing.T) {
	t.Parallel()
	k := newReconciling(t, nil)
	dir, err := os.Open(k.Dirs.ConfDir())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	defer k.runs()()
	k.awaits(metrics.On)
}

// TestReconcileLockRefused: what is in the lock's place is named and not followed, and unwind
// is kept installed all the same.
func TestReconcileLockRefused(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		put  func(k *reconciling, state, lock string) error
		says string // with the path of the state directory
	}{
		"a link": {func(k *reconciling, state, lock string) error {
			return os.Symlink(filepath.Join(k.Dir, "elsewhere"), lock)
		}, "%s/agent.lock is a symbolic link; remove it"},
		"a directory": {func(_ *reconciling, _, lock string) error {
			return os.Mkdir(lock, 0o700)
		}, "%s/agent.lock is not a regular file; move it away"},
		"a pipe": {func(_ *reconciling, _, lock string) error {
			return unix.Mkfifo(lock, 0o600)
		}, "%s/agent.lock is not a regular file; move it away"},
		"a state directory of everybody": {func(_ *reconciling, state, _ string) error {
			return os.Chmod(state, 0o777)
		}, "%s can be written to by others"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := newReconciling(t, nil)
			state := k.stateDir()
			if err := os.Mkdir(state, 0o700); err != nil {
				t.Fatal(err)
			}
			if err := c.put(k, state, filepath.Join(state, journal.AgentLockName)); err != nil {
				t.Fatal(err)
			}
			k.reconciles(nodetest.First)
			if n := k.says("level=WARN"); n != 1 || k.says(fmt.Sprintf(c.says, state)) != 1 {
				t.Errorf("not said once:\n%s", k.log)
			}
			if _, err := os.Lstat(filepath.Join(k.Dir, "elsewhere")); err == nil {
				t.Error("the link was followed")
			}
		})
	}
}

// TestReconcileLockRemoved: an agent whose state directory was removed makes the lock again, and
// says so once: a second one waits. It makes nothing while unwind is switched off.
func TestReconcileLockRemoved(t *testing.T) {
	t.Parallel()
	k := newReconciling(t, nil)
	k.reconciles(nodetest.First)
	for range 2 {
		if err := os.RemoveAll(k.stateDir()); err != nil {
			t.Fatal(err)
		}
		k.reconciles(nodetest.First)
		if _, err := (&journal.Store{Dir: k.stateDir()}).LockAgent(); err == nil {
			t.Error("a second agent gets the lock")
		}
	}
	if n := k.says("the lock of this agent was removed"); n != 2 || k.says("level=WARN") != 2 {
		t.Errorf("said %d times:\n%s", n, k.log)
	}
	if err := os.RemoveAll(k.stateDir()); err != nil {
		t.Fatal(err)
	}
	k.Remove(k.Own())
	k.reconciles("")
	if _, err := os.Lstat(k.stateDir()); err == nil {
		t.Error("switched off, it made its state directory again")
	}
}

// TestReconcileLockLost: an agent that another one has replaced meanwhile waits, and is not misled
// by what that does.
func TestReconcileLockLost(t *testing.T) {
	t.Parallel()
	k := newReconciling(t, nil)
	k.reconciles(nodetest.First)
	k.Remove(filepath.Join(k.stateDir(), journal.AgentLockName))
	other := k.otherAgent()
	if again := k.reconcile(context.Background()); again != lockEach {
		t.Errorf("it looks again after %s", again)
	}
	k.is(metrics.AnotherAgent)
	k.Remove(k.Own())
	k.reconciles("")
	k.is(metrics.AnotherAgent)
	other.Release()
	k.reconciles(nodetest.First)
	k.is(metrics.On)
}

// TestReconcileStateDir: agents with different state directories have different locks. The one
// that finds the other's in unwind's conflist says so.
func TestReconcileStateDir(t *testing.T) {
	t.Parallel()
	k := newReconciling(t, nil)
	k.reconciles(nodetest.First)
	before := k.stateDir()
	after := filepath.Join(k.Dir, "other")
	k.again(func(r *reconciler) {
		r.StateDir, r.stateDir = after, func() string { return after }
	})
	k.reconciles(nodetest.First)
	if k.says("named another state directory") != 1 || k.says("was="+before+" is="+after) != 1 || k.says("level=WARN") != 1 {
		t.Errorf("not said once:\n%s", k.log)
	}
}
