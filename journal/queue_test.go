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

// TestQueue covers transactions that wait for each other. See story for the language.
func TestQueue(t *testing.T) {
	t.Parallel()
	tellStories(t, []story{
		{"readers run concurrently, a writer waits for earlier readers, later readers wait for the writer", `
			we put a = ok; p view = in; q view = in; w put b -> journal.db; r view -> journal.lock
			p go = ok; q go = ok; w = ok; r = in; r go = ok`},
		{"its holder is killed", `
			we put a = ok; p hold b = in; p stop; p kill; we put c 1s = ok; we list = a c`},
		{"the directory is removed between two transactions", `
			we put a = ok; we rm = ok; we put b = ok; we list = b`},
		{"the directory is removed while a writer waits", `
			we put a = ok; p hold b = in; q put c -> journal.lock; we rm = ok; p go = *; q = error: no file
			we list = ; we put d = ok; we list = d`},
		{"the directory is replaced while a writer waits", `
			we put a = ok; p hold b = in; q put c -> journal.lock; we rm = ok; r hold d = in
			p go = *; q -> journal.lock; r go = ok; q = ok; we list = c d`},
		{"another program, such as a backup, holds the file's lock: that is not damage", `
			we put a = ok; p stranger = in; we put b = busy; p go = ok
			we list = a; we aside = 0`},
		{"the journal is replaced while a writer waits for it", `
			we put a = ok; p stranger = in; q put b -> journal.db; we replace c = ok; p go = ok; q = ok
			we list = b c`},
		{"the journal is set aside while a writer waits", `
			we populate = ok; p wreck b = in; q put c -> journal.lock
			p damage = in; p go = ok; q = ok; we list = b c; we aside = 1`},
	})
}

// TestStillQueue: a transaction waits at most maxWait while the queue doesn't move. While it moves,
// readers and writers wait longer. Other processes wait for the moving queue, not this one: it gets
// SIGCHLD from its children, and a signal may cost a thread its place in the queue.
func TestStillQueue(t *testing.T) {
	sandbox.Concurrent(t)
	t.Parallel()
	tellStories(t, []story{
		{"a queue that does not move", `
			we put a = ok; p hold b = in; p stop
			we put c 300ms = busy; we view 300ms = busy; we put c = busy
			p cont; p go = ok; we put c = ok; we list = a b c`},
		{"a queue that moves", `
			we put a = ok; p hold b1 = in; q hold b2 -> journal.lock; r hold b3 -> journal.lock
			x put c -> journal.lock; y view -> journal.lock
			w sleep = ok; p go = ok; q = in
			w sleep = ok; q go = ok; r = in
			w sleep = ok; r go = ok
			x = ok; y = in; y go = ok`},
	})
}

// TestQueued: a caller that gave up waiting gets ErrQueued, besides ErrBusy, only if the queue
// moved.
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

// TestWaiters: a caller that gives up leaves a thread behind in flock(2), which only the lock's
// release ends. However many callers give up, at most cap(waiters) threads wait there.
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
