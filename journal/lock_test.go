package journal

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestLock tells of the lock of an attachment.
func TestLock(t *testing.T) {
	tellStories(t, []story{
		{"it excludes others", `
			we look a = free, no file
			p acquire a = made; we look a = locked by p
			we acquire a 0s = busy at once; we acquire b = made
			p release a = ok; we look a = free; we acquire a = found; we release a = ok
			q acquire a = found; we acquire a 300ms = busy`},
		{"one waits for its release", `
			p acquire a = made; we acquire a -> a; p release a = ok; we = found; we look a = locked by we`},
		{"one waits for its holder's death", `
			p acquire a = made; we acquire a -> a; p kill; we = found; we look a = locked by we`},
		{"its process has it already", `
			we acquire a = made; we acquire a = busy at once; we look a = locked by we
			p look a = locked by we; p acquire a -> a; we release a = ok; p = found; we look a = locked by p`},
		{"another Store of the process has it", `
			we acquire a = made
			other look a = locked by we; other acquire a 0s = busy at once; other share a 1s = busy at once
			other sweep = ok; p look a = locked by we`},
		{"another Store has it, by another path", `
			we acquire a = made
			link look a = locked by we; link acquire a 0s = busy at once; link share a 1s = busy at once
			link sweep = ok; p look a = locked by we`},
		{"a delegate outlives its unwind", `
			p acquire a = made; p spawn a = spawned; we look a = locked by p
			p kill; we look a = locked; we acquire a 300ms = busy`},
		{"a delegate leaves a daemon", `
			p acquire a = made; p spawn a = spawned; p release a = ok; we look a = free
			we acquire a = found; p kill; we look a = locked by we`},
		{"shared: makes no file", `
			we share a = error: no file; we look a = free, no file
			we acquire b = made; we release b = ok
			we share a = error: no file; we look a = free, no file`},
		{"shared: excludes those that acquire", `
			p acquire a = made; we share a 300ms = busy; we share a -> a; p release a = ok; we = shared
			q share a = shared; we release a = ok; we look a = free; we acquire a 0s = busy at once
			q release a = ok; we acquire a = found`},
		{"shared: in a directory that others can write to", `
			we acquire a = made; we open = ok; other share a = error`},
		{"removed while one waits", `
			p acquire a = made; we acquire a -> a; p remove a = ok; p release a = ok
			we = made; we look a = locked by we
			we remove a = ok; p look a = free, no file; we release a = ok; we look a = free, no file`},
		{"made: its file was not there", `
			we acquire a = made; we release a = ok
			we acquire a = found; we remove a = ok; we release a = ok; we acquire a = made`},
		{"the file at the path is another one", `
			we acquire a = made; we rm = ok; p acquire a = made; we remove a = ok; q look a = locked by p`},
		{"stray files", `
			we sweep = ok; we put entry = ok; we acquire entry = made; we release entry = ok
			we acquire stray = made; we release stray = ok; p acquire a = made
			we sweep = ok; we look entry = free; we look stray = free, no file; we look a = locked by p`},
		{"an entry came before its lock file is removed as stray", `
			we put a = ok; we acquire a = made; we release a = ok; p stray a = ok; we look a = free`},
		{"the entry of an ADD that ended without the journal gets no lock file, which would say that it is dead", `
			we put a = ok; q hold b = in; p stray a = ok; p kill; we look a = free, no file`},
		{"a link in its place", `
			we put b = ok; we plant a = ok
			we acquire a = error: too many levels of symbolic links; we look a = error: too many levels of symbolic links
			we planted = error: no file`},
		{"passes that were cut off", `
			p acquire a = made; p begin a = 0; p kill; we acquire a = found; we begin a = 1; we begin a = 2
			we end a = ok; we begin a = 0`},
	})
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

// helpRounds takes a lock and releases it, many times. In the critical section it makes and removes
// a file. Outside of it, it counts.
func helpRounds(s *Store, args []string) error {
	inside, k := filepath.Join(filepath.Dir(s.Dir), "inside"), keyOf("a")
	ctx := context.Background()
	for round := range rounds {
		err := s.Update(ctx, func(tx *Tx) error { return tx.Count("rounds") })
		l, errLock := s.Acquire(ctx, k)
		if err := errors.Join(err, errLock); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		if !l.InPlace() {
			return fmt.Errorf("round %d: the lock is not that of the file at the path", round)
		}
		if err := os.Mkdir(inside, 0o700); err != nil {
			return fmt.Errorf("round %d: two are inside: %w", round, err)
		}
		time.Sleep(100 * time.Microsecond)
		err = os.Remove(inside)
		if args[0] == "remove" || args[0] == "both" && round%2 == 0 {
			err = errors.Join(err, l.Remove())
		}
		if l.Release(); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
	}
	return nil
}

const rounds = 100

// TestRounds: of many processes one at a time has the lock, and no write of theirs is lost.
func TestRounds(t *testing.T) {
	for _, how := range []string{"remove", "keep", "both"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			s := newStore(t)
			var all []*process
			for range 4 {
				all = append(all, start(t, "rounds", s.Dir, how))
			}
			for _, p := range all {
				p.expect("")
			}
			view(t, s, func(tx *Tx) error {
				if n := tx.Counter("rounds"); n != 4*rounds {
					t.Errorf("%d writes are there, want %d", n, 4*rounds)
				}
				return nil
			})
		})
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

// TestLockAgent: one agent at a time has the lock, which is a file that nobody else can open.
func TestLockAgent(t *testing.T) {
	t.Parallel()
	s := &Store{Dir: filepath.Join(t.TempDir(), "new", "state")}
	holder := func(when, want string) {
		t.Helper()
		if pid := s.AgentProcess(); pid != want {
			t.Errorf("%s: held by %q, not by %q", when, pid, want)
		}
	}
	holder("without a file", "")
	lock, err := s.LockAgent()
	check(t, err)
	holder("taken", fmt.Sprint(os.Getpid()))
	for path, want := range map[string]os.FileMode{s.Dir: os.ModeDir | 0o700, s.AgentLockPath(): 0o600} {
		if info, err := os.Lstat(path); err != nil || info.Mode() != want {
			t.Errorf("%s: %v, %v", path, info.Mode(), err)
		}
	}
	if names, _ := os.ReadDir(s.Dir); len(names) != 1 {
		t.Errorf("it made %v", names)
	}
	if _, err := s.LockAgent(); !errors.Is(err, ErrBusy) {
		t.Errorf("a second one: %v", err)
	}
	check(t, os.Rename(s.Dir, s.Dir+".away"))
	if lock.InPlace() {
		t.Error("a file that was moved away counts")
	}
	check(t, os.Rename(s.Dir+".away", s.Dir))
	if !lock.InPlace() {
		t.Error("the file is in place")
	}
	lock.Release()
	holder("released", "")
	lock, err = s.LockAgent()
	check(t, err)
	lock.Release()
}
