package journal

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// AgentLockName is the file of the agent's lock in the directory of a journal.
const AgentLockName = "agent.lock"

// LockAgent takes the agent's lock if it is free, and otherwise returns ErrBusy immediately. The
// agent of a node holds it, so that two agents do not conflict. The lock is released when its
// process ends; the file stays. LockAgent creates a missing directory (0700) and file (0600). It
// follows no link, and rejects a directory that others can write to.
func (s *Store) LockAgent() (*Lock, error) {
	if err := s.makeDirs(s.Dir); err != nil {
		return nil, err
	}
	path := s.AgentLockPath()
	f, err := lockFile(atOnce(), path, os.O_RDWR|os.O_CREATE, unix.LOCK_EX)
	switch {
	case errors.Is(err, unix.EISDIR):
		return nil, fmt.Errorf("journal: %s is not a regular file; move it away", path)
	case err != nil:
		return nil, fmt.Errorf("journal: the agent's lock: %w", err)
	}
	return &Lock{path: path, file: f}, nil
}

// AgentLockPath returns the path of the agent's lock.
func (s *Store) AgentLockPath() string { return filepath.Join(s.Dir, AgentLockName) }

// AgentProcess returns the process ID of the agent that holds the lock, or "" if there is none or
// it is not visible: the kernel omits processes of other PID namespaces. It takes no lock and opens
// no file of the journal.
//
//	1: FLOCK  ADVISORY  WRITE 1234 fd:01:131090 0 EOF	(proc_locks(5))
func (s *Store) AgentProcess() string {
	var st unix.Stat_t
	if unix.Lstat(s.AgentLockPath(), &st) != nil {
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
