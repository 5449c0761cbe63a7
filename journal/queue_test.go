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

// TestQueue covers transactions that wait for each other.
func TestQueue(t *testing.T) {
	t.Parallel()
	tellStories(t, []story{
		{"readers run concurrently, a writer waits for earlier readers, later readers wait for the writer", func(c *cast) {
			we, p, q, w, r := c.here(), c.elsewhere(), c.elsewhere(), c.elsewhere(), c.elsewhere()
			we.put("a").ok()
			p.view().is("in")
			q.view().is("in")
			w.put("b").waitsFor("journal.db")
			r.view().waitsFor("journal.lock")
			p.goOn().ok()
			q.goOn().ok()
			w.reply().ok()
			r.reply().is("in")
			r.goOn().ok()
		}},
		{"its holder is killed", func(c *cast) {
			we, p := c.here(), c.elsewhere()
			we.put("a").ok()
			p.hold("b").is("in")
			p.stop()
			p.kill()
			we.put("c", time.Second).ok()
			we.list().is("a c")
		}},
		{"the directory is removed between two transactions", func(c *cast) {
			we := c.here()
			we.put("a").ok()
			we.removeAll().ok()
			we.put("b").ok()
			we.list().is("b")
		}},
		{"the directory is removed while a writer waits", func(c *cast) {
			we, p, q := c.here(), c.elsewhere(), c.elsewhere()
			we.put("a").ok()
			p.hold("b").is("in")
			q.put("c").waitsFor("journal.lock")
			we.removeAll().ok()
			p.goOn().isAnything()
			q.reply().fails("no file")
			we.list().is("")
			we.put("d").ok()
			we.list().is("d")
		}},
		{"the directory is replaced while a writer waits", func(c *cast) {
			we, p, q, r := c.here(), c.elsewhere(), c.elsewhere(), c.elsewhere()
			we.put("a").ok()
			p.hold("b").is("in")
			q.put("c").waitsFor("journal.lock")
			we.removeAll().ok()
			r.hold("d").is("in")
			p.goOn().isAnything()
			q.waitsFor("journal.lock")
			r.goOn().ok()
			q.reply().ok()
			we.list().is("c d")
		}},
		{"another program, such as a backup, holds the file's lock: that is not damage", func(c *cast) {
			we, p := c.here(), c.elsewhere()
			we.put("a").ok()
			p.openWithBbolt().is("in")
			we.put("b").is("busy")
			p.goOn().ok()
			we.list().is("a")
			we.setAside().is("0")
		}},
		{"the journal is replaced while a writer waits for it", func(c *cast) {
			we, p, q := c.here(), c.elsewhere(), c.elsewhere()
			we.put("a").ok()
			p.openWithBbolt().is("in")
			q.put("b").waitsFor("journal.db")
			we.replace("c").ok()
			p.goOn().ok()
			q.reply().ok()
			we.list().is("b c")
		}},
		{"the journal is set aside while a writer waits", func(c *cast) {
			we, p, q := c.here(), c.elsewhere(), c.elsewhere()
			we.populate().ok()
			p.wreck("b").is("in")
			q.put("c").waitsFor("journal.lock")
			p.goOn().is("in")
			p.goOn().ok()
			q.reply().ok()
			we.list().is("b c")
			we.setAside().is("1")
		}},
	})
}

// TestStillQueue: the queue moves when a process writes to the queue file. If the queue does not
// move for maxWait, a transaction stops waiting. While it moves, readers and writers wait longer.
// The test's own process does not wait in the moving queue, because it gets SIGCHLD from its
// children, and a thread that gets a signal may lose its place in the queue.
func TestStillQueue(t *testing.T) {
	sandbox.Concurrent(t)
	t.Parallel()
	tellStories(t, []story{
		{"a queue that does not move", func(c *cast) {
			we, p := c.here(), c.elsewhere()
			we.put("a").ok()
			p.hold("b").is("in")
			p.stop()
			we.put("c", 300*time.Millisecond).is("busy")
			we.view(300 * time.Millisecond).is("busy")
			we.put("c").is("busy")
			p.resume()
			p.goOn().ok()
			we.put("c").ok()
			we.list().is("a b c")
		}},
		{"a queue that moves", func(c *cast) {
			we, p, q, r, x, y, w := c.here(), c.elsewhere(), c.elsewhere(), c.elsewhere(), c.elsewhere(), c.elsewhere(), c.elsewhere()
			we.put("a").ok()
			p.hold("b1").is("in")
			q.hold("b2").waitsFor("journal.lock")
			r.hold("b3").waitsFor("journal.lock")
			x.put("c").waitsFor("journal.lock")
			y.view().waitsFor("journal.lock")
			w.sleep().ok()
			p.goOn().ok()
			q.reply().is("in")
			w.sleep().ok()
			q.goOn().ok()
			r.reply().is("in")
			w.sleep().ok()
			r.goOn().ok()
			x.reply().ok()
			y.reply().is("in")
			y.goOn().ok()
		}},
	})
}

// TestQueued: a caller that stops waiting gets ErrBusy. The error is also ErrQueued if, and only
// if, a process has recently written to the queue file.
func TestQueued(t *testing.T) {
	s := newStore(t)
	put(t, s, adding("a"))
	holder := start(t, "act", s.Dir)
	holder.hold("b").is("in")
	for written, queued := range map[time.Time]bool{time.Now().Add(time.Hour): true, time.Now().Add(-time.Hour): false} {
		check(t, os.Chtimes(filepath.Join(s.Dir, queueName), time.Time{}, written))
		err := s.Update(within(t, 50*time.Millisecond), look)
		if !errors.Is(err, ErrBusy) || errors.Is(err, ErrQueued) != queued {
			t.Errorf("written %s: %v", written, err)
		}
	}
	holder.goOn().ok()
}

// TestWaiters: a caller that stops waiting leaves a thread in flock(2), which returns only when the
// lock is released. However many callers stop waiting, at most cap(waiters) threads remain there.
func TestWaiters(t *testing.T) {
	s := newStore(t)
	put(t, s, adding("a"))
	holder := start(t, "act", s.Dir)
	holder.hold("b").is("in")
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
	holder.goOn().ok()
	callers.Wait()
	sandbox.AwaitWaiters(t, os.Getpid(), queue, 0, 0)
}
