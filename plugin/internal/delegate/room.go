package delegate

import (
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// spareTasks is how many more tasks (processes and threads) the limits must allow before a process
// may start early. A delegate and its children take 10 to 30. A Go plugin that cannot create a
// thread dies, and its ADD cannot be repeated. The reserve is for many concurrent verbs.
const spareTasks = 1000

// mayWait reports whether the limits have room for waiting processes, so that running delegates do
// not lack tasks.
func mayWait() bool {
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NPROC, &limit) == nil && limit.Cur < spareTasks {
		return false
	}
	return tasksLeft("/proc/self/cgroup", "/sys/fs/cgroup") >= spareTasks
}

// tasksLeft returns how many more tasks the pids controller allows to the cgroup that the file self
// names, and to those above it, or MaxInt without a limit. root is where cgroups are mounted
// (cgroups(7); Documentation/admin-guide/cgroup-v1/pids.rst). A cgroup that is above what a
// container can see is left out.
func tasksLeft(self, root string) int {
	left := math.MaxInt
	for line := range strings.Lines(readSmall(self)) {
		part := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3) // ID:controllers:path
		if len(part) < 3 {
			continue
		}
		mount := root // of version 2
		if part[1] != "" {
			if !slices.Contains(strings.Split(part[1], ","), "pids") {
				continue
			}
			mount = filepath.Join(root, "pids")
		}
		for path := filepath.Clean("/" + part[2]); ; path = filepath.Dir(path) {
			dir := filepath.Join(mount, path)
			limit, err := strconv.Atoi(readSmall(filepath.Join(dir, "pids.max")))
			if err == nil { // not "max"
				used, _ := strconv.Atoi(readSmall(filepath.Join(dir, "pids.current")))
				left = min(left, limit-used)
			}
			if path == "/" {
				break
			}
		}
	}
	return left
}

// readSmall returns the result of one read of a file, or "". os.ReadFile needs twice the system
// calls.
func readSmall(path string) string {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return ""
	}
	defer unix.Close(fd)
	text := make([]byte, 4<<10)
	n, err := unix.Read(fd, text)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text[:n]))
}
