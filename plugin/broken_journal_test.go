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

// breakage is a way to break a node's existing journal. mend repairs the journal. An error of the
// broken journal contains the text in says.
type breakage struct {
	name string
	of   func(n *node) (mend func())
	says string
}

var (
	readOnly      = breakage{"read-only file system", (*node).makeReadOnly, ": journal: "}
	fullDisk      = breakage{"full disk", (*node).fillDisk, ": journal: "}
	newerFormat   = breakage{"newer format", (*node).makeNewer, "/journal.db was written by a newer release of unwind ("}
	groupWritable = breakage{"file that others can write to", (*node).makeGroupWritable, ": journal: "}
	linked        = breakage{"link", (*node).linkStateDir, ": journal: "}
	blocked       = breakage{"file", (*node).blockJournal, ": journal: "}
	strangersTurn = breakage{"queue that a stranger holds", (*node).holdQueue, ": journal: "}
)

func (n *node) makeReadOnly() (mend func()) {
	n.Helper()
	n.mount(n.stateDir, n.stateDir, "", unix.MS_BIND, "")
	n.mount("", n.stateDir, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")
	return func() { must(n, unix.Unmount(n.stateDir, unix.MNT_DETACH)) }
}

func (n *node) fillDisk() (mend func()) {
	n.Helper()
	n.mount("tmpfs", n.stateDir, "tmpfs", 0, "mode=0700,size=16k")
	n.write(filepath.Join(n.stateDir, "filler"), strings.Repeat("x", 16<<10))
	return func() { must(n, unix.Unmount(n.stateDir, unix.MNT_DETACH)) }
}

func (n *node) makeNewer() (mend func()) {
	n.Helper()
	be := func(version int) {
		key := []byte("format")
		format := journal.Seal(key, fmt.Appendf(nil, `{"oldestReader": %d}`, version))
		n.editJournal(func(tx *bolt.Tx) error { return tx.Bucket([]byte("meta")).Put(key, format) })
	}
	be(journal.Version + 1)
	return func() { be(journal.Version) }
}

func (n *node) makeGroupWritable() (mend func()) {
	n.Helper()
	must(n, os.Chmod(n.stateDir, 0o770))
	return func() { must(n, os.Chmod(n.stateDir, 0o700)) }
}

func (n *node) linkStateDir() (mend func()) {
	n.Helper()
	must(n, os.Rename(n.stateDir, n.stateDir+".real"))
	must(n, os.Symlink(n.stateDir+".real", n.stateDir))
	return func() {
		must(n, os.Rename(n.stateDir, n.stateDir+".link"))
		must(n, os.Rename(n.stateDir+".real", n.stateDir))
	}
}

// blockJournal replaces the journal file with a directory.
func (n *node) blockJournal() (mend func()) {
	n.Helper()
	path := n.store.Path()
	must(n, os.Rename(path, path+".away"))
	n.mkdir(path)
	return func() {
		must(n, os.Rename(path, path+".blocked"))
		must(n, os.Rename(path+".away", path))
	}
}

// holdQueue locks the queue file without writing to it, as a process that is not unwind might do.
func (n *node) holdQueue() (mend func()) {
	n.Helper()
	f, err := os.OpenFile(filepath.Join(n.stateDir, "journal.lock"), os.O_RDWR|os.O_CREATE, 0o600)
	must(n, err)
	must(n, unix.Flock(int(f.Fd()), unix.LOCK_EX))
	return func() { _ = f.Close() }
}

func (n *node) mount(source, target, fstype string, flags uintptr, data string) {
	n.Helper()
	must(n, unix.Mount(source, target, fstype, flags, data))
	n.Cleanup(func() { _ = unix.Unmount(target, unix.MNT_DETACH) })
}

// editJournal changes the journal file directly, not through package journal.
func (n *node) editJournal(edit func(*bolt.Tx) error) {
	n.Helper()
	db, err := bolt.Open(n.store.Path(), 0o600, &bolt.Options{Timeout: time.Second})
	must(n, err)
	must(n, errors.Join(db.Update(edit), db.Close()))
}

// TestBrokenJournal: while the journal cannot be used, an ADD runs the chain, and unwind rolls a
// failed ADD back from memory. But with onJournalFailure "fail", unwind refuses the ADD before any
// plugin runs. A DEL always runs the plugins, and their prevResult contains at least the addresses
// that are not freed yet. Once the journal works again, the next DEL undoes what remains.
func TestBrokenJournal(t *testing.T) {
	breakages := []breakage{readOnly, fullDisk, newerFormat, groupWritable, linked, strangersTurn}
	verbs := oneOf("ADD", "failing ADD", "failing ADD and DEL", "ADD refused", "failing DEL", "DEL")
	each2(t, breakages, verbs, func(t *testing.T, breakage breakage, verb choice) {
		n := newNode(t)
		n.makeJournal()
		n.chain(p0, p1, p2, p3)
		a := n.newPod("a")
		switch {
		case verb.is("ADD"):
			mend := breakage.of(n)
			a.add()
			n.wantLogged("continuing without the journal")
			mend()
			b := a.nextSandbox("b")
			b.add()
			n.wantTaken("a.eth0.p0", "a.eth0.p1", "a.eth0.p2", "a.eth0.p3",
				"b.eth0.p0", "b.eth0.p1", "b.eth0.p2", "b.eth0.p3")
			b.del()
		case verb.is("failing ADD"):
			n.plan(p2.ADD("fail-effect"))
			mend := breakage.of(n)
			n.wantError(a.tryAdd(), "faulty: p2 ADD refused")
			n.wantCalls("ADD p0", "ADD p1", "ADD p2", "DEL p2", "DEL p1", "DEL p0")
			mend()
		case verb.is("failing ADD and DEL"):
			n.plan(p2.ADD("fail-effect"), p2.DEL("fail"))
			mend := breakage.of(n)
			n.wantError(a.tryAdd(),
				"pending DEL: faulty (code 999), not recorded in the journal: ", breakage.says)
			mend()
			n.plan()
		case verb.is("ADD refused"):
			n.conf["onJournalFailure"] = "fail"
			mend := breakage.of(n)
			n.wantCode(a.tryAdd(), 11, `onJournalFailure is "fail"`)
			n.wantCalls()
			mend()
		case verb.is("failing DEL"):
			n.chain(addressed()...)
			a.add()
			n.plan(p2.DEL("fail"))
			mend := breakage.of(n)
			n.wantError(a.tryDel(), "DEL incomplete; the journal cannot be written ")
			mend()
			n.wantLocks(1)
			n.plan()
		case verb.is("DEL"):
			n.conf["onJournalFailure"] = "fail"
			n.chain(addressed()...)
			a.add()
			n.forgetCalls()
			mend := breakage.of(n)
			a.del()
			for i, call := range n.callLog() {
				shown := 4
				if breakage.name == readOnly.name { // the DEL reads the record, and withholds freed addresses
					shown -= i
				}
				want := strings.Join([]string{"198.51.100.0", "198.51.100.1", "198.51.100.2", "198.51.100.3"}[:shown], " ")
				got := call.prevAddresses(n)
				n.want(got == want, "%s had %s, want %s", call.Instance, got, want)
			}
			n.wantCalls("DEL p3", "DEL p2", "DEL p1", "DEL p0")
			mend()
		}
		a.del()
		n.wantClean()
	})
}

// useSmallDisk puts the journal on a disk of 1 MiB.
func (n *node) useSmallDisk() {
	n.Helper()
	n.mkdir(n.stateDir)
	n.mount("tmpfs", n.stateDir, "tmpfs", 0, "mode=0700,size=1m")
}

// fillSmallDisk fills the disk of useSmallDisk. drain makes space again.
func (n *node) fillSmallDisk() (drain func()) {
	n.Helper()
	filler := filepath.Join(n.stateDir, "filler")
	err := os.WriteFile(filler, make([]byte, 2<<20), 0o600)
	n.want(errors.Is(err, unix.ENOSPC), "%v", err)
	return func() { must(n, os.Remove(filler)) }
}

// failCommit runs a verb in which the n-th commit fails: at point "commit" before it has written
// anything, at point "committed" after it has written everything.
func (n *node) failCommit(point string, nth int, verb func()) {
	n.Helper()
	n.env = append(n.env, fmt.Sprintf("%s=%s %d", env.FailAt, point, nth))
	verb()
	n.env = n.env[:len(n.env)-1]
}

// TestResultNotWritten: the journal breaks after an ADD has written its intent. With either value
// of onJournalFailure, the ADD fails, and its rollback leaves nothing but a record in state adding.
// The next ADD of this sandbox or of the pod's next sandbox, or a STATUS, undoes that record.
func TestResultNotWritten(t *testing.T) {
	breakages := []breakage{blocked, readOnly, newerFormat, groupWritable, linked}
	nexts := oneOf("the same sandbox", "the next sandbox", "a STATUS")
	each3(t, []string{"degrade", "fail"}, breakages, nexts,
		func(t *testing.T, onJournalFailure string, breakage breakage, next choice) {
			n := newNode(t)
			n.chain(p0, p1, p2)
			n.versions("1.1.0", "1.1.0")
			n.conf["onJournalFailure"] = onJournalFailure
			n.plan(p0.ADD("hold"))
			a := n.newPod("a")
			add := a.beginAdd()
			n.awaitHeld("ADD", "a", "p0")
			mend := breakage.of(n)
			n.letGo("ADD", "a", "p0")
			n.wantCode(add.wait(), 11, "cannot record the result: ", breakage.says)
			n.wantCalls("ADD p0", "DEL p0")
			n.wantTaken()
			mend()
			n.plan()
			a.wantRecord(journal.Adding, 3)
			n.wantLocks(1)
			switch {
			case next.is("the same sandbox"):
				a.add()
				a.wantRecord(journal.Live, 3)
				a.del()
			case next.is("the next sandbox"):
				b := a.nextSandbox("b")
				b.add()
				a.wantGone()
				b.del()
			case next.is("a STATUS"):
				n.status()
				a.wantGone()
			}
			n.wantClean()
		})
}

// TestCommitFails: a commit of an ADD returns an error, but may have written its data. If the
// journal contains the intent, the ADD continues as if the commit had succeeded, and no sweep
// releases the attachment. If the journal lacks the intent, the ADD continues without the journal.
// If the result's commit returns an error, the ADD fails.
func TestCommitFails(t *testing.T) {
	commits := oneOf(
		"the intent, there", "the intent, not there", "the result, there", "the result, not there")
	each1(t, commits, func(t *testing.T, commit choice) {
		n := newNode(t)
		n.makeJournal()
		n.chain(bridge, firewall, p2)
		n.versions("1.1.0", "1.1.0")
		a := n.newPod("a")
		fails := func() { n.wantCode(a.tryAdd(), 11, "cannot record the result") }
		switch {
		case commit.is("the intent, there"):
			n.failCommit("committed", 1, a.add)
			n.wantLoggedTimes(1, "but it contains the ADD")
			a.wantRecord(journal.Live, 3, 1)
		case commit.is("the intent, not there"):
			n.failCommit("commit", 1, a.add)
			n.wantLoggedTimes(1, "continuing without the journal")
			n.wantRecords(0)
		case commit.is("the result, there"):
			n.failCommit("committed", 2, fails)
		case commit.is("the result, not there"):
			n.failCommit("commit", 2, fails)
		}
		if commit.has("the intent") {
			a.remember()
			b := a.nextSandbox("b")
			b.add()
			n.status()
			n.sweep()
			b.del()
			a.wantUnchanged()
			a.wantPing()
		} else {
			n.wantRecords(0)
			n.status()
			n.wantClean()
			a.add()
			a.wantRecord(journal.Live, 3, 1)
		}
		a.del()
		n.wantClean()
	})
}

// TestPrintedCounts: the journal breaks in an ADD after the intent is written. In a later verb (the
// ADD of the pod's next sandbox, or a STATUS), unwind is killed at a system call on the first
// attachment's lock file. A STATUS follows. If the first ADD printed success, the attachment keeps
// all its resources. If the first ADD failed, nothing of it is left.
func TestPrintedCounts(t *testing.T) {
	t.Parallel()
	for _, next := range oneOf("a sandbox", "a sweep") {
		t.Run(next.name, func(t *testing.T) {
			t.Parallel()
			everyPoint(t, 1, func(t *testing.T, at int) (killed bool) {
				// p0's result is written before p1 runs; p1's result is the same, so it is not written
				for _, held := range []string{"p0", "p1"} {
					t.Run(held, func(t *testing.T) {
						n := newNode(t)
						n.chain(p0, p1)
						n.plan(faulty(held).ADD("hold"))
						a := n.newPod("a")
						add := a.beginAdd()
						n.awaitHeld("ADD", "a", held)
						mend := blocked.of(n)
						n.letGo("ADD", "a", held)
						err := add.wait()
						n.want((err == nil) == (held == "p1"), "ADD: %v", err)
						mend()
						n.plan()
						ofOthers := func(file string) bool { return file[0] != 'a' }
						taken := slices.DeleteFunc(n.taken(), ofOthers)
						wantAsBefore := func() {
							n.Helper()
							n.wantEqual("taken by a", slices.DeleteFunc(n.taken(), ofOthers), taken)
						}
						b := a.nextSandbox("b")
						verb := n.tryLibcniStatus
						if next.is("a sandbox") {
							verb = b.tryAdd
						}
						n.versions("1.1.0", "1.0.0")
						killed = a.killAtLockCall(at, verb) || killed
						wantAsBefore()
						n.libcniStatus()
						wantAsBefore()
						if next.is("a sandbox") {
							_ = b.tryDel()
						}
						wantAsBefore()
						_ = a.tryDel()
						n.wantTaken()
					})
				}
				return killed
			})
		})
	}
}

// killAtLockCall runs a verb, and kills unwind at its n-th system call on the attachment's lock
// file. If there are fewer such calls, the verb must succeed.
func (p *pod) killAtLockCall(nth int, verb func() error) (killed bool) {
	p.Helper()
	program := filepath.Join(p.path[0], netconf.Name)
	path, err := os.Readlink(program)
	must(p, errors.Join(err, os.Remove(program)))
	p.script(netconf.Name, fmt.Sprintf(
		"exec strace -f -qq -o /dev/null -P %s -e inject=all:signal=KILL:when=%d %s",
		p.store.LockPath(p.key()), nth, path))
	err = verb()
	killed = wasKilled(err)
	p.want(killed || err == nil, "%v", err)
	must(p, errors.Join(os.Remove(program), os.Symlink(path, program)))
	p.awaitDelegates()
	return killed
}

// TestTurnNotCome: as long as other processes write to the journal, an ADD waits for its turn to
// write its result.
func TestTurnNotCome(t *testing.T) {
	if !sandbox.Long() {
		t.Skip("it waits for half a minute: make proof")
	}
	t.Parallel()
	n := newNode(t)
	log := filepath.Join(n.dir, "log")
	n.conf["logFile"] = log
	n.chain(p0, p1)
	n.plan(p0.ADD("hold"))
	a := n.newPod("a")
	add := a.beginAdd()
	n.awaitHeld("ADD", "a", "p0")
	stopWriting := n.keepWriting()
	n.letGo("ADD", "a", "p0")
	eventually(n, "half a minute over", func() bool {
		return strings.Contains(read(n, log), "the ADD is still waiting")
	})
	stopWriting()
	add.passes()
	a.wantRecord(journal.Live)
	a.del()
	n.wantClean()
}

// keepWriting locks the queue file and touches it once a second, as if other processes kept writing
// to the journal.
func (n *node) keepWriting() (stop func()) {
	n.Helper()
	path, over := filepath.Join(n.stateDir, "journal.lock"), make(chan struct{})
	unlock := n.flock(path)
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
	return func() {
		close(over)
		unlock()
	}
}

// TestDiskFull: even if the disk is full or fills up, pods start, and deleted pods leave nothing
// behind. The first commit of an ADD, its intent, also allocates the space for its result.
func TestDiskFull(t *testing.T) {
	whens := oneOf("from the start", "in an ADD", "between intent and result", "from a DEL on")
	each1(t, whens, func(t *testing.T, when choice) {
		n := newNode(t)
		n.useSmallDisk()
		n.chain(bridge, p1.rules(), p2)
		var drain func()
		var all []*pod
		switch {
		case when.is("from the start"):
			drain = n.fillSmallDisk()
			all = n.crowd(20, "all")
			n.wantLogged("continuing without the journal")
		case when.is("in an ADD"):
			n.plan(p2.ADD("hold-effect"))
			a := n.newPod("a")
			add := a.beginAdd()
			n.awaitHeld("ADD", "a", "p2")
			drain = n.fillSmallDisk()
			n.plan()
			n.letGo("ADD", "a", "p2")
			add.passes()
			a.wantRecord(journal.Live, 3)
			all = append([]*pod{a}, n.crowd(20, "all")...)
		case when.is("between intent and result"):
			n.plan(p0.ADD("hold"))
			n.chain(p0, bridge, p1.rules())
			a := n.newPod("a")
			add := a.beginAdd()
			n.awaitHeld("ADD", "a", "p0")
			drain = n.fillSmallDisk()
			n.plan()
			n.letGo("ADD", "a", "p0")
			add.passes()
			a.wantRecord(journal.Live, 3)
			all = append([]*pod{a}, n.crowd(20, "all")...)
		case when.is("from a DEL on"):
			all = n.crowd(20, "all")
			drain = n.fillSmallDisk()
		}
		if !when.is("from the start") {
			n.wantLoggedTimes(0, "cannot record")
		}
		for _, p := range all {
			p.del()
		}
		n.wantReserved(0)
		n.wantTaken()
		n.wantRules()
		drain()
		if when.is("from the start") {
			n.sweep()
		} else {
			n.wantRecords(0)
		}
		n.wantClean()
	})
}

// TestJournalRemoved: while a plugin runs in an ADD, the journal is removed, or another process
// replaces it because it is damaged. If the ADD still has a result to write, it writes its record
// to the new journal. If not, there is no record, and the DEL uses the runtime's input.
func TestJournalRemoved(t *testing.T) {
	whens := oneOf("at the first", "at the last")
	hows := oneOf("removed", "set aside")
	each3(t, []string{"degrade", "fail"}, whens, hows,
		func(t *testing.T, onJournalFailure string, when, how choice) {
			n := newNode(t)
			n.chain(p0.delay(500), p1, p2, p3.delay(500))
			n.conf["onJournalFailure"] = onJournalFailure
			at := p0
			if when.is("at the last") {
				at = p3
			}
			n.plan(at.ADD("late"))
			a := n.newPod("a")
			add := a.beginAdd()
			n.awaitCall("ADD " + at.instance)
			if how.is("removed") {
				n.remove(n.stateDir)
			} else {
				n.write(n.store.Path(), strings.Repeat("damaged ", 4096))
				another := &journal.Store{Dir: n.stateDir}
				must(n, another.Update(n.Context(), func(*journal.Tx) error { return nil }))
			}
			add.passes()
			n.plan()
			n.wantTaken("a.eth0.p0", "a.eth0.p1", "a.eth0.p2", "a.eth0.p3")
			if when.is("at the first") {
				a.wantRecord(journal.Live, 4, 1)
			} else {
				a.wantGone()
			}
			a.del()
			n.wantTaken()
			n.wantClean()
		})
}

// TestJournalLostInFailingADD: the journal is emptied, removed or damaged during an ADD. Then p2's
// ADD fails, and so does p0's DEL in the rollback. unwind's error reports the pending DEL, and the
// new journal contains it.
func TestJournalLostInFailingADD(t *testing.T) {
	losses := oneOf("emptied", "removed", "removed with its directory", "damaged")
	each2(t, losses, oneOf("DEL", "sweep"), func(t *testing.T, loss, next choice) {
		n := newNode(t)
		n.chain(p0, p1, p2)
		n.plan(p1.ADD("hold"), p2.ADD("fail-effect"), p0.DEL("fail"))
		a := n.newPod("a")
		add := a.beginAdd()
		n.awaitHeld("ADD", "a", "p1")
		switch {
		case loss.is("emptied"):
			must(n, os.Truncate(n.store.Path(), 0))
		case loss.is("removed"):
			must(n, os.Remove(n.store.Path()))
		case loss.is("removed with its directory"):
			n.remove(n.stateDir)
		case loss.is("damaged"):
			n.shell(`yes damaged | dd of=%s bs=64k count=1 iflag=fullblock conv=notrunc status=none`,
				n.store.Path())
		}
		n.letGo("ADD", "a", "p1")
		n.wantError(add.wait(), "unwind: pending DEL: faulty (code 999)")
		a.wantRecord(journal.RollingBack, 1, 1)
		a.wantPending("p0")
		n.plan()
		if next.is("DEL") {
			a.del()
		} else {
			n.sweep()
			a.wantGone()
		}
		n.wantClean()
	})
}

// TestJournalFailsOverPending: an earlier ADD of the container ID has a pending DEL, and a new ADD
// cannot write its intent. The new ADD continues, and the earlier record stays. The runtime's DEL
// undoes both ADDs. In the case "meanwhile", the journal breaks while the new ADD releases another
// sandbox of the pod.
func TestJournalFailsOverPending(t *testing.T) {
	each1(t, oneOf("before", "meanwhile"), func(t *testing.T, when choice) {
		n := newNode(t)
		n.chain(bridge, p1.delay(500), p2)
		n.plan(p1.DEL("fail"))
		a := n.newPod("a")
		b := a.nextSandbox("b")
		b.add()
		n.wantError(b.tryDel())
		a.add()
		n.wantError(a.tryDel())
		n.wantError(a.tryDel())
		n.forgetCalls()
		c := a.again()
		var mend func()
		var add *underWay
		if when.is("before") {
			n.plan()
			mend = readOnly.of(n)
			add = c.beginAdd()
		} else {
			n.plan(p1.DEL("late"))
			add = c.beginAdd()
			n.awaitCall("DEL p1")
			mend = blocked.of(n)
		}
		add.passes()
		mend()
		n.plan()
		c.wantPending("p1")
		n.sweep()
		c.wantPending("p1")
		n.wantTaken("a.eth0.p1", "a.eth0.p2")
		n.wantReserved(1)
		c.del()
		b.del()
		n.wantClean()
	})
}
