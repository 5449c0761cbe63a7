package journal

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// helpLock takes the lock of an attachment, lets a process inherit it if asked, and does with it
// what the test says.
func helpLock(s *Store, args []string) error {
	l, err := s.Acquire(context.Background(), keyOf(args[0]))
	if err != nil {
		return err
	}
	tell("held")
	for {
		switch await() {
		case "spawn":
			cmd := exec.Command("sleep", "60")
			cmd.ExtraFiles = []*os.File{l.File()}
			if err := cmd.Start(); err != nil {
				return err
			}
			tell(fmt.Sprint(cmd.Process.Pid))
		case "forget":
			if err := l.Remove(); err != nil {
				return err
			}
			tell("forgotten")
		case "release":
			l.Release()
			tell("released")
		}
	}
}

// helpShare shares the lock of an attachment until the test lets it continue.
func helpShare(s *Store, args []string) error {
	l, err := s.Share(context.Background(), keyOf(args[0]))
	if err != nil {
		return err
	}
	tell("shared")
	await()
	l.Release()
	tell("released")
	return nil
}

// helpOwner prints the owner of an attachment's lock, as another process sees it.
func helpOwner(s *Store, args []string) error {
	pid, err := s.Owner(keyOf(args[0]))
	tell(fmt.Sprint(pid))
	return err
}

// holding starts a process that holds the lock of attachment "a".
func holding(t *testing.T, s *Store) *process {
	t.Helper()
	p := start(t, "lock", s.Dir, "a")
	p.expect("held")
	return p
}

// spawn has the holder start a process that inherits the lock, as a delegate does.
func (p *process) spawn() {
	p.t.Helper()
	p.say("spawn")
	pid, err := strconv.Atoi(p.line())
	check(p.t, err)
	p.t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
}

// wantLock checks what other processes see of the lock of attachment "a".
func wantLock(t *testing.T, s *Store, what string, locked, exists bool, owner int) {
	t.Helper()
	if l, e, err := s.Locked(keyOf("a")); l != locked || e != exists || err != nil {
		t.Errorf("%s: locked %t, exists %t, %v, want %t, %t", what, l, e, err, locked, exists)
	}
	if pid, err := s.Owner(keyOf("a")); pid != owner || err != nil {
		t.Errorf("%s: owner %d, %v, want %d", what, pid, err, owner)
	}
}

func tryAcquire(t *testing.T, s *Store, k Key) *Lock {
	t.Helper()
	l, err := s.TryAcquire(k)
	for end := time.Now().Add(5 * time.Second); errors.Is(err, ErrBusy) && time.Now().Before(end); l, err = s.TryAcquire(k) {
		// While a test starts a process, all descriptors exist twice for a moment.
		time.Sleep(time.Millisecond)
	}
	check(t, err)
	t.Cleanup(l.Release)
	return l
}

func TestAcquireExcludes(t *testing.T) {
	t.Parallel()
	s, k := newStore(t), keyOf("a")
	wantLock(t, s, "never taken", false, false, 0)
	p := holding(t, s)
	wantLock(t, s, "held", true, true, p.cmd.Process.Pid)
	began := time.Now()
	_, err := s.TryAcquire(k)
	if took := time.Since(began); !errors.Is(err, ErrBusy) || took > 200*time.Millisecond {
		t.Errorf("TryAcquire: %v after %v, want ErrBusy at once", err, took)
	}
	tryAcquire(t, s, keyOf("another"))

	p.say("release")
	p.expect("released")
	wantLock(t, s, "released", false, true, 0)
	tryAcquire(t, s, k).Release()

	holding(t, s)
	busy(t, "Acquire", 300*time.Millisecond, func(ctx context.Context) error {
		_, err := s.Acquire(ctx, k)
		return err
	})
}

// TestAcquireWaits: a waiting process gets the lock once it is free, by Release or by the holder's
// death.
func TestAcquireWaits(t *testing.T) {
	t.Parallel()
	for name, free := range map[string]func(*process){
		"release": func(p *process) { p.say("release") },
		"kill":    func(p *process) { _ = p.cmd.Process.Kill() },
	} {
		s := newStore(t)
		p := holding(t, s)
		time.AfterFunc(200*time.Millisecond, func() { free(p) })
		l, err := s.Acquire(within(t, 10*time.Second), keyOf("a"))
		check(t, err)
		wantLock(t, s, name, true, true, os.Getpid())
		l.Release()
	}
}

func TestLockHeldByThisProcess(t *testing.T) {
	s, k := newStore(t), keyOf("a")
	l := tryAcquire(t, s, k)
	began := time.Now()
	if _, err := s.Acquire(within(t, 10*time.Second), k); !errors.Is(err, ErrBusy) || time.Since(began) > time.Second {
		t.Errorf("Acquire of a lock that is ours: %v after %v, want ErrBusy at once", err, time.Since(began))
	}
	wantLock(t, s, "ours", true, true, os.Getpid())
	// Reading the owner did not drop the record lock.
	start(t, "owner", s.Dir, "a").expect(fmt.Sprint(os.Getpid()))
	p := start(t, "lock", s.Dir, "a")
	waiting(t, p, s.LockPath(k))
	l.Release()
	p.expect("held")
	wantLock(t, s, "given on", true, true, p.cmd.Process.Pid)
}

// TestLockOfTwoStores: another Store of the process, whatever its path to the directory, knows the
// lock as the process's, and drops no record lock when it looks.
func TestLockOfTwoStores(t *testing.T) {
	t.Parallel()
	s, k := newStore(t), keyOf("a")
	tryAcquire(t, s, k)
	link := filepath.Join(t.TempDir(), "link")
	check(t, os.Symlink(filepath.Dir(s.Dir), link))
	for _, dir := range []string{s.Dir, filepath.Join(link, "state")} {
		other := &Store{Dir: dir}
		wantLock(t, other, "of another Store", true, true, os.Getpid())
		for what, take := range map[string]func() error{
			"TryAcquire": func() error { _, err := other.TryAcquire(k); return err },
			"Share":      func() error { _, err := other.Share(within(t, time.Second), k); return err },
		} {
			if err := take(); !errors.Is(err, ErrBusy) {
				t.Errorf("%s: %v, want ErrBusy", what, err)
			}
		}
		check(t, other.RemoveStrayLocks(t.Context()))
		start(t, "owner", s.Dir, "a").expect(fmt.Sprint(os.Getpid()))
	}
}

// TestLockedDoesNotTake: a look at a lock does not keep another Store of the process from taking it.
func TestLockedDoesNotTake(t *testing.T) {
	t.Parallel()
	s, k := newStore(t), keyOf("a")
	tryAcquire(t, s, k).Release()
	stop := make(chan struct{})
	var looks sync.WaitGroup
	for range 2 {
		looks.Go(func() {
			for other := (&Store{Dir: s.Dir}); ; {
				select {
				case <-stop:
					return
				default:
					_, err := other.Owner(k)
					_, _, err2 := other.Locked(k)
					if err := errors.Join(err, err2); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	for range 300 {
		l, err := s.TryAcquire(k)
		check(t, err)
		l.Release()
	}
	close(stop)
	looks.Wait()
}

// TestLockInheritedByADelegate: a delegate that outlived its unwind holds the lock, and can be told
// apart from an unwind that lives.
func TestLockInheritedByADelegate(t *testing.T) {
	t.Parallel()
	s, k := newStore(t), keyOf("a")
	p := holding(t, s)
	p.spawn()
	wantLock(t, s, "both live", true, true, p.cmd.Process.Pid)
	p.kill()
	wantLock(t, s, "the unwind was killed", true, true, 0)
	busy(t, "Acquire", 100*time.Millisecond, func(ctx context.Context) error {
		_, err := s.Acquire(ctx, k)
		return err
	})
}

// TestReleaseDespiteADaemon: a daemon that a delegate left with the descriptor does not keep the
// lock.
func TestReleaseDespiteADaemon(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	p := holding(t, s)
	p.spawn()
	p.say("release")
	p.expect("released")
	wantLock(t, s, "released", false, true, 0)
	tryAcquire(t, s, keyOf("a"))
	p.kill()
	wantLock(t, s, "taken", true, true, os.Getpid())
}

// TestShare: holders of a shared lock exclude Acquire, but not each other. They create no file and
// are no owner.
func TestShare(t *testing.T) {
	t.Parallel()
	s, k := newStore(t), keyOf("a")
	other := &Store{Dir: s.Dir}
	for _, what := range []string{"no folder", "no file"} {
		if _, err := s.Share(t.Context(), k); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", what, err)
		}
		wantLock(t, s, what, false, false, 0)
		b, err := s.TryAcquire(keyOf("b")) // makes the directory
		check(t, err)
		b.Release()
	}

	p := holding(t, s)
	busy(t, "Share", 300*time.Millisecond, func(ctx context.Context) error {
		_, err := s.Share(ctx, k)
		return err
	})
	time.AfterFunc(200*time.Millisecond, func() { p.say("release") })
	one, err := s.Share(within(t, 10*time.Second), k)
	check(t, err)
	two := start(t, "share", s.Dir, "a")
	two.expect("shared")
	one.Release()
	wantLock(t, s, "shared", false, true, 0)
	if _, err := s.TryAcquire(k); !errors.Is(err, ErrBusy) {
		t.Errorf("TryAcquire of a lock that is shared: %v", err)
	}
	two.say("release")
	two.expect("released")
	tryAcquire(t, s, k)

	check(t, os.Chmod(filepath.Join(s.Dir, locksName), 0o777))
	if _, err := other.Share(t.Context(), k); err == nil || errors.Is(err, ErrBusy) {
		t.Errorf("a folder that others can write to: %v", err)
	}
}

func TestRemove(t *testing.T) {
	t.Parallel()
	s, k := newStore(t), keyOf("a")
	p := holding(t, s)
	got := make(chan *Lock)
	go func() {
		l, err := s.Acquire(within(t, 10*time.Second), k)
		if err != nil {
			t.Error(err)
		}
		got <- l
	}()
	time.Sleep(100 * time.Millisecond) // the process waits for the file that is removed now
	p.say("forget")
	p.expect("forgotten")
	p.say("release")
	l := <-got
	if l == nil {
		return
	}
	if !samePath(l.File(), s.LockPath(k)) {
		t.Error("the lock that was taken is not that of the file at the path")
	}
	wantLock(t, s, "taken", true, true, os.Getpid())
	check(t, l.Remove())
	if _, err := os.Lstat(s.LockPath(k)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file is there after Forget: %v", err)
	}
	l.Release()
	wantLock(t, s, "forgotten", false, false, 0)
}

func TestMade(t *testing.T) {
	s, k := newStore(t), keyOf("a")
	made := func(want bool, forget bool) {
		t.Helper()
		l, err := s.TryAcquire(k)
		check(t, err)
		defer l.Release()
		if l.Made() != want {
			t.Errorf("the file was made: %t, want %t", l.Made(), want)
		}
		if forget {
			check(t, l.Remove())
		}
	}
	made(true, false)
	made(false, true)
	made(true, false)
}

// TestRemoveOfAnother: the holder of a file that is no longer at the path removes no other's file.
func TestRemoveOfAnother(t *testing.T) {
	s, k := newStore(t), keyOf("a")
	mine := tryAcquire(t, s, k)
	check(t, os.RemoveAll(s.Dir))
	p := holding(t, s)
	_ = mine.Remove()
	if _, err := os.Lstat(s.LockPath(k)); err != nil {
		t.Errorf("process %d holds the lock, its file is gone: %v", p.cmd.Process.Pid, err)
	}
}

func TestLockOfALongKey(t *testing.T) {
	s := newStore(t)
	long := func(end string) Key {
		return Key{strings.Repeat("n", 300), strings.Repeat("c", 300) + end, strings.Repeat("i", 300)}
	}
	k := long("1")
	tryAcquire(t, s, k)
	tryAcquire(t, s, long("2"))
	if locked, exists, err := s.Locked(k); !locked || !exists || err != nil {
		t.Errorf("locked %t, exists %t, %v", locked, exists, err)
	}
	// The joined key is not ambiguous.
	tryAcquire(t, s, Key{"a", "b", "c"})
	tryAcquire(t, s, Key{"ab", "", "c"})
}

// helpRounds takes a lock and releases it, many times. In the critical section it makes and removes
// a file.
func helpRounds(s *Store, args []string) error {
	inside := filepath.Join(filepath.Dir(s.Dir), "inside")
	k := keyOf("a")
	for round := range 100 {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		l, err := s.Acquire(ctx, k)
		cancel()
		if err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		if !samePath(l.File(), s.LockPath(k)) {
			return fmt.Errorf("round %d: the lock is not that of the file at the path", round)
		}
		if err := os.Mkdir(inside, 0o700); err != nil {
			return fmt.Errorf("round %d: two are inside: %w", round, err)
		}
		time.Sleep(100 * time.Microsecond)
		if err := os.Remove(inside); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		if args[0] == "forget" || args[0] == "both" && round%2 == 0 {
			if err := l.Remove(); err != nil {
				return fmt.Errorf("round %d: %w", round, err)
			}
		}
		l.Release()
	}
	return nil
}

func TestRounds(t *testing.T) {
	for _, how := range []string{"forget", "keep", "both"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			s := newStore(t)
			var all []*process
			for range 4 {
				all = append(all, start(t, "rounds", s.Dir, how))
			}
			for _, p := range all {
				if line := p.line(); line != "" {
					t.Error(line)
				}
				check(t, p.wait())
			}
		})
	}
}

// TestRemoveStray: the lock file of no entry goes, unless it is held; that of an entry stays.
func TestRemoveStrayLocks(t *testing.T) {
	s := newStore(t)
	check(t, s.RemoveStrayLocks(t.Context())) // without a directory
	put(t, s, adding("entry"))
	for _, id := range []string{"entry", "stray"} {
		l, err := s.TryAcquire(keyOf(id))
		check(t, err)
		l.Release()
	}
	holding(t, s)
	check(t, s.RemoveStrayLocks(t.Context()))
	for id, want := range map[string]bool{"entry": true, "stray": false, "a": true} {
		_, err := os.Lstat(s.LockPath(keyOf(id)))
		if got := err == nil; got != want {
			t.Errorf("%s: there %t (%v)", id, got, err)
		}
	}
}

// helpStray removes a stray lock.
func helpStray(s *Store, args []string) error {
	return s.removeStrayLock(context.Background(), args[0])
}

// TestLockFileStaysAway: RemoveStrayLocks has seen the lock file of an ADD that begins; the
// ADD ends without the journal, so its entry is Adding and has no lock file; the sweep is killed
// while it waits for the queue. The entry must not get a lock file: with one it counts as dead.
func TestLockFileStaysAway(t *testing.T) {
	s := newStore(t)
	e := adding("a")
	update(t, s, func(tx *Tx) error { return tx.Put(e) })
	queue, err := s.queue(t.Context(), true)
	check(t, err)
	defer queue.Close()
	p := start(t, "stray", s.Dir, filepath.Base(s.LockPath(e.Key)))
	time.Sleep(500 * time.Millisecond)
	p.signal(syscall.SIGKILL)
	_ = p.wait()
	if _, err := os.Stat(s.LockPath(e.Key)); err == nil {
		t.Error("it has a lock file, which is free")
	}
}
