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

	"cni-unwind/plugin/plugintest/sandbox"
)

// TestLock covers the lock of an attachment. See story for the language.
func TestLock(t *testing.T) {
	tellStories(t, []story{
		{"it excludes others", `
			we look a = free, no file
			p acquire a = taken; we look a = owned
			we acquire a 0s = busy at once; we acquire b = taken
			p release a = ok; we look a = free; we acquire a = taken; we release a = ok
			q acquire a = taken; we acquire a 300ms = busy`},
		{"a waiter gets the lock when it is released", `
			p acquire a = taken; we acquire a -> a; p release a = ok; we = taken; we look a = owned`},
		{"a waiter gets the lock when its holder dies", `
			p acquire a = taken; we acquire a -> a; p kill; we = taken; we look a = owned`},
		{"the same process already has it", `
			we acquire a = taken; we acquire a 300ms = busy; we look a = owned
			p look a = owned; p acquire a -> a; we release a = ok; p = taken; we look a = owned`},
		{"another Store of the process has it", `
			we acquire a = taken
			other look a = owned; other acquire a 0s = busy at once
			other sweep = ok; p look a = owned`},
		{"another Store has it, by another path", `
			we acquire a = taken
			link look a = owned; link acquire a 0s = busy at once
			link sweep = ok; p look a = owned`},
		{"a delegate outlives the process that started it", `
			p acquire a = taken; p spawn a = spawned; we look a = owned
			p kill; we look a = locked; we acquire a 300ms = taken; we look a = owned`},
		{"taken over from a delegate's child", `
			p acquire a = taken; p spawn a = spawned; we takeover a = busy at once; p kill; we takeover a = taken; we look a = owned
			q acquire a -> a; we release a = ok; q = taken; we look a = owned`},
		{"two processes try to take it over", `
			p acquire a = taken; p spawn a = spawned; p kill
			q takeover a = taken; we takeover a = busy at once; we acquire a 300ms = busy; q release a = ok; we acquire a = taken`},
		{"two wait for a delegate's child and take it over one after the other", `
			p acquire a = taken; p spawn a = spawned; we inherit a -> a; q inherit a -> a; p kill
			we = taken; we look a = owned; we release a = ok; q = taken; we look a = owned`},
		{"SkipOwned returns at once for a living owner, and waits for a delegate's child", `
			p acquire a = taken; p spawn a = spawned; we skip a = busy at once; p kill; we skip a = taken; we look a = owned`},
		{"a DEL waits", `
			p acquire a = taken; p awaited a = false; we end a -> a; p awaited a = true
			q end a 300ms = busy; p awaited a = true; p release a = ok; we = taken; we awaited a = false`},
		{"a DEL gives up waiting", `
			p acquire a = taken; we end a 300ms = busy; p awaited a = false; we acquire a -> a; p awaited a = false; p release a = ok; we = taken`},
		{"a DEL waits while another process takes the lock over", `
			p acquire a = taken; p spawn a = spawned; we end a -> a; p kill; q takeover a = taken; q look b -> a; q = free, no file
			q awaited a = true; q release a = ok; we = taken`},
		{"taken over from a delegate that has ended", `
			p acquire a = taken; p kill; we takeover a = taken; we look a = owned
			we remove a = ok; we release a = ok; we look a = free, no file; we sweep = ok`},
		{"a delegate leaves a daemon", `
			p acquire a = taken; p spawn a = spawned; p release a = ok; we look a = free
			we acquire a = taken; p kill; we look a = owned`},
		{"its file is removed while a process waits", `
			p acquire a = taken; we acquire a -> a; p remove a = ok; p release a = ok
			we = taken; we look a = owned
			we remove a = ok; p look a = free, no file; we release a = ok; we look a = free, no file`},
		{"the file at the path is another one", `
			we acquire a = taken; we rm = ok; p acquire a = taken; we remove a = ok; q look a = owned`},
		{"a sweep removes the files of free locks", `
			we sweep = ok; we put entry = ok; we acquire entry = taken; we release entry = ok
			we acquire stray = taken; we release stray = ok; p acquire a = taken
			we sweep = ok; we look entry = free, no file; we look stray = free, no file; we look a = owned`},
		{"a symbolic link in place of its file is not followed", `
			we put b = ok; we plant a = ok
			we acquire a = error; we look a = error
			we planted = error: no file`},
	})
}

func tryAcquire(t *testing.T, s *Store, k Key) *Lock {
	t.Helper()
	// Another test may be starting a process. Between fork and exec, the child holds copies of all
	// descriptors, and with them the locks: so wait instead of trying once.
	l, err := s.Acquire(within(t, sandbox.Patience), k, Patience{})
	check(t, err)
	t.Cleanup(l.Release)
	return l
}

// helpRounds is a helper process. In each round it increments a counter in the journal without the
// lock. With the lock, it creates a directory, which fails if another process is inside, and
// removes it. args says whether it also removes the lock's file: "remove", "keep", or "both" in
// turn.
func helpRounds(s *Store, args []string) error {
	inside, k := filepath.Join(filepath.Dir(s.Dir), "inside"), keyOf("a")
	ctx := context.Background()
	for round := range rounds {
		err := s.Update(ctx, func(tx *Tx) error {
			tx.size = 1
			_, err := tx.btx.Bucket(bucketEntries).NextSequence()
			return err
		})
		l, errLock := s.Acquire(ctx, k, Patience{Orphans: sandbox.Patience})
		if err := errors.Join(err, errLock); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		if !l.inPlace() {
			return fmt.Errorf("round %d: another file is at the lock's path", round)
		}
		if err := os.Mkdir(inside, 0o700); err != nil {
			return fmt.Errorf("round %d: two processes hold the lock: %w", round, err)
		}
		time.Sleep(100 * time.Microsecond)
		err = os.Remove(inside)
		if args[0] == "remove" || args[0] == "both" && round%2 == 0 {
			err = errors.Join(err, l.Remove())
		}
		l.Release()
		if err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
	}
	return nil
}

const rounds = 100

// TestRounds: four processes compete for one lock. Only one of them holds it at a time, and none of
// their writes to the journal is lost.
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
				if n := tx.btx.Bucket(bucketEntries).Sequence(); n != 4*rounds {
					t.Errorf("the journal counted %d writes, want %d", n, 4*rounds)
				}
				return nil
			})
		})
	}
}

// TestLockedDoesNotTake: LookAtLock never makes TryAcquire fail in another Store of the process.
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
					if _, err := other.LookAtLock(k); err != nil {
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
	if lock, err := s.LookAtLock(k); !lock.Held || !lock.Owned || err != nil {
		t.Errorf("%+v, %v", lock, err)
	}
	// Two keys never share a lock, even if their parts joined together are equal.
	tryAcquire(t, s, Key{"a", "b", "c"})
	tryAcquire(t, s, Key{"ab", "", "c"})
}
