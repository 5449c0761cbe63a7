package plugin

import (
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"testing"

	"cni-unwind/plugin/facts"
	"cni-unwind/testdata/sandbox"

	"golang.org/x/sys/unix"
)

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
