package delegate

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// TestDelegateDiesWithUnwind: if unwind is killed, the kernel kills its delegate, but not the
// delegate's children. The test starts its own binary again in unwind's role.
func TestDelegateDiesWithUnwind(t *testing.T) {
	t.Parallel()
	const dirEnv = "UNWIND_TEST_DELEGATE"
	if dir := os.Getenv(dirEnv); dir != "" {
		_, f := new(Processes).Run(context.Background(), &Call{Plugin: "delegate", Path: dir}, io.Discard)
		t.Fatalf("the delegate ended: %v", f)
	}
	d := script(t, `sleep 600 & echo $! >child.new; mv child.new child; while :; do sleep 600; done`)
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestDelegateDiesWithUnwind$", "-test.count=1")
	cmd.Env = append(os.Environ(), dirEnv+"="+d.Path)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	awaitFile(t, d.file("child"))
	pid := childOf(t, d.file("delegate"))
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	gone := func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		return err != nil || bytes.Contains(stat, []byte(") Z ")) // a zombie has ended
	}
	for end := time.Now().Add(10 * time.Second); !gone(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Error("the delegate still runs")
			break
		}
	}
	child, err := os.ReadFile(d.file("child"))
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("kill", strings.TrimSpace(string(child))).CombinedOutput(); err != nil {
		t.Errorf("the delegate's child was killed: %s", out)
	}
	_ = syscall.Kill(-pid, syscall.SIGKILL)
}

// TestHealthyDelegatesLive: the kernel kills a delegate only when unwind dies, not when a thread of
// unwind ends. Eight workers start 60 delegates, as a sweep does, while other goroutines keep
// ending their threads.
func TestHealthyDelegatesLive(t *testing.T) {
	ended := make(chan struct{})
	var churn, workers sync.WaitGroup
	for range 8 {
		churn.Go(func() {
			for {
				select {
				case <-ended:
					return
				default:
				}
				var thread sync.WaitGroup
				thread.Go(func() {
					runtime.LockOSThread() // never unlocked, so Go ends the thread with the goroutine
					time.Sleep(time.Millisecond)
				})
				thread.Wait()
			}
		})
	}
	var started, killed atomic.Int64
	for range 8 {
		workers.Go(func() {
			for started.Add(1) <= 60 {
				d := script(t, `for i in 1 2 3 4 5; do echo $i; sleep 0.02; done`)
				_, f := new(Processes).Run(context.Background(), d, io.Discard)
				switch {
				case f != nil && f.Killed:
					killed.Add(1)
				case f != nil:
					t.Error(f)
				}
			}
		})
	}
	workers.Wait()
	close(ended)
	churn.Wait()
	if killed.Load() > 0 {
		t.Errorf("%d of 60 delegates were killed", killed.Load())
	}
}
