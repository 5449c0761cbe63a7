package sandbox

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// LongUp creates a time namespace for the processes that the calling thread starts from now on.
// There the machine has been up for more than an hour, so that files and records can be past their
// grace period even just after a boot. The caller must lock the thread, which stays in its own time
// namespace. A process of Go can start in another time namespace since Linux 6.1.
func LongUp() error {
	if err := unix.Unshare(unix.CLONE_NEWTIME); err != nil {
		return fmt.Errorf("a time namespace: %w", err)
	}
	return os.WriteFile(fmt.Sprintf("/proc/%d/timens_offsets", unix.Gettid()), []byte("boottime 3600 0"), 0)
}

// OldEnough is more than the grace period of a plain chain, 10 minutes. The machine of the tests has been up
// for longer.
const OldEnough = 15 * time.Minute

// youngMachine reports whether nothing on this machine is old enough to be dead, as on one of a continuous
// integration that has just booted.
func youngMachine() bool {
	var now unix.Timespec
	err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now)
	return err == nil && time.Duration(now.Nano()) < OldEnough+time.Minute
}
