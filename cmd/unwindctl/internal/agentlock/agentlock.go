// Package agentlock implements the lock of the node's agent: an flock on a file in the state
// directory. It lets only one agent manage a node.
package agentlock

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

// Name is the name of the file in the state directory.
const Name = "agent.lock"

// ErrBusy means that another agent holds the lock.
var ErrBusy = errors.New("busy")

// Lock is a lock that this process holds until it calls Release or exits.
type Lock struct{ file *os.File }

// Take takes the lock if it is free, and otherwise returns ErrBusy immediately. It creates the file
// as journal.OpenIn does; the file stays after Release.
func Take(stateDir string) (*Lock, error) {
	f, err := (*os.File)(nil), fs.ErrNotExist
	// a sweep that ends may remove the state directory if it is still empty
	for tries := 0; tries < 10 && errors.Is(err, fs.ErrNotExist); tries++ {
		f, err = journal.OpenIn(stateDir, Name)
	}
	if err == nil {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	switch {
	case err == nil:
		return &Lock{f}, nil
	case errors.Is(err, unix.EISDIR):
		err = fmt.Errorf("%s is not a regular file; move it out of the way", Path(stateDir))
	case errors.Is(err, unix.EWOULDBLOCK):
		err = ErrBusy
	}
	_ = f.Close() // f may be nil, which Close accepts
	return nil, fmt.Errorf("the agent's lock: %w", err)
}

// Path returns the path of the lock's file.
func Path(stateDir string) string { return filepath.Join(stateDir, Name) }

// InPlace reports whether the locked file is still in the state directory. If not, another agent
// can create a new file there and take its lock.
func (l *Lock) InPlace(stateDir string) bool {
	ours, err := l.file.Stat()
	there, lstatErr := os.Lstat(Path(stateDir))
	return err == nil && lstatErr == nil && os.SameFile(ours, there)
}

// Release releases the lock, even if a child process has inherited the file and not yet executed
// its program.
func (l *Lock) Release() {
	_ = unix.Flock(int(l.file.Fd()), unix.LOCK_UN)
	_ = l.file.Close()
}

// Process returns the process ID of the agent that holds the lock, or "" if there is none or it is
// not visible: the kernel omits processes of other PID namespaces. It takes no lock and opens no
// file of the state directory.
//
//	1: FLOCK  ADVISORY  WRITE 1234 fd:01:131090 0 EOF	(proc_locks(5))
func Process(stateDir string) string {
	var st unix.Stat_t
	if unix.Lstat(Path(stateDir), &st) != nil {
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
