package sandbox

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// LongUp creates a time namespace for the processes that the calling thread starts from now on.
// There the machine has been up for more than an hour, so that files and records can be past their
// grace period even just after a boot. The caller must lock the thread, which stays in its own time
// namespace.
func LongUp() error {
	if err := unix.Unshare(unix.CLONE_NEWTIME); err != nil {
		return fmt.Errorf("a time namespace: %w", err)
	}
	return os.WriteFile(fmt.Sprintf("/proc/%d/timens_offsets", unix.Gettid()), []byte("boottime 3600 0"), 0)
}
