package e2e

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// LongUp makes the processes that the calling thread starts from now on see a machine that has been
// up for more than an hour, in a time namespace. On a machine that has just booted nothing is past
// a grace period. The thread itself stays where it is, so lock it.
func LongUp() error {
	if err := unix.Unshare(unix.CLONE_NEWTIME); err != nil {
		return fmt.Errorf("a time namespace: %w", err)
	}
	return os.WriteFile(fmt.Sprintf("/proc/%d/timens_offsets", unix.Gettid()), []byte("boottime 3600 0"), 0)
}
