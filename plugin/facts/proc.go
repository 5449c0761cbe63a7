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

// memberOf returns a path to the network namespace of a process, and the text of the link there.
// The link is "" if the process has ended. Its first thread may have ended before the others.
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

// readNS returns the text of a link in a thread's ns directory, or "" if the thread has ended or is
// about to, and is in no namespace any more. The kernel answers EACCES for a thread that is reaped
// during the read, as for one that the caller may not inspect (proc_ns_readlink of
// fs/proc/namespaces.c). A second read does not find the reaped one.
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

// checkAllShown returns an error if this process may not inspect all others, so that /proc may also
// hide some from it (proc(5), hidepid).
func checkAllShown() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	err := unix.Capget(&header, &sets[0])
	if err == nil && sets[0].Effective&(1<<unix.CAP_SYS_PTRACE) == 0 {
		err = errors.New("unwind may not inspect all processes: it lacks CAP_SYS_PTRACE")
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

// SplitDaemons splits the processes that inherited something from a delegate. A delegate leads a
// process group in the runtime's session. A daemon has made a session of its own, whose ID is that
// of a group of such processes.
func SplitDaemons(pids []int) (daemons, delegates []int) {
	made := map[int]bool{} // sessions
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

// Older reports whether a process certainly began before another one, which the kernel's clock
// tells in steps of 10 ms.
func Older(pid, than int) bool {
	older, newer := startOf(pid), startOf(than)
	return older != 0 && older < newer
}

// startOf returns the time since boot at which a process began, or 0 if that is unknown.
func startOf(pid int) uint64 {
	stat, _ := os.ReadFile(procOf(pid) + "/stat")
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 20 {
		return 0
	}
	start, _ := strconv.ParseUint(fields[19], 10, 64) // the 22nd of all: proc_pid_stat(5)
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
