package journal

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// helpIncrement increments a counter in an entry, as often as args say.
func helpIncrement(s *Store, args []string) error {
	times, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	for range times {
		err := s.Update(context.Background(), func(tx *Tx) error {
			e, err := tx.Get(keyOf("counter"))
			if err != nil {
				return err
			}
			n, err := strconv.Atoi(e.Reason)
			e.Reason = strconv.Itoa(n + 1)
			return errors.Join(err, tx.Put(e))
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func TestNoWriteIsLost(t *testing.T) {
	t.Parallel()
	const processes, times = 8, 50
	s := newStore(t)
	e := adding("counter")
	e.Reason = "0"
	put(t, s, e)
	var all []*process
	for range processes {
		all = append(all, start(t, "increment", s.Dir, fmt.Sprint(times)))
	}
	for _, p := range all {
		if line := p.line(); line != "" {
			t.Error(line)
		}
		check(t, p.wait())
	}
	if got := get(t, s, e.Key).Reason; got != fmt.Sprint(processes*times) {
		t.Errorf("%s increments are there, want %d", got, processes*times)
	}
}

// helpTransact puts an entry and stays in the transaction until the test lets it continue.
func helpTransact(s *Store, args []string) error {
	err := s.Update(context.Background(), func(tx *Tx) error {
		tell("in")
		await()
		return tx.Put(adding(args[0]))
	})
	if err == nil {
		tell("done")
	}
	return err
}

// busy checks that a wait ends with ErrBusy, at its deadline and not later.
func busy(t *testing.T, what string, deadline time.Duration, wait func(context.Context) error) {
	t.Helper()
	began := time.Now()
	err := wait(within(t, deadline))
	took := time.Since(began)
	if !errors.Is(err, ErrBusy) || took < deadline-10*time.Millisecond || took > deadline+500*time.Millisecond {
		t.Errorf("%s with %v to wait: %v after %v, want ErrBusy", what, deadline, err, took)
	}
}

func TestStoppedInATransaction(t *testing.T) {
	if testing.Short() {
		t.Skip("it waits for MaxWait: make test")
	}
	t.Parallel()
	s := newStore(t)
	put(t, s, adding("a"))
	p := start(t, "transact", s.Dir, "b")
	p.expect("in")
	p.signal(syscall.SIGSTOP)
	busy(t, "Update", 300*time.Millisecond, func(ctx context.Context) error { return s.Update(ctx, look) })
	busy(t, "View", 300*time.Millisecond, func(ctx context.Context) error { return s.View(ctx, look) })
	began := time.Now()
	err := s.Update(t.Context(), look)
	if took := time.Since(began); !errors.Is(err, ErrBusy) || took > MaxWait+time.Second {
		t.Errorf("Update without a deadline: %v after %v, want ErrBusy after %v", err, took, MaxWait)
	}

	p.signal(syscall.SIGCONT)
	p.say("go on")
	p.expect("done")
	put(t, s, adding("c"))
	if diff := cmp.Diff([]string{"a", "b", "c"}, idsOf(t, s)); diff != "" {
		t.Errorf("entries after SIGCONT (-want +got):\n%s", diff)
	}
}

// TestMovingQueue: writers and readers wait longer than MaxWait for a queue that moves.
func TestMovingQueue(t *testing.T) {
	if testing.Short() {
		t.Skip("it waits for MaxWait: make test")
	}
	t.Parallel()
	s := newStore(t)
	put(t, s, adding("a"))
	var ahead []*process
	for i := range 3 {
		p := start(t, "transact", s.Dir, fmt.Sprint("b", i))
		if i == 0 {
			p.expect("in")
		} else {
			waiting(t, p, filepath.Join(s.Dir, queueName))
		}
		ahead = append(ahead, p)
	}
	done := make(chan error, 2)
	go func() { done <- s.Update(t.Context(), func(tx *Tx) error { return tx.Put(adding("c")) }) }()
	go func() { done <- s.View(t.Context(), look) }()
	time.Sleep(500 * time.Millisecond)
	for i, p := range ahead {
		if i > 0 {
			p.expect("in")
		}
		time.Sleep(MaxWait * 2 / 5)
		p.say("go on")
		p.expect("done")
	}
	for range 2 {
		if err := <-done; err != nil {
			t.Errorf("after %s of others' transactions: %v", MaxWait*6/5, err)
		}
	}
}

func TestKilledInATransaction(t *testing.T) {
	s := newStore(t)
	put(t, s, adding("a"))
	p := start(t, "transact", s.Dir, "b")
	p.expect("in")
	p.signal(syscall.SIGSTOP)
	p.kill()
	check(t, s.Update(within(t, time.Second), func(tx *Tx) error { return tx.Put(adding("c")) }))
	if diff := cmp.Diff([]string{"a", "c"}, idsOf(t, s)); diff != "" {
		t.Errorf("entries (-want +got):\n%s", diff)
	}
}

// helpView stays in a View until the test lets it continue.
func helpView(s *Store, _ []string) error {
	err := s.View(context.Background(), func(tx *Tx) error {
		tell("in")
		await()
		return look(tx)
	})
	if err == nil {
		tell("done")
	}
	return err
}

// TestReadersAtOnce: readers read at once. A writer waits for those that came before it, and those
// that come later wait for the writer.
func TestReadersAtOnce(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	put(t, s, adding("a"))
	queue := filepath.Join(s.Dir, queueName)
	early := []*process{start(t, "view", s.Dir), start(t, "view", s.Dir)}
	for _, p := range early {
		p.expect("in")
	}
	writer := start(t, "write", s.Dir, "b")
	waiting(t, writer, s.Path())
	late := start(t, "view", s.Dir)
	waiting(t, late, queue)
	for _, p := range early {
		p.say("go on")
		p.expect("done")
	}
	writer.expect("done")
	late.expect("in")
	late.say("go on")
	late.expect("done")
}

// TestOneThreadWaits: however many callers wait for the queue and give up, one thread waits.
func TestOneThreadWaits(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	put(t, s, adding("a"))
	holder := start(t, "transact", s.Dir, "b")
	holder.expect("in")
	queue := filepath.Join(s.Dir, queueName)
	for range 2 {
		var callers sync.WaitGroup
		for range 100 {
			callers.Go(func() {
				if err := s.View(within(t, 300*time.Millisecond), look); !errors.Is(err, ErrBusy) {
					t.Errorf("View: %v, want ErrBusy", err)
				}
			})
		}
		callers.Wait()
		wantWaiters(t, queue, 1)
	}
	var callers sync.WaitGroup
	for range 20 {
		callers.Go(func() {
			if err := s.View(t.Context(), look); err != nil {
				t.Error(err)
			}
		})
	}
	holder.say("go on")
	holder.expect("done")
	callers.Wait()
	wantWaiters(t, queue, 0)
}

// wantWaiters checks how many threads of this process wait for an flock on a file. It looks again for
// a while, since /proc/locks has a line twice if it changes while it is read.
func wantWaiters(t *testing.T, path string, want int) {
	t.Helper()
	n := waitersFor(t, os.Getpid(), path)
	for end := time.Now().Add(10 * time.Second); n != want && time.Now().Before(end); n = waitersFor(t, os.Getpid(), path) {
		time.Sleep(10 * time.Millisecond)
	}
	if n != want {
		t.Errorf("%d threads wait for %s, want %d", n, path, want)
	}
}

// waiting waits until a process waits for an flock on a file.
func waiting(t *testing.T, p *process, path string) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if waitersFor(t, p.cmd.Process.Pid, path) > 0 {
			return
		}
	}
	t.Fatalf("process %d does not wait for %s", p.cmd.Process.Pid, path)
}

// waitersFor returns how many threads of a process wait for an flock on a file.
func waitersFor(t *testing.T, pid int, path string) (n int) {
	t.Helper()
	var st syscall.Stat_t
	check(t, syscall.Stat(path, &st))
	locks, err := os.ReadFile("/proc/locks")
	check(t, err)
	for line := range strings.Lines(string(locks)) {
		// 7: -> FLOCK  ADVISORY  WRITE 4711 fe:00:1234 0 EOF
		f := strings.Fields(line)
		if len(f) > 6 && f[1] == "->" && f[5] == fmt.Sprint(pid) &&
			strings.HasSuffix(f[6], fmt.Sprintf(":%d", st.Ino)) {
			n++
		}
	}
	return n
}

func TestFolderRemovedBetween(t *testing.T) {
	s := newStore(t)
	put(t, s, adding("a"))
	check(t, os.RemoveAll(s.Dir))
	put(t, s, adding("b"))
	if diff := cmp.Diff([]string{"b"}, idsOf(t, s)); diff != "" {
		t.Errorf("entries (-want +got):\n%s", diff)
	}
}

// TestFolderRemovedWhileWaiting: a process that waits for a queue that is removed does not write to
// the lost file.
func TestFolderRemovedWhileWaiting(t *testing.T) {
	s := newStore(t)
	put(t, s, adding("a"))
	first := start(t, "transact", s.Dir, "b")
	first.expect("in")
	second := start(t, "write", s.Dir, "c")
	waiting(t, second, filepath.Join(s.Dir, queueName))
	check(t, os.RemoveAll(s.Dir))
	first.say("go on")
	first.line()
	var want []string
	if second.line() == "done" {
		want = []string{"c"}
	}
	if diff := cmp.Diff(want, idsOf(t, s)); diff != "" {
		t.Errorf("entries (-want +got):\n%s", diff)
	}
	put(t, s, adding("d"))
	if diff := cmp.Diff(append(want, "d"), idsOf(t, s)); diff != "" {
		t.Errorf("entries afterwards (-want +got):\n%s", diff)
	}
}

// TestFolderReplacedWhileWaiting: a process that waits for a queue that is replaced queues at the
// new one.
func TestFolderReplacedWhileWaiting(t *testing.T) {
	s := newStore(t)
	put(t, s, adding("a"))
	first := start(t, "transact", s.Dir, "b")
	first.expect("in")
	second := start(t, "write", s.Dir, "c")
	queue := filepath.Join(s.Dir, queueName)
	waiting(t, second, queue)
	check(t, os.RemoveAll(s.Dir))
	third := start(t, "transact", s.Dir, "d")
	third.expect("in")
	first.say("go on")
	waiting(t, second, queue)
	third.say("go on")
	third.expect("done")
	second.expect("done")
	if diff := cmp.Diff([]string{"c", "d"}, idsOf(t, s)); diff != "" {
		t.Errorf("entries (-want +got):\n%s", diff)
	}
}

// helpSetAside damages the file during a transaction, and puts an entry into the new one.
func helpSetAside(s *Store, args []string) error {
	try := 0
	err := s.Update(context.Background(), func(tx *Tx) error {
		tell("in")
		await()
		if try++; try > 1 {
			return tx.Put(adding(args[0]))
		}
		if err := os.Truncate(s.Path(), int64(3*os.Getpagesize())); err != nil {
			return err
		}
		return look(tx)
	})
	if err == nil {
		tell("done")
	}
	return err
}

// TestSetAsideWhileWaiting: a process that waits while the file is set aside writes to the new one.
func TestSetAsideWhileWaiting(t *testing.T) {
	s := newStore(t)
	populate(t, s)
	first := start(t, "set-aside", s.Dir, "b")
	first.expect("in")
	second := start(t, "write", s.Dir, "c")
	waiting(t, second, filepath.Join(s.Dir, queueName))
	first.say("damage it")
	first.expect("in")
	first.say("go on")
	first.expect("done")
	second.expect("done")
	if diff := cmp.Diff([]string{"b", "c"}, idsOf(t, s)); diff != "" {
		t.Errorf("entries of the new file (-want +got):\n%s", diff)
	}
	if aside := setAside(t, s); len(aside) != 1 {
		t.Errorf("set aside: %v, want one", aside)
	}
}
