package install

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"cni-unwind/journal"
)

// AgentLockName is the name of the file in the state directory.
const AgentLockName = "agent.lock"

// ErrAgentBusy means that another agent holds the lock.
var ErrAgentBusy = errors.New("busy")

// AgentLock is the lock of the node's agent, which lets only one agent manage a node: an flock on a
// file in the state directory. This process holds it until it calls Release or exits.
type AgentLock struct{ file *os.File }

// TakeAgentLock takes the lock if it is free, and otherwise returns ErrAgentBusy immediately. It
// creates the file as journal.OpenIn does; the file stays after Release.
func TakeAgentLock(stateDir string) (*AgentLock, error) {
	f, err := (*os.File)(nil), fs.ErrNotExist
	// a sweep that ends may remove the state directory if it is still empty
	for tries := 0; tries < 10 && errors.Is(err, fs.ErrNotExist); tries++ {
		f, err = journal.OpenIn(stateDir, AgentLockName)
	}
	if err == nil {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	switch {
	case err == nil:
		return &AgentLock{f}, nil
	case errors.Is(err, unix.EISDIR):
		err = fmt.Errorf("%s is not a regular file; move it out of the way", AgentLockPath(stateDir))
	case errors.Is(err, unix.EWOULDBLOCK):
		err = ErrAgentBusy
	}
	_ = f.Close() // f may be nil, which Close accepts
	return nil, fmt.Errorf("the agent's lock: %w", err)
}

// AgentLockPath returns the path of the lock's file.
func AgentLockPath(stateDir string) string { return filepath.Join(stateDir, AgentLockName) }

// InPlace reports whether the locked file is still in the state directory. If not, another agent
// can create a new file there and take its lock.
func (l *AgentLock) InPlace(stateDir string) bool {
	ours, err := l.file.Stat()
	there, lstatErr := os.Lstat(AgentLockPath(stateDir))
	return err == nil && lstatErr == nil && os.SameFile(ours, there)
}

// Release releases the lock, even if a child process has inherited the file and not yet executed
// its program.
func (l *AgentLock) Release() {
	_ = unix.Flock(int(l.file.Fd()), unix.LOCK_UN)
	_ = l.file.Close()
}

// AgentProcess returns the process ID of the agent that holds the lock, or "" if there is none or
// it is not visible: the kernel omits processes of other PID namespaces. It takes no lock and opens
// no file of the state directory.
//
//	1: FLOCK  ADVISORY  WRITE 1234 fd:01:131090 0 EOF	(proc_locks(5))
func AgentProcess(stateDir string) string {
	var st unix.Stat_t
	if unix.Lstat(AgentLockPath(stateDir), &st) != nil {
		return ""
	}
	f, err := os.Open("/proc/locks")
	if err != nil {
		return ""
	}
	defer f.Close()
	file := fmt.Sprintf("%02x:%02x:%d", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if part := strings.Fields(lines.Text()); len(part) == 8 && part[1] == "FLOCK" &&
			part[3] == "WRITE" && part[5] == file {
			return part[4]
		}
	}
	return ""
}
