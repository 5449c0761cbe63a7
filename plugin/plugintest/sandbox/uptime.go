package sandbox

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// LongUp creates a time namespace for the processes that the calling thread starts from now on. In
// this namespace, the machine has been up for more than an hour, so files and records can be past
// their grace period even just after a boot. The caller must lock its goroutine to the thread; the
// thread itself remains in its own time namespace. LongUp needs Linux 6.1 or later: on older
// kernels, a Go program cannot start a process in another time namespace.
func LongUp() error {
	if err := unix.Unshare(unix.CLONE_NEWTIME); err != nil {
		return fmt.Errorf("a time namespace: %w", err)
	}
	return os.WriteFile(fmt.Sprintf("/proc/%d/timens_offsets", unix.Gettid()), []byte("boottime 3600 0"), 0)
}

// OldEnough is longer than 10 minutes, the grace period that unwindctl uses on a node without
// unwind. In the tests, the machine has been up for longer than OldEnough.
const OldEnough = 15 * time.Minute

// youngMachine reports whether this machine booted so recently, as in continuous integration, that
// no file or record from this boot is older than OldEnough.
func youngMachine() bool {
	var now unix.Timespec
	err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now)
	return err == nil && time.Duration(now.Nano()) < OldEnough+time.Minute
}
