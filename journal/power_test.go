package journal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"
)

// mark is the progress of a program, which is running a step or has finished it.
type mark struct {
	step int
	done bool
}

// powerStep is one operation on a journal, with at most one Update.
type powerStep struct {
	name string
	do   func(s *Store) error
	// damages is set if the step damages the journal file and syncs it. The earlier records are then
	// lost, but the damaged file must be kept.
	damages bool
}

// powerSteps returns the steps of a journal's life: ADDs, each with an intent, claims and a result;
// DELs; an abandoned record; the lock of an attachment; so many records that the file grows; and
// then fewer records. Two steps damage the file. The step after each of them starts a new file.
func powerSteps() (steps []powerStep) {
	step := func(name string, do func(s *Store) error) { steps = append(steps, powerStep{name: name, do: do}) }
	tx := func(name string, fn func(*Tx) error) {
		step(name, func(s *Store) error { return s.Update(context.Background(), fn) })
	}
	add := func(id string, addresses ...string) {
		tx("intent of "+id, func(tx *Tx) error { return tx.Put(adding(id)) })
		tx("claims of "+id, changing(id, func(e *Record) { e.Got.Claims = adding(id, addresses...).Got.Claims }))
		tx("result of "+id, changing(id, func(e *Record) { e.State = Live }))
	}
	del := func(id string) {
		tx("DEL of "+id, changing(id, func(e *Record) { e.State = Deleting }))
		tx("end of "+id, func(tx *Tx) error { return remove(tx, keyOf(id)) })
	}
	damage := func(name string, size int64) {
		steps = append(steps, powerStep{name: name, damages: true, do: func(s *Store) error {
			return errors.Join(os.Truncate(s.Path(), size), syncPath(s.Path()))
		}})
	}

	add("a", "10.0.0.1")
	add("b", "10.0.0.2", "fd00::2")
	del("a")
	tx("tombstone of b", func(tx *Tx) error {
		return errors.Join(buryIn(tx, keyOf("b"), "", "swept"))
	})
	step("lock of c", func(s *Store) error {
		l, err := s.TryAcquire(keyOf("c"))
		if err != nil {
			return err
		}
		defer l.Release()
		return l.Remove()
	})
	for i := range 3 {
		tx(fmt.Sprintf("many, %d", i), func(tx *Tx) error {
			for n := range 12 {
				if err := tx.Put(big(12*i + n)); err != nil {
					return err
				}
			}
			return nil
		})
	}
	add("c", "10.0.0.1")
	tx("few", func(tx *Tx) error {
		for n := range 30 {
			if err := buryIn(tx, big(n).Key, "", ""); err != nil {
				return err
			}
		}
		return nil
	})
	add("d", "10.0.0.3")
	damage("cut", 5*page)
	add("e", "10.0.0.4")
	del("e")
	damage("emptied", 0)
	add("f", "10.0.0.5")
	return steps
}

// changing returns a transaction that changes an existing record.
func changing(id string, fn func(*Record)) func(*Tx) error {
	return func(tx *Tx) error {
		e, err := tx.Get(keyOf(id))
		if e == nil || err != nil {
			return err
		}
		fn(e)
		return tx.Put(e)
	}
}

// helpPower is a helper process that runs powerSteps. It tells the test when each step begins and
// ends, and waits for an answer each time.
func helpPower(s *Store, _ []string) error {
	for _, step := range powerSteps() {
		tell("begin")
		await()
		if err := step.do(s); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
		tell("done")
		await()
	}
	return nil
}

// power contains the steps of a journal, the disk that recorded every change while they ran, and
// the content that was promised after each step.
type power struct {
	*testing.T
	*disk
	steps    []powerStep
	promised []string          // by step: the content that successful Updates have promised
	damaged  map[string][]byte // by step name: the damaged file, which must be kept
	unsynced map[int]string    // by step: the content after a later commit whose sync failed
	seed     uint64
	states   atomic.Int64
	dirs     atomic.Int64
}

// failsAfter maps a step's index to a sync. After that step, another process commits, and this sync
// of its commit fails. Sync 1 writes the pages, and sync 2 writes the meta page. The next commit
// must not build on pages that are not on disk.
var failsAfter = map[int]int64{5: 2, 7: 1}

// TestPowerLoss simulates a power loss at every sync and after every step of a journal's life, and
// checks each state of the disk that the loss may leave. A real process runs the steps on a file
// system that records the kernel's requests, so the test has all writes of bbolt and unwind, in
// order. A disk keeps everything that was synced. Of the later changes, it keeps some:
//
//   - Any subset of the pages written since the last sync of their file. If there are more than
//     eight, the test tries only the first n, one alone, all but one, and random subsets.
//   - Part of a page, in sectors of 512 bytes: the first n, the last n, or random ones.
//   - A file's size or its content, independently of each other.
//   - A created, renamed or removed name, which is certain only once its directory is synced. The
//     sync of a file or a directory does not cover its own name.
//
// For each disk, the test opens the journal, reads it, writes to it and reads it again. The journal
// must contain exactly the data as of the last successful Update, or as of a later Update that
// failed or was running. It must pass bbolt's check and unwind's check. The journal sets aside only
// a file that a step damaged, and that file is never lost.
//
// In three of the four runs, a first process is killed while it creates the journal. In the other
// run, syncs of another process fail between two steps. Lock files and the queue file are never
// synced, so the test keeps or drops changes to them at random. A normal run tries some of these
// disks, and `make proof` tries all of them. -seed selects other random disks.
//
// The test does not prove that a disk keeps data whose flush it acknowledged, or that a file
// system's sync and rename behave as listed here.
func TestPowerLoss(t *testing.T) {
	if testing.Short() {
		t.Skip("hundreds of disks: make test")
	}
	needDisk(t)
	disks := filepath.Join(t.TempDir(), "disks")
	check(t, os.Mkdir(disks, 0o700))
	check(t, unix.Mount("tmpfs", disks, "tmpfs", 0, ""))
	t.Cleanup(func() { _ = unix.Unmount(disks, unix.MNT_DETACH) })
	for _, killed := range []string{"", "created", "renamed", "commit"} {
		name := "whole"
		if killed != "" {
			name = "after SIGKILL during creation, " + killed
		}
		t.Run(name, func(t *testing.T) {
			p := &power{T: t, seed: *seedFlag, damaged: map[string][]byte{}, unsynced: map[int]string{}, steps: powerSteps()}
			p.live(killed)
			p.lose(filepath.Join(disks, fmt.Sprintf("after %s", killed)))
			t.Logf("%d changes, %d syncs; %d disks (seed %d)", len(p.log), p.syncs(), p.states.Load(), p.seed)
		})
	}
}

func (p *power) syncs() (n int) {
	for _, c := range p.log {
		if c.kind == synced {
			n++
		}
	}
	return n
}

// live runs helpPower and records the content that is promised after each step.
func (p *power) live(killed string) {
	mnt := p.TempDir()
	p.disk = mountDisk(p.T, mnt)
	dir := filepath.Join(mnt, "state")
	if killed != "" {
		first := start(p.T, "act", dir)
		first.dieAt(killed).ok()
		first.put("b").is("signal: killed")
		p.steps = p.steps[:3]
	}
	writer := start(p.T, "power", dir)
	for i, step := range p.steps {
		writer.expect("begin")
		p.mark(mark{i, false})
		writer.say("go")
		writer.expect("done")
		p.mark(mark{i, true})
		seen, _ := p.seen()
		if killed == "" && failsAfter[i] > 0 {
			other := start(p.T, "act", dir)
			p.failing.Store(failsAfter[i])
			other.put(fmt.Sprint("unsynced", i)).is("error: input/output error")
			after, _ := p.seen()
			p.unsynced[i] = p.contentsOf(after)
		}
		writer.say("go")
		if step.damages {
			p.damaged[step.name] = seen.journals()[fileName]
			p.promised = append(p.promised, "")
			continue
		}
		p.promised = append(p.promised, p.contentsOf(seen))
	}
	if len(p.steps) == len(powerSteps()) {
		writer.expect("")
	}
}

// contentsOf returns the contents of the journal on a disk (see contents).
func (p *power) contentsOf(seen *image) string {
	at := filepath.Join(p.TempDir(), "disk")
	check(p, seen.write(at))
	text, err := contents(&Store{Dir: filepath.Join(at, "state")})
	check(p, err)
	return text
}

// contents returns everything in a journal except its format record, as text. It returns "" for an
// empty journal.
func contents(s *Store) (text string, err error) {
	err = s.View(context.Background(), func(tx *Tx) error {
		if tx.btx == nil {
			return nil
		}
		return tx.btx.ForEach(func(name []byte, b *bolt.Bucket) error {
			if bytes.Equal(name, bucketMeta) {
				return nil
			}
			if b.Sequence() > 0 {
				text += fmt.Sprintf("%s has %d\n", name, b.Sequence())
			}
			return b.ForEach(func(k, v []byte) error {
				text += fmt.Sprintf("%s %q %q\n", name, k, v)
				return nil
			})
		})
	})
	return text, err
}

// lose checks all states of the disk that a power loss may leave, in four goroutines.
func (p *power) lose(dir string) {
	check(p, os.Mkdir(dir, 0o700))
	all := make(chan lost)
	var workers sync.WaitGroup
	for range 4 {
		workers.Go(func() {
			for l := range all {
				p.states.Add(1)
				at := filepath.Join(dir, fmt.Sprint(p.dirs.Add(1)))
				if err := p.reopen(at, l); err != nil {
					p.Errorf("step %d (%s), done: %t; %s: %v", l.at.step, p.stepName(l.at.step), l.at.done, l.name, err)
				}
				check(p, os.RemoveAll(at))
			}
		})
	}
	p.disksOf(func(l lost) bool {
		all <- l
		return !p.Failed()
	})
	close(all)
	workers.Wait()
}

func (p *power) stepName(i int) string {
	if i < 0 {
		return "before all"
	}
	return p.steps[i].name
}

// reopen opens and uses the journal on a disk that a power loss left. It returns an error if the
// journal breaks a promise.
func (p *power) reopen(dir string, l lost) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v\n%s", r, debug.Stack())
		}
	}()
	if err := l.image.write(dir); err != nil {
		return err
	}
	files := l.image.journals()
	for _, name := range l.damaged {
		if !slices.ContainsFunc(slices.Collect(maps.Values(files)), func(data []byte) bool { return bytes.Equal(data, p.damaged[name]) }) {
			return fmt.Errorf("the file of step %q is not kept", name)
		}
	}
	s := &Store{Dir: filepath.Join(dir, "state"), boot: "next"}
	text, err := contents(s)
	damaged := errors.Is(err, ErrDamaged)
	switch {
	case damaged && p.mayBeDamaged(l.at):
	case err != nil:
		return err
	case !p.mayHold(l.at, text):
		return fmt.Errorf("the journal holds\n%s\nwant one of\n%s", text, p.promised[max(0, l.at.step-1):l.at.step+1])
	}
	if err := p.use(s); err != nil {
		return err
	}
	want := 0
	for name := range files {
		if damaged && name == fileName || strings.HasPrefix(name, fileName+".damaged-") {
			want++
		}
	}
	if aside, _ := filepath.Glob(s.Path() + ".damaged-*"); len(aside) != want {
		return fmt.Errorf("set aside: %v, want %d", aside, want)
	}
	return nil
}

// use writes to the journal as an ADD does, and checks that no earlier record is lost.
func (p *power) use(s *Store) error {
	var before []*Record
	e := adding("after", "10.9.9.9")
	err := s.Update(context.Background(), func(tx *Tx) error {
		before = nil
		return errors.Join(tx.Check(), checkByBolt(tx), tx.All(func(e *Record, err error) error {
			before = append(before, e)
			return err
		}), tx.Put(e))
	})
	if err != nil {
		return fmt.Errorf("an Update: %w", err)
	}
	return s.View(context.Background(), func(tx *Tx) error {
		for _, old := range before {
			if old.Number >= e.Number {
				return fmt.Errorf("generation %d came after %d", e.Number, old.Number)
			}
			if now, err := tx.Get(old.Key); now == nil || err != nil {
				return fmt.Errorf("%s is gone after an Update: %w", old.Key, err)
			}
		}
		owners, err := tx.ByAddress(e.Addresses()[0])
		if len(owners) != 1 {
			err = errors.Join(err, fmt.Errorf("%d owners of a new address", len(owners)))
		}
		return errors.Join(err, tx.Check(), checkByBolt(tx))
	})
}

// checkByBolt runs bbolt's own check. Outside tests, unwind uses verify instead.
func checkByBolt(tx *Tx) error {
	var errs []error
	for err := range tx.btx.Check() {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// mayBeDamaged reports whether the journal's file may be one that a step damaged: from the
// beginning of that step until the end of the next step, which starts a new file.
func (p *power) mayBeDamaged(at mark) bool {
	return at.step >= 0 && (p.steps[at.step].damages || !at.done && at.step > 0 && p.steps[at.step-1].damages)
}

// mayHold reports whether text may be the content of the journal after a power loss: the content as
// of the last finished step, of the step that was running, or of a commit whose sync failed.
func (p *power) mayHold(at mark, text string) bool {
	switch {
	case at.step < 0:
		return text == ""
	case at.done:
		return !p.steps[at.step].damages && (text == p.promised[at.step] || text == p.unsynced[at.step])
	case at.step == 0:
		return text == "" || text == p.promised[0]
	case p.steps[at.step].damages:
		return text == p.promised[at.step-1]
	}
	return text == p.promised[at.step] || text == p.promised[at.step-1] || text == p.unsynced[at.step-1]
}
