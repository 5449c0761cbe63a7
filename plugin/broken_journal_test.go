package plugin

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
)

// breakages break the journal of a node, which has one, and return a function that repairs it.
var breakages = map[string]func(n *node) (mend func()){
	"read-only file system": func(n *node) func() {
		n.mount(n.stateDir, n.stateDir, "", unix.MS_BIND, "")
		n.mount("", n.stateDir, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")
		return func() { n.unmount(n.stateDir) }
	},
	"full disk": func(n *node) func() {
		n.mount("tmpfs", n.stateDir, "tmpfs", 0, "mode=0700,size=16k")
		n.write(filepath.Join(n.stateDir, "filler"), strings.Repeat("x", 16<<10))
		return func() { n.unmount(n.stateDir) }
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
		n.chmod(n.stateDir, 0o770)
		return func() { n.chmod(n.stateDir, 0o700) }
	},
	"link": func(n *node) func() {
		n.rename(n.stateDir, n.stateDir+".real")
		if err := os.Symlink(n.stateDir+".real", n.stateDir); err != nil {
			n.Fatal(err)
		}
		return func() {
			n.rename(n.stateDir, n.stateDir+".link")
			n.rename(n.stateDir+".real", n.stateDir)
		}
	},
	"queue that a stranger holds": func(n *node) func() {
		f, err := os.OpenFile(filepath.Join(n.stateDir, "journal.lock"), os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			n.Fatal(err)
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
			n.Fatal(err)
		}
		return func() { _ = f.Close() }
	},
}

func (n *node) mount(source, target, fstype string, flags uintptr, data string) {
	n.Helper()
	if err := unix.Mount(source, target, fstype, flags, data); err != nil {
		n.Fatal(err)
	}
	n.Cleanup(func() { _ = unix.Unmount(target, unix.MNT_DETACH) })
}

func (n *node) unmount(target string) {
	n.Helper()
	if err := unix.Unmount(target, unix.MNT_DETACH); err != nil {
		n.Fatal(err)
	}
}

func (n *node) chmod(path string, mode os.FileMode) {
	n.Helper()
	if err := os.Chmod(path, mode); err != nil {
		n.Fatal(err)
	}
}

func (n *node) rename(from, to string) {
	n.Helper()
	if err := os.Rename(from, to); err != nil {
		n.Fatal(err)
	}
}

func (n *node) editJournal(edit func(*bolt.Tx) error) {
	n.Helper()
	db, err := bolt.Open(n.store.Path(), 0o600, &bolt.Options{Timeout: time.Second})
	if err != nil {
		n.Fatal(err)
	}
	if err := errors.Join(db.Update(edit), db.Close()); err != nil {
		n.Fatal(err)
	}
}

// makeJournal creates the node's journal.
func (n *node) makeJournal() {
	n.Helper()
	if err := n.store.Update(context.Background(), func(*journal.Tx) error { return nil }); err != nil {
		n.Fatal(err)
	}
}

// TestBrokenJournal: while the journal cannot be used, an ADD works as in the plain chain, and is
// rolled back from memory if it fails. If so configured, it is refused before any delegate runs. A
// DEL always goes on.
func TestBrokenJournal(t *testing.T) {
	t.Parallel()
	for name, breakIt := range breakages {
		for test, do := range map[string]func(*node, func(*node) func()){
			"ADD": addDegraded, "failing ADD": rollBackDegraded, "ADD refused": addRefused, "DEL": delDegraded,
		} {
			t.Run(name+", "+test, func(t *testing.T) {
				t.Parallel()
				n := newNode(t) // the journal's own waits are longer than the budgets of a test
				n.makeJournal()
				do(n, breakIt)
			})
		}
	}
}

func addDegraded(n *node, breakIt func(*node) func()) {
	list := n.unwind(chainOfFour(n)...)
	p := n.pod("a")
	mend := breakIt(n)
	p.mustAdd(list)
	if !strings.Contains(n.log(), "the journal failed; going on without it") {
		n.Errorf("no warning in the log:\n%s", n.log())
	}
	mend()
	next := n.pod("b") // which does not take it for dead
	next.Args = p.Args
	next.mustAdd(list)
	if taken := n.taken(); len(taken) != 8 {
		n.Errorf("taken: %v", taken)
	}
	next.mustDel(list)
	p.mustDel(list)
	n.nothingLeft()
}

func rollBackDegraded(n *node, breakIt func(*node) func()) {
	list := n.unwind(chainOfFour(n)...)
	p := n.pod("a")
	n.plan(map[string]map[string]string{"p2": {"ADD": "fail-effect"}})
	mend := breakIt(n)
	if _, err := p.add(list); err == nil || !strings.Contains(err.Error(), "faulty: p2 ADD refused") {
		n.Errorf("ADD: %v", err)
	}
	n.wantCalls("ADD", "ADD p0", "ADD p1", "ADD p2", "DEL p2", "DEL p1", "DEL p0")
	mend()
	p.mustDel(list)
	n.nothingLeft()
}

func addRefused(n *node, breakIt func(*node) func()) {
	n.conf["onJournalFailure"] = "fail"
	list := n.unwind(chainOfFour(n)...)
	p := n.pod("a")
	mend := breakIt(n)
	_, err := p.add(list)
	var refused *types.Error
	if !errors.As(err, &refused) || refused.Code != types.ErrTryAgainLater || !strings.Contains(refused.Msg, `onJournalFailure is "fail"`) {
		n.Errorf("ADD: %v", err)
	}
	n.wantCalls("ADD")
	mend()
	p.mustDel(list)
	n.nothingLeft()
}

func delDegraded(n *node, breakIt func(*node) func()) {
	n.conf["onJournalFailure"] = "fail"
	list := n.unwind(addressed(n, "")...)
	p := n.pod("a")
	p.mustAdd(list)
	n.forgetCalls()
	mend := breakIt(n)
	p.mustDel(list)
	log := n.callLog()
	n.wantCalls("DEL", "DEL p3", "DEL p2", "DEL p1", "DEL p0")
	for _, l := range log {
		if got := l.prevAddresses(n); got != "198.51.100.0 198.51.100.1 198.51.100.2 198.51.100.3" {
			n.Errorf("DEL %s had the addresses %q in prevResult", l.Instance, got)
		}
	}
	mend()
	p.mustDel(list) // the part that the journal missed
	n.nothingLeft()
}

// TestDamagedJournal: a damaged journal is set aside and kept, and a new one is begun. The DEL of
// an earlier pod uses what the runtime knows.
func TestDamagedJournal(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.conf["onJournalFailure"] = "fail"
	list := n.unwind(chainOfFour(n)...)
	p := n.pod("a")
	p.mustAdd(list)
	damaged := strings.Repeat("damaged ", 4096)
	n.write(n.store.Path(), damaged)
	next := n.pod("b")
	next.mustAdd(list)
	if e := next.entry(); e == nil || e.State != journal.Live {
		t.Errorf("the journal has %+v, want a live entry", e)
	}
	aside, err := filepath.Glob(n.store.Path() + ".damaged-*")
	if err != nil || len(aside) != 1 {
		t.Fatalf("set aside: %v, %v", aside, err)
	}
	if kept, err := os.ReadFile(aside[0]); err != nil || string(kept) != damaged {
		t.Errorf("it was changed (%v)", err)
	}
	next.mustDel(list)
	p.mustDel(list)
	n.nothingLeft()
}

// addWhile runs an ADD of a slow chain, and calls meanwhile while the delegate at this index runs.
func (p *pod) addWhile(list *libcni.NetworkConfigList, at int, meanwhile func()) error {
	p.Helper()
	instance := fmt.Sprintf("p%d", at)
	p.plan(map[string]map[string]string{instance: {"ADD": "late"}})
	defer p.plan(nil)
	added := make(chan error)
	go func() {
		_, err := p.add(list)
		added <- err
	}()
	p.running("ADD " + instance)
	meanwhile()
	return <-added
}

// slowChain is a chain of four whose plugins are slow in mode "late".
func slowChain(n *node) []string {
	var chain []string
	for i := range 4 {
		chain = append(chain, n.faulty(fmt.Sprintf("p%d", i), `, "delayMS": 500`))
	}
	return chain
}

// TestLastWriteFails: a journal that fails when the last delegate has succeeded still says that the
// ADD is under way. If unwind prints success all the same, nobody takes the attachment for dead.
func TestLastWriteFails(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, onFailure string
		unlocked        bool // the lock file can be removed
		ok              bool
	}{
		{"degrade", "degrade", true, true},
		{"degrade, lock file stays", "degrade", false, false},
		{"fail", "fail", true, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.conf["onJournalFailure"] = c.onFailure
			list := n.unwind(slowChain(n)...)
			p := n.pod("a")
			mend := func() {}
			err := p.addWhile(list, 0, func() {
				if c.unlocked {
					mend = n.blockFile(n.store.Path())
				} else {
					mend = breakages["read-only file system"](n)
				}
			})
			if (err == nil) != c.ok {
				t.Errorf("ADD: %v", err)
			}
			mend()
			held := n.taken()
			if len(held) != 4 && c.ok || len(held) != 0 && !c.ok {
				t.Errorf("taken after the ADD: %v", held)
			}
			if again := p.again(); c.ok {
				p.processInside()
				if _, err := again.add(list); err == nil || !strings.Contains(err.Error(), "is added already") {
					t.Errorf("ADD of the same container ID: %v", err)
				}
			}
			// Two sandboxes: the first must leave the journal unchanged.
			for _, name := range []string{"b", "c"} {
				next := n.pod(name)
				next.Args = p.Args
				next.mustAdd(list)
				next.mustDel(list)
				if taken := n.taken(); !slices.Equal(taken, held) {
					t.Errorf("taken after the pod's next sandbox: %v, want %v", taken, held)
				}
			}
			p.mustDel(list)
			n.nothingLeft()
		})
	}
}

// blockFile puts a directory in the place of a file, and returns a function that restores the file.
func (n *node) blockFile(path string) (back func()) {
	n.Helper()
	n.rename(path, path+".away")
	n.mkdir(path)
	return func() {
		n.rename(path, path+".blocked")
		n.rename(path+".away", path)
	}
}

// TestJournalRemoved: a journal that is removed while a delegate runs is begun anew, and has the
// entry before the result is printed.
func TestJournalRemoved(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		at        int
		onFailure string
		ok        bool
	}{
		{0, "degrade", true}, {0, "fail", true}, {3, "degrade", true}, {3, "fail", true},
	} {
		t.Run(fmt.Sprintf("at %d, %s", c.at, c.onFailure), func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.conf["onJournalFailure"] = c.onFailure
			list := n.unwind(slowChain(n)...)
			p := n.pod("a")
			err := p.addWhile(list, c.at, func() {
				if err := os.RemoveAll(n.stateDir); err != nil {
					t.Fatal(err)
				}
			})
			if (err == nil) != c.ok {
				t.Errorf("ADD: %v", err)
			}
			if taken := n.taken(); len(taken) != 4 && c.ok || len(taken) != 0 && !c.ok {
				t.Errorf("taken after the ADD: %v", taken)
			}
			if e := p.entry(); e == nil || e.State != journal.Live {
				t.Errorf("the journal has %+v", e)
			}
			p.mustDel(list)
			n.nothingLeft()
		})
	}
}

// TestJournalFailsOverPending: while an earlier ADD of the container ID is on record, an ADD that
// cannot be written is refused: its DEL would undo what is left of the old one, and no more.
func TestJournalFailsOverPending(t *testing.T) {
	t.Parallel()
	for _, when := range []string{"before", "meanwhile"} {
		t.Run(when, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			list := n.unwind(slowChain(n)...)
			p, kin := n.pod("a"), n.pod("b")
			kin.Args = p.Args
			n.plan(map[string]map[string]string{"p1": {"DEL": "fail"}})
			for _, pending := range []*pod{kin, p} {
				pending.mustAdd(list)
				if err := pending.del(list); err == nil {
					t.Fatal("the DEL succeeded")
				}
			}
			n.forgetCalls()
			next, mend := p.again(), func() {}
			if when == "before" {
				n.plan(nil)
				mend = breakages["read-only file system"](n)
			} else {
				n.plan(map[string]map[string]string{"p1": {"DEL": "late"}})
			}
			added := make(chan error)
			go func() {
				_, err := next.add(list)
				added <- err
			}()
			if when == "meanwhile" {
				n.running("DEL p1") // of the pod's older sandbox, which is settled first
				mend = n.blockFile(n.store.Path())
			}
			err := <-added
			mend()
			n.plan(nil)
			var refused *types.Error
			if !errors.As(err, &refused) || refused.Code != types.ErrTryAgainLater || slices.Contains(n.calls(), "ADD p0") {
				t.Errorf("ADD: %v; calls %v", err, n.calls())
			}
			next.mustDel(list)
			kin.mustDel(list)
			n.nothingLeft()
		})
	}
}

// TestTombstone: the runtime's DEL of an attachment that was undone without it runs nothing, since
// its addresses may have another owner by now.
func TestTombstone(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"rolled back", "settled by the next sandbox"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			list := n.unwind(chainOfFour(n)...)
			p := n.pod("a")
			n.plan(map[string]map[string]string{"p2": {"ADD": "fail-effect"}})
			if how != "rolled back" {
				n.plan(map[string]map[string]string{"p2": {"ADD": "fail-effect", "DEL": "fail"}})
			}
			if _, err := p.add(list); err == nil {
				t.Fatal("the ADD succeeded")
			}
			n.plan(nil)
			if how != "rolled back" {
				next := n.pod("b")
				next.Args = p.Args
				next.mustAdd(list)
				next.mustDel(list)
			}
			n.nothingLeft()
			n.forgetCalls()
			p.mustDel(list)
			p.mustDel(list)
			n.wantCalls("DEL")
			n.nothingLeft()

			// A container with the same ID that unwind did not add is a different one.
			another := p.again()
			another.mustAdd(n.plain(chainOfFour(n)...))
			another.mustDel(list)
			n.nothingLeft()
		})
	}
}
