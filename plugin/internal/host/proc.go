package host

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// netDev returns the inode of a process's net/dev, or 0 if the process has ended: see
// journal.NetNS. The kernel allocates it with a network namespace and frees it with the namespace
// (Linux, fs/proc/proc_net.c, net/core/net-procfs.c).
func netDev(proc string) (inode uint64, err error) {
	err = anyThread(proc, func(dir string) (err error) {
		inode, err = netDevOf(dir)
		return err
	})
	switch {
	case err == nil:
		return inode, nil
	case Ended(proc):
		return 0, nil
	}
	return 0, fmt.Errorf("%s/net/dev: %w", proc, err)
}

// anyThread calls fn with the directory of a process, and with those of its threads, until one call
// succeeds: the first thread may have ended before the others.
func anyThread(proc string, fn func(dir string) error) error {
	err := fn(proc)
	if err == nil {
		return nil
	}
	tasks, _ := os.ReadDir(proc + "/task")
	if slices.ContainsFunc(tasks, func(task os.DirEntry) bool {
		return fn(proc+"/task/"+task.Name()) == nil
	}) {
		return nil
	}
	return err
}

// member is a process and its network namespace.
type member struct {
	pid        int
	path, link string // of the namespace, and the link's text there; "" if it may not be inspected
	netDev     uint64 // of the namespace of such a process, unless err says why it is not known
	err        error
}

func memberOf(pid int) (m member) {
	proc := procOf(pid)
	err := anyThread(proc, func(dir string) (err error) {
		m.path = dir + "/ns/net"
		m.link, err = os.Readlink(m.path)
		return err
	})
	if m.pid = pid; err != nil {
		m.netDev, m.err = netDev(proc)
	}
	return m
}

func netDevOf(proc string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Stat(proc+"/net/dev", &st); err != nil {
		return 0, err
	}
	return st.Ino, nil
}

// Ended reports whether a process is gone, a zombie, or exiting and no longer in a namespace.
func Ended(proc string) bool {
	stat, err := os.ReadFile(proc + "/stat")
	if err != nil {
		return os.IsNotExist(err) || errors.Is(err, unix.ESRCH)
	}
	// 7 (name) S 1 2 2 0 -1 FLAGS … (proc_pid_stat(5))
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 7 {
		return false
	}
	flags, _ := strconv.ParseUint(fields[6], 10, 64)
	const exiting = 0x4 // PF_EXITING in include/linux/sched.h
	return flags&exiting != 0 || fields[0] == "Z" || fields[0] == "X"
}

// checkAllShown returns an error if /proc may hide processes from this one (proc(5), hidepid).
func checkAllShown() error {
	if _, err := os.Readlink("/proc/1/ns/net"); err == nil && hasCapability(unix.CAP_SYS_PTRACE) {
		return nil
	}
	hides := false
	mounts, err := mountsOf("/proc/self", " /proc ")
	for _, m := range mounts {
		if m.point == "/proc" { // the last one counts
			hides = slices.ContainsFunc(strings.Split(m.options, ","), func(option string) bool {
				return slices.Contains(hiding, option)
			})
		}
	}
	if err == nil && hides {
		err = errors.New("/proc is mounted with hidepid and may hide processes")
	}
	return err
}

// hiding are the mount options with which /proc lacks processes; kernels before 5.8 show numbers.
var hiding = []string{"hidepid=2", "hidepid=invisible", "hidepid=4", "hidepid=ptraceable"}

func hasCapability(capability int) bool {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return false
	}
	return data[capability/32].Effective&(1<<(capability%32)) != 0
}

// Processes returns the IDs of all processes.
func Processes() (pids []int, err error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil {
			pids = append(pids, pid)
		}
	}
	if err == nil && len(pids) == 0 {
		err = errors.New("/proc shows no process: it is not mounted")
	}
	return pids, err
}

func procOf(pid int) string { return fmt.Sprintf("/proc/%d", pid) }

// ProgramsOf returns the names of a process's program, and of the script that an interpreter runs.
// It is empty if the process has exited.
func ProgramsOf(pid int) (names []string) {
	proc := procOf(pid)
	if path, err := os.Readlink(proc + "/exe"); err == nil {
		names = append(names, filepath.Base(path))
	}
	cmdline, _ := os.ReadFile(proc + "/cmdline")
	for i, arg := range strings.Split(strings.TrimRight(string(cmdline), "\x00"), "\x00") {
		if i < 2 && arg != "" {
			names = append(names, filepath.Base(arg))
		}
	}
	return names
}

// Environ returns a variable of a process's environment, or "".
func Environ(pid int, name string) string {
	environ, _ := os.ReadFile(procOf(pid) + "/environ")
	for _, kv := range strings.Split(string(environ), "\x00") {
		if value, is := strings.CutPrefix(kv, name+"="); is {
			return value
		}
	}
	return ""
}
