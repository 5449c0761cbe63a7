package plugin

import (
	"errors"
	"os"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// flock holds the lock of a file until it is unlocked, at the latest when the test ends.
func (n *node) flock(path string) (unlock func()) {
	n.Helper()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	must(n, err)
	n.Cleanup(func() { _ = f.Close() })
	must(n, unix.Flock(int(f.Fd()), unix.LOCK_EX))
	return func() { _ = f.Close() }
}

// TestStatusEndsInTime: each thing hangs that a STATUS may wait for. STATUS still ends in time, and
// fails for the hang only if it is in a delegate's own STATUS. No delegate is left.
func TestStatusEndsInTime(t *testing.T) {
	stories(t, `
	conf onJournalFailure fail; versions 1.1.0 1.0.0; chain p0 | p1; let asks other | asked
	either a delegate hangs: plan asked STATUS hang
	or a delegate ignores SIGTERM: plan asked STATUS ignore-term
	or a delegate hangs, and a daemon holds its output: let asks {"type": "hanging"}
		script hanging 'setsid sleep 20 & exec sleep 20'
	or a daemon holds its output: plan asked STATUS daemon
	or the journal's queue is held: journal; flock $state/journal.lock
	or the journal's file is held: journal; flock $state/journal.db
	or a DEL of the sweep hangs: add a; drop a; plan p1 DEL hang
	or a daemon holds the output of a DEL of the sweep: add a; drop a; plan p1 DEL daemon
	or the lock of host-local's pool is held: chain bridge; add a; drop a; flock $data/$network/lock
	versions 1.1.0 1.1.0; chain $asks; forgets; clock
	if a delegate: fails status code=50 'timed out'
	unless a delegate: status
	within 4s; all-ended
	if sweep hangs: undeleted
	leaves`, acts{
		"all-ended": func(s *story, _ []string) {
			for _, l := range s.callLog() {
				err := syscall.Kill(l.PID, 0)
				s.want(errors.Is(err, syscall.ESRCH), "%s of %s is still there: %v", l.Command, l.Instance, err)
			}
		},
		"undeleted": func(s *story, _ []string) { s.want(len(s.entries()[0].Steps) > 0, "no DEL is pending") },
	})
}

// TestStatusWhileJournalIsTaken: a sweep that cannot write its outcome is cut off too, and the next
// one repeats it.
func TestStatusWhileJournalIsTaken(t *testing.T) {
	stories(t, `
	chain p0 | p1; add a; drop a; plan p1 DEL hang
	chain other; start status; awaits DEL p1; flock $state/journal.lock; wait status
	unlock; plan; statuses 0`)
}
