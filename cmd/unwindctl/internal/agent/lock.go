package agent

import (
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"cni-unwind/cmd/unwindctl/internal/agentlock"
)

// lockEach is the time between two attempts to take the lock.
const lockEach = 500 * time.Millisecond

// alone takes the agent's lock, and reports whether no other agent holds it. Two agents would
// overwrite each other's changes forever. If the lock fails for another reason, alone logs that and
// returns true.
//
// If the lock file was removed or the state directory has changed, alone takes the lock again, so
// that further agents wait.
func (r *reconciler) alone() bool {
	dir := r.journalDir(r.Setup)
	if r.lock != nil && r.lockDir == dir {
		if r.lock.InPlace(dir) {
			return true
		}
		r.log.Warn("the agent's lock file was removed, perhaps with its directory; recreating both",
			"path", agentlock.Path(dir))
	}
	lock, err := agentlock.Take(dir)
	r.unlock()
	r.lock, r.lockDir = lock, dir
	const waiting = "waiting to install"
	if !errors.Is(err, agentlock.ErrBusy) {
		r.log.warnOnce("another agent", waiting, nil)
		r.log.warnOnce("lock", "cannot take the agent's lock; a second agent on this node would not "+
			"wait for this one", err)
		return true
	}
	r.source = nil // if the other agent removes our conflist, nobody has switched unwind off
	process := ""
	if pid := agentlock.Process(dir); pid != "" {
		process = " (process " + pid + ")"
	}
	r.log.warnOnce("another agent", waiting,
		fmt.Errorf("another agent on this node%s manages %s: only one may run; waiting for it to exit",
			process, r.ConfDir))
	return false
}

func (r *reconciler) unlock() {
	if r.lock != nil {
		r.lock.Release()
		r.lock = nil
	}
}

// warnOfStateDir warns if unwind's conflist names a state directory other than this agent's. Agents
// with different state directories take different locks, so they do not wait for each other.
func (r *reconciler) warnOfStateDir() {
	was := r.Entry().StateDir
	if was == "" || r.StateDir == "" || filepath.Clean(was) == filepath.Clean(r.StateDir) {
		return
	}
	if r.log.changed("state directory", was) {
		r.log.Warn("unwind's conflist names a state directory other than --state-dir; this agent "+
			"sweeps only --state-dir, so restart it with the state directory of the conflist",
			"conflist", was, "agent", r.StateDir)
	}
}
