package plugin

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/env"
	"cni-unwind/plugin/plugintest/sandbox"
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
		be := func(version int) {
			format := []byte("format")
			n.editJournal(func(tx *bolt.Tx) error {
				return tx.Bucket([]byte("meta")).Put(format, journal.Seal(format, fmt.Appendf(nil, `{"oldestReader": %d}`, version)))
			})
		}
		be(journal.Version + 1)
		return func() { be(journal.Version) }
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
	"file": func(n *node) func() { // a directory in its place
		path := n.store.Path()
		must(n, os.Rename(path, path+".away"))
		n.mkdir(path)
		return func() {
			must(n, os.Rename(path, path+".blocked"))
			must(n, os.Rename(path+".away", path))
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
	or failing DEL: addressed; add a; plan p2 DEL fail
		break $breakage; fails del a 'DEL incomplete; the journal cannot be written '; mend; locks 1; plan
	or DEL: conf onJournalFailure fail; addressed; add a; forgets
		break $breakage; del a; previous 198.51.100.0 198.51.100.1 198.51.100.2 198.51.100.3; calls DEL p3, DEL p2, DEL p1, DEL p0
		mend
	del a`)
}

// disks are statements about a disk of 1 MiB for the journal: "disk", "fill", "drain".
var disks = acts{
	"disk": func(s *story, _ []string) {
		s.mkdir(s.stateDir)
		s.mount("tmpfs", s.stateDir, "tmpfs", 0, "mode=0700,size=1m")
	},
	"fill": func(s *story, _ []string) {
		err := os.WriteFile(filepath.Join(s.stateDir, "filler"), make([]byte, 2<<20), 0o600)
		s.want(errors.Is(err, unix.ENOSPC), "%v", err)
	},
	"drain": func(s *story, _ []string) { s.must(os.Remove(filepath.Join(s.stateDir, "filler"))) },
}

// failing is the statement "failing POINT N VERB POD": a commit fails at this point of the verb.
var failing = acts{"failing": func(s *story, w []string) {
	s.first.env = append(s.first.env, env.FailAt+"="+w[0]+" "+w[1])
	defer func() { s.first.env = s.first.env[:len(s.first.env)-1] }()
	s.run([]string{strings.Join(w[2:], " ")})
}}

// TestResultNotWritten: the journal fails after the intent. The ADD fails, whatever onJournalFailure
// says, and nothing is left of it. The pod's next ADD succeeds, and so does the next sandbox's.
func TestResultNotWritten(t *testing.T) {
	stories(t, `
	chain p0 | p1 | p2; versions 1.1.0 1.1.0
	either degrade: conf onJournalFailure degrade
	or fail: conf onJournalFailure fail
	each breakage file 'read-only file system' 'newer format' 'file that others can write to' link
	plan p0 ADD hold; start add a; appears $dir/faulty/held/ADD.a.p0
	break $breakage; lose $dir/faulty/held/ADD.a.p0
	fails wait add a code=11 'cannot record the result: journal: '
	calls ADD p0, DEL p0; taken; mend; plan
	entry a adding 3; locks 1
	either the same sandbox: add a; entry a live 3; del a
	or the next sandbox: sandbox a b; add b; gone a; del b
	or a STATUS: status; gone a`)
}

// TestCommitFails: a commit of an ADD fails, and is there or not. If the intent is there, the ADD goes on
// as if the commit had succeeded, and no sweep takes it for dead. If it is not there, the ADD goes on without
// the journal. If the result's commit fails, the ADD fails.
func TestCommitFails(t *testing.T) {
	stories(t, `
	journal; chain bridge | firewall | p2; versions 1.1.0 1.1.0
	either the intent, there: failing committed 1 add a; logged 'but it contains the ADD' 1; entry a live 3 1
	or the intent, not there: failing commit 1 add a; logged 'continuing without it' 1; entries 0
	or the result, there: failing committed 2 fails add a code=11 'cannot record the result'
	or the result, not there: failing commit 2 fails add a code=11 'cannot record the result'
	if the intent: remember a; sandbox a b; add b; status; sweep; del b; unchanged a; pings a
	if the result: entries 0; status; clean; add a; entry a live 3 1
	del a`, failing)
}

// TestPrintedCounts: the journal fails in an ADD, after the intent. Afterwards the next sandbox's ADD or a
// sweep is killed, at each system call on the attachment's lock file in turn, and a sweep follows. If the
// ADD has printed success, it keeps all that it took; otherwise nothing is left.
func TestPrintedCounts(t *testing.T) {
	t.Parallel()
	atEveryPoint(t, 1, `
	chain p0 | p1; plan p0 ADD hold; start add a; appears $dir/faulty/held/ADD.a.p0
	break file; lose $dir/faulty/held/ADD.a.p0; tries wait add a
	mend; plan; counts
	either a sandbox: sandbox a b; let verb add b
	or a sweep: let verb libcni-status
	versions 1.1.0 1.0.0; at-call $at $verb; counts
	libcni-status; counts
	if a sandbox: tries del b
	counts; tries del a; taken; leaves`, acts{
		"counts": func(s *story, _ []string) {
			s.steady("taken by a", fmt.Sprint(slices.DeleteFunc(s.node.taken(), func(f string) bool { return f[0] != 'a' })))
		},
		"at-call": func(s *story, w []string) {
			program := filepath.Join(s.path[0], netconf.Name)
			real, err := os.Readlink(program)
			s.must(errors.Join(err, os.Remove(program)))
			s.node.script(netconf.Name, fmt.Sprintf("exec strace -f -qq -o /dev/null -P %s -e inject=all:signal=KILL:when=%s %s",
				s.store.LockPath(s.who("a").key()), w[0], real))
			_, err = s.attempt(w[1:])
			s.killed = wasKilled(err)
			s.want(s.killed || err == nil, "%v", err)
			s.must(errors.Join(os.Remove(program), os.Symlink(real, program)))
			s.node.awaitDelegates()
		},
	})
}

// TestTurnNotCome: an ADD waits for its turn to write its result as long as others write to the journal.
func TestTurnNotCome(t *testing.T) {
	if !sandbox.Long() {
		t.Skip("it waits for half a minute: make proof")
	}
	stories(t, `
	conf logFile $dir/log
	chain p0 | p1; plan p0 ADD hold; start add a; appears $dir/faulty/held/ADD.a.p0
	writing; lose $dir/faulty/held/ADD.a.p0; waits; unlock; wait add a; entry a live; del a`, acts{
		"writing": func(s *story, _ []string) { // somebody has the queue, and writes to it
			path, over := filepath.Join(s.stateDir, "journal.lock"), make(chan struct{})
			unlock := s.node.flock(path)
			s.undo["unlock"] = func() { close(over); unlock() }
			go func() {
				for {
					select {
					case <-over:
						return
					case <-time.After(time.Second):
						_ = os.Chtimes(path, time.Time{}, time.Now())
					}
				}
			}()
		},
		"waits": func(s *story, _ []string) {
			eventually(s, "half a minute over", func() bool {
				return strings.Contains(read(s, filepath.Join(s.dir, "log")), "still waits for its turn")
			})
		},
	})
}

// TestDiskFull: a disk that is full, or becomes so, keeps no pod from starting, and leaves nothing of
// those that go. An ADD whose intent is written has room for its result.
func TestDiskFull(t *testing.T) {
	stories(t, `
	disk; chain bridge | p1, "rules": true | p2
	either from the start: fill; crowd 20; logged 'the journal failed; continuing without it'
	or in an ADD: plan p2 ADD hold-effect; start add a; appears $dir/faulty/held/ADD.a.p2
		fill; plan; lose $dir/faulty/held/ADD.a.p2; wait add a; entry a live 3; crowd 20
	or between intent and result: plan p0 ADD hold; chain p0 | bridge | p1, "rules": true
		start add a; appears $dir/faulty/held/ADD.a.p0
		fill; plan; lose $dir/faulty/held/ADD.a.p0; wait add a; entry a live 3; crowd 20
	or from a DEL on: crowd 20; fill
	unless start: logged 'cannot record' 0
	if in an ADD: del a
	if between: del a
	del $all; reserved 0; taken; rules; drain
	if start: sweep
	unless start: entries 0`, disks)
}

// TestJournalRemoved: a journal that is removed while a delegate runs, or set aside by another ADD, is
// begun anew, and has the entry with the next result. After the last one, the DEL goes by the runtime's input.
func TestJournalRemoved(t *testing.T) {
	stories(t, `
	chain p0, "delayMS": 500 | p1 | p2 | p3, "delayMS": 500
	either degrade: conf onJournalFailure degrade
	or fail: conf onJournalFailure fail
	either at the first: let at p0
	or at the last: let at p3
	plan $at ADD late; start add a; awaits ADD $at
	either removed: lose $state
	or set aside: damaged
	wait add a; plan
	taken a.eth0.p0 a.eth0.p1 a.eth0.p2 a.eth0.p3
	if at the first: entry a live 4 1
	if at the last: gone a
	del a; taken`, acts{"damaged": func(s *story, _ []string) {
		s.write(s.store.Path(), strings.Repeat("damaged ", 4096))
		s.must((&journal.Store{Dir: s.stateDir}).Update(s.Context(), func(*journal.Tx) error { return nil }))
	}})
}

// TestJournalLostInFailingADD: the journal is emptied, removed or damaged during an ADD that fails, with a DEL
// that fails too. The error says that this DEL is pending, and so does the journal.
func TestJournalLostInFailingADD(t *testing.T) {
	stories(t, `
	chain p0 | p1 | p2
	plan p1 ADD hold, p2 ADD fail-effect, p0 DEL fail
	start add a; appears $dir/faulty/held/ADD.a.p1
	either emptied: shell 'truncate -s 0 $state/journal.db'
	or removed: shell 'rm $state/journal.db'
	or removed with its directory: lose $state
	or damaged: shell 'yes damaged | dd of=$state/journal.db bs=64k count=1 iflag=fullblock conv=notrunc status=none'
	lose $dir/faulty/held/ADD.a.p1; fails wait add a 'unwind: pending DEL: faulty (code 999)'
	entry a rolling-back 1 1; pending a p0; plan
	either DEL: del a
	or sweep: sweep; gone a`)
}

// TestJournalFailsOverPending: while an earlier ADD of the container ID is on record, an ADD that cannot be
// written goes on, and that record stays. The DEL undoes both. "Meanwhile" is while the pod's older
// sandbox is settled, which comes first.
func TestJournalFailsOverPending(t *testing.T) {
	stories(t, `
	chain bridge | p1, "delayMS": 500 | p2
	plan p1 DEL fail; sandbox a b; add b; fails del b; add a; fails del a; fails del a
	forgets; again a c
	either before: plan; break read-only file system; start add c
	or meanwhile: plan p1 DEL late; start add c; awaits DEL p1; break file
	wait add c; mend; plan
	pending c p1; sweep; pending c p1; taken a.eth0.p1 a.eth0.p2; reserved 1
	del c b`)
}
