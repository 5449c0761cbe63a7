package journal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"
)

// longEnv has tests that can go on for long do so: make proof.
const longEnv = "UNWIND_TEST_LONG"

// mark says how far a program is: it is in, or has done, a step.
type mark struct {
	step int
	done bool
}

// powerStep is something that a program does to a journal, one Update at most.
type powerStep struct {
	name string
	do   func(s *Store) error
	// damages: it harms the file, and syncs it. What was promised before is lost, the file is kept.
	damages bool
}

// powerSteps is a life of a journal: ADDs, which write an intent, claims and what became of it, DELs, tombstones, history,
// counters, attachments' locks, more entries than fit into the file, fewer, and twice a damage from which a fresh one begins.
func powerSteps() (steps []powerStep) {
	step := func(name string, do func(s *Store) error) { steps = append(steps, powerStep{name: name, do: do}) }
	tx := func(name string, fn func(*Tx) error) {
		step(name, func(s *Store) error { return s.Update(context.Background(), fn) })
	}
	add := func(id string, addresses ...string) {
		tx("intent of "+id, func(tx *Tx) error { return tx.Put(adding(id)) })
		tx("claims of "+id, changing(id, func(e *Entry) { e.Newest().Claims = adding(id, addresses...).Newest().Claims }))
		tx("result of "+id, changing(id, func(e *Entry) { e.State = Live }))
	}
	del := func(id string) {
		tx("DEL of "+id, changing(id, func(e *Entry) { e.State = Removing }))
		tx("end of "+id, func(tx *Tx) error { return tx.Delete(keyOf(id)) })
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
		return errors.Join(tx.Delete(keyOf("b")), tx.Bury(Tombstone{Key: keyOf("b"), Reason: "swept"}),
			tx.Record(Event{Key: keyOf("b"), Kind: Swept, Reason: "why"}), tx.Count("swept", "why"))
	})
	step("lock of c", func(s *Store) error {
		l, err := s.TryAcquire(keyOf("c"))
		if err != nil {
			return err
		}
		defer l.Release()
		return l.Forget()
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
			if err := errors.Join(tx.Delete(big(n).Key), tx.Bury(Tombstone{Key: big(n).Key})); err != nil {
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

// changing changes an entry that is there.
func changing(id string, fn func(*Entry)) func(*Tx) error {
	return func(tx *Tx) error {
		e, err := tx.Get(keyOf(id))
		if err != nil {
			return err
		}
		fn(e)
		return tx.Put(e)
	}
}

// helpPower lives the life of a journal. It tells the test when it begins one, and when it is done.
func helpPower(s *Store, args []string) error {
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

// power is a journal that was lived on a disk that notes all, and what was promised after each step.
type power struct {
	*testing.T
	*disk
	steps    []powerStep
	promised []string          // by step: all that an Update has said is written
	damaged  map[string][]byte // by the name of its step: the bytes that are to be kept
	seed     uint64
	states   atomic.Int64
	dirs     atomic.Int64
}

// TestPowerLoss loses the power at every sync, and after every step, of a journal's life, and sees what the disk may hold
// then. It runs the real program on a file system that notes what the kernel asks of it, so whatever bbolt and we write is
// there, in its order, and puts together from that the disks that there may be. The disk is one that keeps what was synced,
// and no more than that for sure:
//
//   - of the pages written since the last sync of their file, any may be there and any not, in whatever order they were
//     written: up to eight in all combinations, else in those of one after the other, one alone, one missing, and some by chance
//   - a page may be there in part: sectors of 512 bytes, the first or the last ones, or any by chance
//   - a file's size changes apart from what is in it
//   - a name that was given, changed or taken is there for sure when its folder was synced; the sync of a file says
//     nothing of its name, nor of the folder that the folder is in
//
// Of each such disk the journal is opened, read, written to and read again, and holds exactly what the last Update that
// returned nil has promised, or with it all of the one that was under way, in buckets that fit each other, by bbolt's check
// and ours. Nothing is set aside but what was damaged on purpose, and that is never gone.
//
// It does not prove that a disk which acknowledges a flush keeps what it was to flush, that a file system does what POSIX
// says of a sync, or that a rename is whole; nor what happens when a sync fails (fsync's errors: see TestDiskFull and Update).
// Two processes that write one after the other are seen, at most one is cut off within a creation.
func TestPowerLoss(t *testing.T) {
	if !isolate(t) {
		return
	}
	if _, err := os.Stat("/dev/fuse"); err != nil {
		check(t, unix.Mknod("/dev/fuse", unix.S_IFCHR|0o600, int(unix.Mkdev(10, 229))))
	}
	disks := filepath.Join(t.TempDir(), "disks")
	check(t, os.Mkdir(disks, 0o700))
	check(t, unix.Mount("tmpfs", disks, "tmpfs", 0, ""))
	t.Cleanup(func() { _ = unix.Unmount(disks, unix.MNT_DETACH) })
	for _, killed := range []string{"", "created", "renamed", "commit"} {
		name := "whole"
		if killed != "" {
			name = "after a creation that was killed, " + killed
		}
		t.Run(name, func(t *testing.T) {
			p := &power{T: t, seed: *seedFlag, damaged: map[string][]byte{}, steps: powerSteps()}
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

// live has helpPower live a journal, and notes what is promised.
func (p *power) live(killed string) {
	mnt := p.TempDir()
	p.disk = mountDisk(p.T, mnt)
	dir := filepath.Join(mnt, "state")
	if killed != "" {
		_ = start(p.T, "crash", dir, killed).wait()
		p.steps = p.steps[:3]
	}
	writer := start(p.T, "power", dir)
	for i, step := range p.steps {
		writer.expect("begin")
		p.mark(mark{i, false})
		writer.say("go")
		writer.expect("done")
		p.mark(mark{i, true})
		seen := p.now.clone()
		writer.say("go")
		if step.damages {
			p.damaged[step.name] = seen.find("state/" + fileName)
			p.promised = append(p.promised, "")
			continue
		}
		at := filepath.Join(p.TempDir(), "disk")
		check(p, seen.write(at))
		text, err := contents(&Store{Dir: filepath.Join(at, "state")})
		check(p, err)
		p.promised = append(p.promised, text)
	}
	if len(p.steps) == len(powerSteps()) {
		check(p, writer.wait())
	}
}

// contents returns all that a journal holds but for its format, as text; "" if that is nothing.
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

// lost is a disk after a loss of power.
type lost struct {
	name    string
	image   *image
	at      mark
	damaged []string // names of the steps that have damaged the file
}

// lose tries all disks.
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

// disksOf calls yield for each disk that there may be after a loss of power, once.
func (p *power) disksOf(yield func(lost) bool) {
	var pending []change
	kept := newImage()
	state := lost{at: mark{-1, true}}
	seen, seed := map[string]bool{}, maphash.MakeSeed()
	random := rand.New(rand.NewPCG(p.seed, 0))
	db := p.databases()
	for i, c := range append(p.log, change{kind: marked, mark: mark{len(p.steps) - 1, true}}) {
		if c.kind != synced && c.kind != marked {
			pending = append(pending, c)
			continue
		}
		for _, keep := range choices(pending, db, random) {
			l := state
			l.image = kept.clone()
			l.name = fmt.Sprintf("change %d: %s", i, keep.apply(l.image, pending, db, random))
			if key := fmt.Sprint(l.at, l.image.sum(seed)); !seen[key] {
				seen[key] = true
				if !yield(l) {
					return
				}
			}
		}
		switch c.kind {
		case marked:
			state.at = c.mark
			if c.mark.done && p.steps[c.mark.step].damages {
				state.damaged = append(state.damaged[:len(state.damaged):len(state.damaged)], p.steps[c.mark.step].name)
			}
		case synced:
			rest := pending[:0:0]
			for _, done := range pending {
				if done.file == c.file {
					kept.apply(done)
				} else {
					rest = append(rest, done)
				}
			}
			pending = rest
		}
	}
}

// databases returns the numbers of all files that ever were a journal, or were to be, and of all folders but that of the
// attachments' locks. What else there is, locks and the stamp in the queue's file, is never synced: nothing relies on it.
func (p *power) databases() map[int]bool {
	db := map[int]bool{rootFolder: true}
	for _, c := range p.log {
		if c.kind == renamed && (strings.HasPrefix(c.name, fileName) || c.folder && c.name != locksName) {
			db[c.target] = true
		}
	}
	return db
}

// ours says whether a change matters to what a journal holds.
func ours(c change, db map[int]bool) bool {
	return db[c.file] && (c.kind != renamed || c.folder || strings.HasPrefix(c.name+c.old, fileName))
}

// way says how much of each of our changes since the syncs is on the disk: a bit for each sector.
type way []uint8

const whole = 0xff

// choices returns those that are tried, see TestPowerLoss.
func choices(pending []change, db map[int]bool, random *rand.Rand) (all []way) {
	var units []change
	for _, c := range pending {
		if ours(c, db) {
			units = append(units, c)
		}
	}
	n := len(units)
	add := func(sectors func(i int) uint8) {
		w := make(way, n)
		for i := range w {
			w[i] = sectors(i)
		}
		all = append(all, w)
	}
	where := func(yes func(i int) bool) {
		add(func(i int) uint8 {
			if yes(i) {
				return whole
			}
			return 0
		})
	}
	where(func(int) bool { return true })
	for k := range n {
		where(func(i int) bool { return i < k })
	}
	sure := len(all)
	if n <= 8 {
		for mask := range 1 << n {
			where(func(i int) bool { return mask>>i&1 != 0 })
		}
		if n <= 4 {
			sure = len(all)
		}
	} else {
		for k := range n {
			where(func(i int) bool { return i != k })
			where(func(i int) bool { return i == k })
		}
		for range 256 {
			where(func(int) bool { return random.IntN(2) == 0 })
		}
	}
	for u, c := range units {
		if c.kind != wrote {
			continue
		}
		for k := 1; k < page/sector; k++ {
			for _, sectors := range []uint8{1<<k - 1, whole << k} {
				for _, others := range []int{n, u} { // all, or those before
					add(func(i int) uint8 {
						switch {
						case i == u:
							return sectors
						case i < others:
							return whole
						}
						return 0
					})
				}
			}
		}
	}
	for range min(n, 1) * 64 {
		add(func(int) uint8 { return uint8(random.Uint32()) })
	}
	if few := 8; os.Getenv(longEnv) == "" && len(all) > sure+few {
		some := all[sure:]
		random.Shuffle(len(some), func(i, j int) { some[i], some[j] = some[j], some[i] })
		all = all[:sure+few]
	}
	return all
}

// apply makes the changes to a disk. Those that are not ours are there or not, by chance. It returns a name for what it did.
func (w way) apply(i *image, pending []change, db map[int]bool, random *rand.Rand) string {
	var name strings.Builder
	unit := 0
	for _, c := range pending {
		if !ours(c, db) {
			if random.IntN(2) == 0 {
				i.apply(c)
			}
			continue
		}
		sectors := w[unit]
		unit++
		fmt.Fprintf(&name, "%s %02x; ", c, sectors)
		switch {
		case c.kind != wrote && sectors != 0, sectors == whole:
			i.apply(c)
		case c.kind == wrote:
			for s := range min(page/sector, (len(c.data)+sector-1)/sector) {
				if sectors>>s&1 != 0 {
					part := c
					part.at, part.data = c.at+int64(s)*sector, c.data[s*sector:min(len(c.data), (s+1)*sector)]
					i.apply(part)
				}
			}
		}
	}
	return name.String()
}

func (c change) String() string {
	switch c.kind {
	case wrote:
		return fmt.Sprintf("file %d, page %d", c.file, c.at/page)
	case resized:
		return fmt.Sprintf("file %d, size %d", c.file, c.size)
	}
	return fmt.Sprintf("folder %d, %q to %q (file %d)", c.file, c.old, c.name, c.target)
}

// reopen uses the journal on a disk, and returns what is wrong with it.
func (p *power) reopen(dir string, l lost) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v\n%s", r, debug.Stack())
		}
	}()
	if err := l.image.write(dir); err != nil {
		return err
	}
	for _, name := range l.damaged {
		if !l.keeps(p.damaged[name]) {
			return fmt.Errorf("the file of step %q is not kept", name)
		}
	}
	s := &Store{Dir: filepath.Join(dir, "state")}
	text, err := contents(s)
	damaged := errors.Is(err, errCorrupt)
	switch {
	case damaged && p.mayBeDamaged(l.at):
	case err != nil:
		return err
	case !p.mayHold(l.at, text):
		return fmt.Errorf("it holds\n%s\nand was promised\n%s", text, p.promised[max(0, l.at.step-1):l.at.step+1])
	}
	if err := p.use(s); err != nil {
		return err
	}
	want := len(l.image.names("state", fileName+".damaged-*"))
	if damaged {
		want++
	}
	if aside, _ := filepath.Glob(s.Path() + ".damaged-*"); len(aside) != want {
		return fmt.Errorf("set aside: %v, want %d", aside, want)
	}
	return nil
}

// use writes to the journal, as an ADD does, and sees that all is there that was there before.
func (p *power) use(s *Store) error {
	var before []*Entry
	e := adding("after", "10.9.9.9")
	err := s.Update(context.Background(), func(tx *Tx) error {
		before = nil
		return errors.Join(tx.Check(), tx.All(func(e *Entry, err error) error {
			before = append(before, e)
			return err
		}), tx.Put(e))
	})
	if err != nil {
		return fmt.Errorf("an Update: %w", err)
	}
	return s.View(context.Background(), func(tx *Tx) error {
		for _, old := range before {
			if old.Newest().Number >= e.Newest().Number {
				return fmt.Errorf("generation %d came after %d", e.Newest().Number, old.Newest().Number)
			}
			if now, err := tx.Get(old.Key); now == nil || err != nil {
				return fmt.Errorf("%s is gone after an Update: %w", old.Key, err)
			}
		}
		owners, err := tx.ByAddress(e.Addresses()[0])
		if len(owners) != 1 {
			err = errors.Join(err, fmt.Errorf("%d owners of a new address", len(owners)))
		}
		return errors.Join(err, tx.Check())
	})
}

// mayBeDamaged says whether the file may be one that a step has damaged: in that step, or until the next is done.
func (p *power) mayBeDamaged(at mark) bool {
	return at.step >= 0 && (p.steps[at.step].damages || !at.done && at.step > 0 && p.steps[at.step-1].damages)
}

// mayHold says whether a journal may hold something: what the last step that is done has promised, or that which is under
// way. One that was damaged holds nothing, or is not there.
func (p *power) mayHold(at mark, text string) bool {
	switch {
	case at.step < 0:
		return text == ""
	case at.done:
		return text == p.promised[at.step] && !p.steps[at.step].damages
	case at.step == 0:
		return text == "" || text == p.promised[0]
	case p.steps[at.step].damages:
		return text == p.promised[at.step-1]
	}
	return text == p.promised[at.step] || text == p.promised[at.step-1]
}

// keeps says whether a file with this content is there, as the journal or set aside.
func (l lost) keeps(data []byte) bool {
	for _, name := range l.image.names("state", fileName+"*") {
		if bytes.Equal(l.image.find("state/"+name), data) {
			return true
		}
	}
	return false
}
