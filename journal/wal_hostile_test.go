package journal

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestJunkInLog: what cannot be a file of the log is none, and hinders no attachment.
func TestJunkInLog(t *testing.T) {
	for what, junk := range map[string]func(path string) error{
		"directory": func(p string) error { return os.MkdirAll(filepath.Join(p, "full"), 0o700) },
		"pipe":      func(p string) error { return syscall.Mkfifo(p, 0o600) },
		"link":      func(p string) error { return os.Symlink("/etc/passwd", p) },
		"huge file": func(p string) error { return errors.Join(os.WriteFile(p, nil, 0o600), os.Truncate(p, 1<<40)) },
	} {
		t.Run(what, func(t *testing.T) {
			s := newStore(t)
			stored(t, s, "a", "10.0.0.1")
			b := stored(t, s, "b")
			appended(t, s, b, func(e *Entry) { e.Generations[0].Claims = adding("", "10.0.0.2").Generations[0].Claims })
			check(t, junk(filepath.Join(s.walDir(), "junk")))
			err := s.View(t.Context(), func(tx *Tx) error {
				_, err := tx.ByAddress(adding("", "10.0.0.1").Addresses()[0])
				if err != nil {
					t.Errorf("ByAddress of an attachment that has nothing to do with it: %v", err)
				}
				got, _ := tx.ByAddress(adding("", "10.0.0.2").Addresses()[0])
				if len(got) != 1 {
					t.Errorf("the claim that is in the log alone: %d entries", len(got))
				}
				return nil
			})
			check(t, err)
			if err := s.RemoveStrayLocks(t.Context()); err != nil {
				t.Errorf("RemoveStrayLocks: %v", err)
			}
			if locks, _ := os.ReadDir(filepath.Join(s.Dir, locksName)); len(locks) > 0 {
				t.Errorf("RemoveStrayLocks left the lock file %s that it made", locks[0].Name())
			}
		})
	}
}

// TestJunkOfOne: an entry can be written and deleted whatever is in place of its file.
func TestJunkOfOne(t *testing.T) {
	s := newStore(t)
	e := stored(t, s, "a")
	check(t, os.Mkdir(s.walDir(), 0o700))
	check(t, syscall.Mkfifo(s.walPath(e.Key), 0o600))
	if err := s.Update(t.Context(), func(tx *Tx) error { return tx.Delete(e.Key) }); err != nil {
		t.Errorf("Delete: %v", err)
	}
	if err := s.Update(t.Context(), func(tx *Tx) error { return tx.Put(e) }); err != nil {
		t.Errorf("Put: %v", err)
	}
}

// TestVersionsBehindDamage: versions behind a damaged one do not count, also after the next Append.
func TestVersionsBehindDamage(t *testing.T) {
	for range 20 {
		s := newStore(t)
		e := stored(t, s, "a")
		var ends []int
		for _, reason := range []string{"one", "two", "old"} {
			appended(t, s, e, because(reason))
			data, err := os.ReadFile(s.walPath(e.Key))
			check(t, err)
			ends = append(ends, len(data))
		}
		data, err := os.ReadFile(s.walPath(e.Key))
		check(t, err)
		data[ends[0]+10] ^= 1 // a loss of power took a block of the second
		check(t, os.WriteFile(s.walPath(e.Key), data, 0o600))
		got := get(t, s, e.Key)
		if got.Reason != "one" {
			t.Fatal(got.Reason)
		}
		appended(t, s, got, because("new"))
		if got := get(t, s, e.Key); got.Reason == "old" {
			t.Fatalf("after an Append of %q, %q is read", "new", got.Reason)
		}
	}
}

// TestLogIsBounded: passes that are cut off again and again do not let the file grow for ever.
func TestLogIsBounded(t *testing.T) {
	s := newStore(t)
	e := stored(t, s, "a")
	e.Generations[0].Args = strings.Repeat("x", 8<<10)
	for range 300 { // each a DEL that is killed after its begin
		got := get(t, s, e.Key)
		got.Generations[0].Args = e.Generations[0].Args
		if err := s.Append(got); err != nil {
			put(t, s, got) // as recorder.save does
		}
		if info, err := os.Stat(s.walPath(e.Key)); err == nil && info.Size() > maxLog {
			t.Fatalf("the file has %d bytes", info.Size())
		}
	}
}

// TestLinkedLog: a reader follows no link in place of the log, and trusts no directory that others can
// write to.
func TestLinkedLog(t *testing.T) {
	for what, change := range map[string]func(s *Store) error{
		"link": func(s *Store) error {
			return errors.Join(os.Rename(s.walDir(), s.Dir+".elsewhere"), os.Symlink(s.Dir+".elsewhere", s.walDir()))
		},
		"mode 0777": func(s *Store) error { return os.Chmod(s.walDir(), 0o777) },
	} {
		t.Run(what, func(t *testing.T) {
			s := newStore(t)
			e := stored(t, s, "a")
			appended(t, s, e, because("from the log"))
			check(t, change(s))
			err := s.View(t.Context(), func(tx *Tx) error {
				got, err := tx.Get(e.Key)
				if err == nil {
					t.Errorf("it is read: %q", got.Reason)
				}
				return nil
			})
			check(t, err)
		})
	}
}

// TestLogOfAnotherFile: the bbolt file was set aside while an ADD runs. No version is appended to an
// entry that the new file does not have.
func TestLogOfAnotherFile(t *testing.T) {
	s := newStore(t)
	e := stored(t, s, "a")
	check(t, os.Rename(s.Path(), s.Path()+".damaged"))
	if err := s.Append(e); !errors.Is(err, ErrNotStored) {
		t.Errorf("without a file: %v", err)
	}
	put(t, s, adding("b"))
	if err := s.Append(e); !errors.Is(err, ErrNotStored) {
		t.Errorf("with another file: %v", err)
	}
	put(t, s, e)
	check(t, s.Append(e))
}

// TestReadersBesideAppends: readers beside an appender see no error and no older version than before.
func TestReadersBesideAppends(t *testing.T) {
	s := newStore(t)
	e := stored(t, s, "a", "10.0.0.1")
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for n := 1; ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			e.Reason = fmt.Sprint(n)
			var err error
			if n%7 == 0 {
				err = s.Update(context.Background(), func(tx *Tx) error { return tx.Put(e) })
			} else {
				err = s.Append(e)
			}
			if err != nil {
				t.Error(err)
				return
			}
		}
	}()
	r := &Store{Dir: s.Dir}
	last := 0
	for began := time.Now(); time.Since(began) < time.Second; {
		err := r.View(context.Background(), func(tx *Tx) error {
			got, err := tx.Get(e.Key)
			if err != nil {
				return err
			}
			n := 0
			if got.Reason != "" {
				if _, err := fmt.Sscan(got.Reason, &n); err != nil {
					return err
				}
			}
			if n < last {
				t.Errorf("%d after %d", n, last)
			}
			last = n
			found, err := tx.ByAddress(e.Addresses()[0])
			if len(found) != 1 {
				t.Errorf("%d by address", len(found))
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	<-done
	if last < 10 {
		t.Errorf("the last version is %d", last)
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
	e := stored(t, s, "a")
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
