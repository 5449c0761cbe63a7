package plugin

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
)

// breakages break the journal of a node, which has one, and return a function that repairs it.
var breakages = map[string]func(n *node) (mend func()){
	"read-only file system": func(n *node) func() {
		n.mount(n.stateDir, n.stateDir, "", unix.MS_BIND, "")
		n.mount("", n.stateDir, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")
		return func() { must(n, unix.Unmount(n.stateDir, unix.MNT_DETACH)) }
	},
	"full disk": func(n *node) func() {
		n.mount("tmpfs", n.stateDir, "tmpfs", 0, "mode=0700,size=16k")
		n.write(filepath.Join(n.stateDir, "filler"), strings.Repeat("x", 16<<10))
		return func() { must(n, unix.Unmount(n.stateDir, unix.MNT_DETACH)) }
	},
	"newer format": func(n *node) func() {
		n.editJournal(func(tx *bolt.Tx) error {
			return tx.Bucket([]byte("meta")).Put([]byte("format"), []byte(`{"writer": 99, "oldestReader": 99}`))
		})
		return func() {
			n.editJournal(func(tx *bolt.Tx) error {
				return tx.Bucket([]byte("meta")).Put([]byte("format"), []byte(`{"writer": 1, "oldestReader": 1}`))
			})
		}
	},
	"file that others can write to": func(n *node) func() {
		must(n, os.Chmod(n.stateDir, 0o770))
		return func() { must(n, os.Chmod(n.stateDir, 0o700)) }
	},
	"link": func(n *node) func() {
		must(n, os.Rename(n.stateDir, n.stateDir+".real"))
		must(n, os.Symlink(n.stateDir+".real", n.stateDir))
		return func() {
			must(n, os.Rename(n.stateDir, n.stateDir+".link"))
			must(n, os.Rename(n.stateDir+".real", n.stateDir))
		}
	},
	"queue that a stranger holds": func(n *node) func() {
		f, err := os.OpenFile(filepath.Join(n.stateDir, "journal.lock"), os.O_RDWR|os.O_CREATE, 0o600)
		must(n, err)
		must(n, unix.Flock(int(f.Fd()), unix.LOCK_EX))
		return func() { _ = f.Close() }
	},
}

func (n *node) mount(source, target, fstype string, flags uintptr, data string) {
	n.Helper()
	must(n, unix.Mount(source, target, fstype, flags, data))
	n.Cleanup(func() { _ = unix.Unmount(target, unix.MNT_DETACH) })
}

// editJournal changes the journal past its own code.
func (n *node) editJournal(edit func(*bolt.Tx) error) {
	n.Helper()
	db, err := bolt.Open(n.store.Path(), 0o600, &bolt.Options{Timeout: time.Second})
	must(n, err)
	must(n, errors.Join(db.Update(edit), db.Close()))
}

// makeJournal creates the node's journal.
func (n *node) makeJournal() {
	n.Helper()
	must(n, n.store.Update(context.Background(), func(*journal.Tx) error { return nil }))
}

// blockFile puts a directory in the place of a file, and returns a function that restores the file.
func (n *node) blockFile(path string) (back func()) {
	n.Helper()
	must(n, os.Rename(path, path+".away"))
	n.mkdir(path)
	return func() {
		must(n, os.Rename(path, path+".blocked"))
		must(n, os.Rename(path+".away", path))
	}
}

// TestBrokenJournal: while the journal cannot be used, an ADD works as in the plain chain, and is
// rolled back from memory if it fails. If so configured, it is refused before any delegate runs. A
// DEL always goes on, with the addresses, and the next one undoes what the journal missed of it.
func TestBrokenJournal(t *testing.T) {
	stories(t, `
	journal; chain p0 | p1 | p2 | p3
	each breakage 'read-only file system' 'full disk' 'newer format' 'file that others can write to' link
		'queue that a stranger holds'
	either ADD: break $breakage; add a; logged 'the journal failed; continuing without it'
		mend; sandbox a b; add b
		taken a.eth0.p0 a.eth0.p1 a.eth0.p2 a.eth0.p3 b.eth0.p0 b.eth0.p1 b.eth0.p2 b.eth0.p3
		del b
	or failing ADD: plan p2 ADD fail-effect
		break $breakage; fails add a 'faulty: p2 ADD refused'
		calls ADD p0, ADD p1, ADD p2, DEL p2, DEL p1, DEL p0
		mend
	or failing ADD and DEL: plan p2 ADD fail-effect, p2 DEL fail
		break $breakage; fails add a 'pending DEL: faulty (code 999), which the journal cannot record: journal: '
		mend; plan
	or ADD refused: conf onJournalFailure fail
		break $breakage; fails add a code=11 'onJournalFailure is "fail"'
		calls; mend
	or DEL: conf onJournalFailure fail; addressed; add a; forgets
		break $breakage; del a; previous 198.51.100.0 198.51.100.1 198.51.100.2 198.51.100.3; calls DEL p3, DEL p2, DEL p1, DEL p0
		mend
	del a`)
}

// TestLastWriteFails: a journal that fails when the last delegate has succeeded still says that the
// ADD is under way. If unwind prints success all the same, nobody takes the attachment for dead. Of
// the pod's two next sandboxes, the first must leave the journal unchanged.
func TestLastWriteFails(t *testing.T) {
	stories(t, `
	chain p0, "delayMS": 500 | p1 | p2 | p3
	plan p0 ADD late
	either passes, degrade: conf onJournalFailure degrade; start add a; awaits ADD p0; break file
	or refused, degrade, lock file stays: conf onJournalFailure degrade; start add a; awaits ADD p0; break read-only file system
	or refused, fail: conf onJournalFailure fail; start add a; awaits ADD p0; break file
	if passes: wait add a; let held a.eth0.p0 a.eth0.p1 a.eth0.p2 a.eth0.p3
	if refused: fails wait add a; let held
	mend; plan; taken $held
	if passes: again a b; process a; fails add b 'is already attached'
	sandbox a c; add c; del c; taken $held
	sandbox a d; add d; del d; taken $held
	del a`)
}

// TestJournalRemoved: a journal that is removed while a delegate runs, or set aside by another ADD, is
// begun anew, and has the entry before the result is printed.
func TestJournalRemoved(t *testing.T) {
	stories(t, `
	chain p0, "delayMS": 500 | p1 | p2 | p3, "delayMS": 500
	either degrade: conf onJournalFailure degrade
	or fail: conf onJournalFailure fail
	either at the first: let at p0
	or at the last: let at p3
	plan $at ADD late; start add a; awaits ADD $at
	either removed: lose journal
	or set aside: damaged
	wait add a; plan
	taken a.eth0.p0 a.eth0.p1 a.eth0.p2 a.eth0.p3; entry a live
	tries del a`, acts{"damaged": func(s *story, _ []string) {
		s.write(s.store.Path(), strings.Repeat("damaged ", 4096))
		s.must((&journal.Store{Dir: s.stateDir}).Update(s.Context(), func(*journal.Tx) error { return nil }))
	}})
}

// TestJournalFailsOverPending: while an earlier ADD of the container ID is on record, an ADD that
// cannot be written goes on. Its DEL undoes both. "Meanwhile" is while the pod's older sandbox is settled,
// which comes first.
func TestJournalFailsOverPending(t *testing.T) {
	stories(t, `
	chain p0 | p1, "delayMS": 500 | p2 | p3
	plan p1 DEL fail; sandbox a b; add b; fails del b; add a; fails del a
	forgets; again a c
	either before: plan; break read-only file system; start add c
	or meanwhile: plan p1 DEL late; start add c; awaits DEL p1; break file
	wait add c; mend; plan
	times 1 ADD p0
	del c b`)
}
