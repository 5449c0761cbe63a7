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

func TestLock(t *testing.T) {
	tellStories(t, []story{
		{"it excludes others", func(c *cast) {
			we, p, q := c.here(), c.elsewhere(), c.elsewhere()
			we.look("a").is("free, no file")
			p.acquire("a").is("taken")
			we.look("a").is("owned")
			we.acquire("a", 0).is("busy at once")
			we.acquire("b").is("taken")
			p.release("a").ok()
			we.look("a").is("free")
			we.acquire("a").is("taken")
			we.release("a").ok()
			q.acquire("a").is("taken")
			we.acquire("a", 300*time.Millisecond).is("busy")
		}},
		{"a waiter gets the lock when it is released", func(c *cast) {
			p, we := c.elsewhere(), c.here()
			p.acquire("a").is("taken")
			we.acquire("a").waits()
			p.release("a").ok()
			we.reply().is("taken")
			we.look("a").is("owned")
		}},
		{"a waiter gets the lock when its holder dies", func(c *cast) {
			p, we := c.elsewhere(), c.here()
			p.acquire("a").is("taken")
			we.acquire("a").waits()
			p.kill()
			we.reply().is("taken")
			we.look("a").is("owned")
		}},
		{"the same process already has it", func(c *cast) {
			we, p := c.here(), c.elsewhere()
			we.acquire("a").is("taken")
			we.acquire("a", 300*time.Millisecond).is("busy")
			we.look("a").is("owned")
			p.look("a").is("owned")
			p.acquire("a").waits()
			we.release("a").ok()
			p.reply().is("taken")
			we.look("a").is("owned")
		}},
		{"another Store of the process has it", func(c *cast) {
			we, other, p := c.here(), c.here(), c.elsewhere()
			we.acquire("a").is("taken")
			other.look("a").is("owned")
			other.acquire("a", 0).is("busy at once")
			other.sweep().ok()
			p.look("a").is("owned")
		}},
		{"another Store has it, by another path", func(c *cast) {
			we, link, p := c.here(), c.byLink(), c.elsewhere()
			we.acquire("a").is("taken")
			link.look("a").is("owned")
			link.acquire("a", 0).is("busy at once")
			link.sweep().ok()
			p.look("a").is("owned")
		}},
		{"a delegate outlives the process that started it", func(c *cast) {
			p, we := c.elsewhere(), c.here()
			p.acquire("a").is("taken")
			p.spawn("a").is("spawned")
			we.look("a").is("owned")
			p.kill()
			we.look("a").is("locked")
			we.acquire("a", 300*time.Millisecond).is("taken")
			we.look("a").is("owned")
		}},
		{"taken over from a delegate's child", func(c *cast) {
			p, we, q := c.elsewhere(), c.here(), c.elsewhere()
			p.acquire("a").is("taken")
			p.spawn("a").is("spawned")
			we.takeOver("a").is("busy at once")
			p.kill()
			we.takeOver("a").is("taken")
			we.look("a").is("owned")
			q.acquire("a").waits()
			we.release("a").ok()
			q.reply().is("taken")
			we.look("a").is("owned")
		}},
		{"two processes try to take it over", func(c *cast) {
			p, q, we := c.elsewhere(), c.elsewhere(), c.here()
			p.acquire("a").is("taken")
			p.spawn("a").is("spawned")
			p.kill()
			q.takeOver("a").is("taken")
			we.takeOver("a").is("busy at once")
			we.acquire("a", 300*time.Millisecond).is("busy")
			q.release("a").ok()
			we.acquire("a").is("taken")
		}},
		{"two wait for a delegate's child and take it over one after the other", func(c *cast) {
			p, we, q := c.elsewhere(), c.here(), c.elsewhere()
			p.acquire("a").is("taken")
			p.spawn("a").is("spawned")
			we.inherit("a").waits()
			q.inherit("a").waits()
			p.kill()
			first, second := eitherIs("taken", we, q)
			first.look("a").is("owned")
			first.release("a").ok()
			second.reply().is("taken")
			first.look("a").is("owned")
		}},
		{"SkipOwned returns at once for a living owner, and waits for a delegate's child", func(c *cast) {
			p, we := c.elsewhere(), c.here()
			p.acquire("a").is("taken")
			p.spawn("a").is("spawned")
			we.skipOwned("a").is("busy at once")
			p.kill()
			we.skipOwned("a").is("taken")
			we.look("a").is("owned")
		}},
		{"a DEL waits", func(c *cast) {
			p, we, q := c.elsewhere(), c.here(), c.elsewhere()
			p.acquire("a").is("taken")
			p.awaited("a").is("false")
			we.endADD("a").waits()
			p.awaited("a").is("true")
			q.endADD("a", 300*time.Millisecond).is("busy")
			p.awaited("a").is("true")
			p.release("a").ok()
			we.reply().is("taken")
			we.noLongerAwaits("a")
		}},
		{"a DEL gives up waiting", func(c *cast) {
			p, we := c.elsewhere(), c.here()
			p.acquire("a").is("taken")
			we.endADD("a", 300*time.Millisecond).is("busy")
			p.noLongerAwaits("a")
			we.acquire("a").waits()
			p.awaited("a").is("false")
			p.release("a").ok()
			we.reply().is("taken")
		}},
		{"a DEL waits while another process takes the lock over", func(c *cast) {
			p, we, q := c.elsewhere(), c.here(), c.elsewhere()
			p.acquire("a").is("taken")
			p.spawn("a").is("spawned")
			we.endADD("a").waits()
			p.kill()
			q.takeOver("a").is("taken")
			q.look("b").waits()
			q.reply().is("free, no file")
			q.awaited("a").is("true")
			q.release("a").ok()
			we.reply().is("taken")
		}},
		{"taken over from a delegate that has ended", func(c *cast) {
			p, we := c.elsewhere(), c.here()
			p.acquire("a").is("taken")
			p.kill()
			we.takeOver("a").is("taken")
			we.look("a").is("owned")
			we.removeFile("a").ok()
			we.release("a").ok()
			we.look("a").is("free, no file")
			we.sweep().ok()
		}},
		{"a delegate leaves a daemon", func(c *cast) {
			p, we := c.elsewhere(), c.here()
			p.acquire("a").is("taken")
			p.spawn("a").is("spawned")
			p.release("a").ok()
			we.look("a").is("free")
			we.acquire("a").is("taken")
			p.kill()
			we.look("a").is("owned")
		}},
		{"its file is removed while a process waits", func(c *cast) {
			p, we := c.elsewhere(), c.here()
			p.acquire("a").is("taken")
			we.acquire("a").waits()
			p.removeFile("a").ok()
			p.release("a").ok()
			we.reply().is("taken")
			we.look("a").is("owned")
			we.removeFile("a").ok()
			p.look("a").is("free, no file")
			we.release("a").ok()
			we.look("a").is("free, no file")
		}},
		{"the file at the path is another one", func(c *cast) {
			we, p, q := c.here(), c.elsewhere(), c.elsewhere()
			we.acquire("a").is("taken")
			we.removeAll().ok()
			p.acquire("a").is("taken")
			we.removeFile("a").ok()
			q.look("a").is("owned")
		}},
		{"a sweep removes the files of free locks", func(c *cast) {
			we, p := c.here(), c.elsewhere()
			we.sweep().ok()
			we.put("record").ok()
			we.acquire("record").is("taken")
			we.release("record").ok()
			we.acquire("stray").is("taken")
			we.release("stray").ok()
			p.acquire("a").is("taken")
			we.sweep().ok()
			we.look("record").is("free, no file")
			we.look("stray").is("free, no file")
			we.look("a").is("owned")
		}},
		{"a symbolic link in place of its file is not followed", func(c *cast) {
			we := c.here()
			we.put("b").ok()
			we.plantLink("a").ok()
			we.acquire("a").fails("")
			we.look("a").fails("")
			we.planted().fails("no file")
		}},
	})
}

func tryAcquire(t *testing.T, s *Store, k Key) *Lock {
	t.Helper()
	// Another test may be starting a process. Between fork and exec, the child has copies of all
	// descriptors, so it also holds their locks. Therefore tryAcquire waits instead of trying once.
	l, err := s.Acquire(within(t, sandbox.Patience), k, Patience{})
	check(t, err)
	t.Cleanup(l.Release)
	return l
}

// helpRounds is a helper process. In each round, it increments a counter in the journal without the
// attachment's lock. Then it takes the lock, and creates and removes a directory. Creating the
// directory fails if another process holds the lock at the same time. args says whether helpRounds
// removes the lock's file in every round ("remove"), in no round ("keep"), or in every other round
// ("both").
func helpRounds(s *Store, args []string) error {
	inside, k := filepath.Join(filepath.Dir(s.Dir), "inside"), keyOf("a")
	ctx := context.Background()
	for round := range rounds {
		err := s.Update(ctx, func(tx *Tx) error {
			tx.size = 1
			_, err := tx.btx.Bucket(bucketRecords).NextSequence()
			return err
		})
		l, errLock := s.Acquire(ctx, k, Patience{Children: sandbox.Patience})
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
				if n := tx.btx.Bucket(bucketRecords).Sequence(); n != 4*rounds {
					t.Errorf("the journal counted %d writes, want %d", n, 4*rounds)
				}
				return nil
			})
		})
	}
}

// TestLockedDoesNotTake: LookAtLock never makes TryAcquire fail in another Store of the same
// process.
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
	// Two keys never share a lock, even if the concatenations of their parts are equal.
	tryAcquire(t, s, Key{"a", "b", "c"})
	tryAcquire(t, s, Key{"ab", "", "c"})
}
