package sandbox

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// AwaitWaiters counts the threads of a process that wait for an flock on a file. It repeats this
// until the count is between least and most. If pid is 0, it counts the threads of all processes.
func AwaitWaiters(t testing.TB, pid int, path string, least, most int) {
	t.Helper()
	n := -1
	for end := time.Now().Add(Patience); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if n = waiters(t, pid, path); least <= n && n <= most {
			return
		}
	}
	t.Fatalf("%d threads of process %d wait for %s, want %d to %d", n, pid, path, least, most)
}

// waiters returns the number that AwaitWaiters compares. It may be too high, because a line may
// occur twice if the locks change while /proc/locks is read.
func waiters(t testing.TB, pid int, path string) (n int) {
	t.Helper()
	var st unix.Stat_t
	var fs unix.Statfs_t
	locks, err := os.ReadFile("/proc/locks")
	if err := errors.Join(err, unix.Stat(path, &st), unix.Statfs(path, &fs)); err != nil {
		t.Fatal(err)
	}
	file := fmt.Sprintf(":%d", st.Ino)
	if fs.Type != unix.OVERLAYFS_SUPER_MAGIC { // on overlayfs, stat's device differs from /proc/locks
		file = fmt.Sprintf("%02x:%02x:%d", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
	}
	for line := range strings.Lines(string(locks)) {
		// 7: -> FLOCK  ADVISORY  WRITE 4711 fe:00:1234 0 EOF
		f := strings.Fields(line)
		if len(f) > 6 && f[1] == "->" && (pid == 0 || f[5] == fmt.Sprint(pid)) &&
			strings.HasSuffix(f[6], file) {
			n++
		}
	}
	return n
}
