package facts

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// memberOf returns a path to the network namespace of a process, and its link text. The text is ""
// if the process has ended. A process's first thread may end before the others, so memberOf tries
// all threads.
func memberOf(pid int) (path, link string, err error) {
	path = procOf(pid) + "/ns/net"
	if link, err = readNS(path); link != "" || err != nil {
		return path, link, err
	}
	others, _ := filepath.Glob(procOf(pid) + "/task/*/ns/net")
	for _, path := range others {
		if link, err = readNS(path); link != "" || err != nil {
			return path, link, err
		}
	}
	return "", "", nil
}

// readNS returns the text of a link in a thread's ns directory. It returns "" if the thread has
// ended, or is about to end and has left its namespaces. The kernel returns EACCES both for a
// thread that is reaped during the read, and for one that the caller may not inspect
// (proc_ns_readlink in fs/proc/namespaces.c). So readNS reads twice: the second read does not find
// a reaped thread.
func readNS(path string) (link string, err error) {
	link, err = os.Readlink(path)
	if errors.Is(err, fs.ErrPermission) {
		link, err = os.Readlink(path)
	}
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return "", nil
	}
	return link, err
}

// checkAllShown returns an error if this process is not permitted to inspect all others. In that
// case, /proc may also hide some processes (proc(5), hidepid).
func checkAllShown() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	err := unix.Capget(&header, &sets[0])
	if err == nil && sets[0].Effective&(1<<unix.CAP_SYS_PTRACE) == 0 {
		err = errors.New("unwind is not permitted to inspect all processes; run it as root with " +
			"CAP_SYS_PTRACE")
	}
	if err == nil {
		_, err = os.Readlink("/proc/1/ns/net")
	}
	return err
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
		err = errors.New("/proc shows no process; check that it is mounted")
	}
	return pids, err
}

func procOf(pid int) string { return fmt.Sprintf("/proc/%d", pid) }

// ProgramsOf returns the names of a process's program, and of its script if the program is an
// interpreter. It returns none if the process has exited.
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

// SplitDaemons splits processes that inherited a lock into daemons and delegates. A delegate leads
// a process group in the runtime's session. A daemon has created its own session, so the session's
// ID is the group ID of one of the processes.
func SplitDaemons(pids []int) (daemons, delegates []int) {
	made := map[int]bool{} // sessions that daemons created
	for _, pid := range pids {
		group, err := unix.Getpgid(pid)
		session, err2 := unix.Getsid(pid)
		if err == nil && err2 == nil && group == session && session != 0 {
			made[session] = true
		}
	}
	for _, pid := range pids {
		if session, err := unix.Getsid(pid); err == nil && made[session] {
			daemons = append(daemons, pid)
		} else if err == nil {
			delegates = append(delegates, pid)
		}
	}
	return daemons, delegates
}

// Older reports whether a process certainly started before another one. The kernel records start
// times in steps of 10 ms.
func Older(pid, than int) bool {
	older, newer := startOf(pid), startOf(than)
	return older != 0 && older < newer
}

// startOf returns the time since boot at which a process started, in clock ticks, or 0 if that is
// unknown.
func startOf(pid int) uint64 {
	stat, _ := os.ReadFile(procOf(pid) + "/stat")
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 20 {
		return 0
	}
	start, _ := strconv.ParseUint(fields[19], 10, 64) // the 22nd field, see proc_pid_stat(5)
	return start
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
