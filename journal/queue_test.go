package journal

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"cni-unwind/plugin/plugintest/sandbox"
)

// TestQueue tells of transactions that wait for each other.
func TestQueue(t *testing.T) {
	t.Parallel()
	tellStories(t, []story{
		{"readers read at once, a writer waits for those before it, later ones for the writer", `
			we put a = ok; p view = in; q view = in; w put b -> journal.db; r view -> journal.lock
			p go = ok; q go = ok; w = ok; r = in; r go = ok`},
		{"its holder is killed", `
			we put a = ok; p hold b = in; p stop; p kill; we put c 1s = ok; we list = a c`},
		{"the directory is removed between", `
			we put a = ok; we rm = ok; we put b = ok; we list = b`},
		{"the directory is removed while one waits", `
			we put a = ok; p hold b = in; q put c -> journal.lock; we rm = ok; p go = *; q = error: no file
			we list = ; we put d = ok; we list = d`},
		{"the directory is replaced while one waits", `
			we put a = ok; p hold b = in; q put c -> journal.lock; we rm = ok; r hold d = in
			p go = *; q -> journal.lock; r go = ok; q = ok; we list = c d`},
		{"a stranger, such as a backup, has the journal: it is no damage", `
			we put a = ok; p stranger = in; we put b = busy; p go = ok
			we list = a; we aside = 0`},
		{"the journal is replaced while one waits for it", `
			we put a = ok; p stranger = in; q put b -> journal.db; we replace c = ok; p go = ok; q = ok
			we list = b c`},
		{"the journal is set aside while one waits", `
			we populate = ok; p wreck b = in; q put c -> journal.lock
			p damage = in; p go = ok; q = ok; we list = b c; we aside = 1`},
	})
}

// TestStillQueue: nobody waits longer than maxWait for a queue that stands still; for one that moves,
// writers and readers wait longer. Processes wait for the one that moves: a thread of this process, which
// has children, may lose its place in the queue to a signal.
func TestStillQueue(t *testing.T) {
	sandbox.Concurrent(t)
	t.Parallel()
	tellStories(t, []story{
		{"still", `
			we put a = ok; p hold b = in; p stop
			we put c 300ms = busy; we view 300ms = busy; we put c = busy
			p cont; p go = ok; we put c = ok; we list = a b c`},
		{"moving", `
			we put a = ok; p hold b1 = in; q hold b2 -> journal.lock; r hold b3 -> journal.lock
			x put c -> journal.lock; y view -> journal.lock
			w sleep = ok; p go = ok; q = in
			w sleep = ok; q go = ok; r = in
			w sleep = ok; r go = ok
			x = ok; y = in; y go = ok`},
	})
}

// TestQueued: the error of a caller that had no turn tells a queue that moves from one that stands still.
func TestQueued(t *testing.T) {
	s := newStore(t)
	put(t, s, adding("a"))
	holder := start(t, "act", s.Dir)
	holder.say("hold b")
	holder.expect("in")
	for written, queued := range map[time.Time]bool{time.Now().Add(time.Hour): true, time.Now().Add(-time.Hour): false} {
		check(t, os.Chtimes(filepath.Join(s.Dir, queueName), time.Time{}, written))
		err := s.Update(within(t, 50*time.Millisecond), look)
		if !errors.Is(err, ErrBusy) || errors.Is(err, ErrQueued) != queued {
			t.Errorf("written %s: %v", written, err)
		}
	}
	holder.say("go on")
	holder.expect("ok")
}

// TestWaiters: however many callers wait for the queue and give up, no more than cap(waiters) threads wait
// for what only the lock ends.
func TestWaiters(t *testing.T) {
	s := newStore(t)
	put(t, s, adding("a"))
	holder := start(t, "act", s.Dir)
	holder.say("hold b")
	holder.expect("in")
	queue := filepath.Join(s.Dir, queueName)
	var callers sync.WaitGroup
	for range 2 * cap(waiters) {
		callers.Go(func() {
			if err := s.View(within(t, 300*time.Millisecond), look); !errors.Is(err, ErrBusy) {
				t.Errorf("View: %v, want ErrBusy", err)
			}
		})
	}
	callers.Wait()
	sandbox.AwaitWaiters(t, os.Getpid(), queue, cap(waiters), cap(waiters))
	for range 20 {
		callers.Go(func() {
			if err := s.View(t.Context(), look); err != nil {
				t.Error(err)
			}
		})
	}
	holder.say("go on")
	holder.expect("ok")
	callers.Wait()
	sandbox.AwaitWaiters(t, os.Getpid(), queue, 0, 0)
}
