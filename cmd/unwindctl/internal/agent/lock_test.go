package agent

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/cmd/unwindctl/internal/install"
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
func (k *reconciling) awaits(want install.Reason) {
	k.Helper()
	for end := time.Now().Add(time.Minute); k.status().Reason != want && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
	if got := k.status().Reason; got != want {
		k.Errorf("in use: %q, want %q", got, want)
	}
}

// TestReconcileAlone: a second agent of the node waits, and says so once with the process of the
// first, until that has ended.
func TestReconcileAlone(t *testing.T) {
	t.Parallel()
	k := newReconciling(t, t.TempDir())
	first, err := (&journal.Store{Dir: k.Setup.StateDir}).LockAgent()
	if err != nil {
		t.Fatal(err)
	}
	stop := k.runs()
	time.Sleep(3 * lockEach)
	k.awaits(install.AnotherAgent)
	if got := k.Installed(); got != "" {
		t.Errorf("beside another agent: %s", got)
	}
	first.Release()
	k.awaits(install.On)
	if got := k.Installed(); got != nodetest.First {
		t.Errorf("alone: %q", got)
	}
	stop()
	if n := k.says(fmt.Sprintf("another agent on this node (process %d) manages %s", os.Getpid(), k.Dirs.ConfDir())); n != 1 {
		t.Errorf("said %d times:\n%s", n, k.log)
	}
	if n := k.says("another agent"); n != 1 || k.says(`recovered was="waiting to install"`) != 1 {
		t.Errorf("said %d times, or not that it is over:\n%s", n, k.log)
	}
	if err := otherAgent(k, []string{"lock"}); err != nil { // the end of run gave it back
		t.Error(err)
	}
}

// TestReconcileLockOfUser: any user may open the directory of conflists, and lock it. That stops no
// agent.
func TestReconcileLockOfUser(t *testing.T) {
	t.Parallel()
	k := newReconciling(t, t.TempDir())
	dir, err := os.Open(k.Dirs.ConfDir())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	defer k.runs()()
	k.awaits(install.On)
}
