package journal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// stored puts an attachment with these addresses and returns its entry.
func stored(t *testing.T, s *Store, id string, addresses ...string) *Entry {
	t.Helper()
	e := adding(id, addresses...)
	put(t, s, e)
	return e
}

// appended appends a version of an entry, after a change to it.
func appended(t *testing.T, s *Store, e *Entry, change func(*Entry)) {
	t.Helper()
	change(e)
	check(t, s.Append(e))
}

func because(reason string) func(*Entry) { return func(e *Entry) { e.Reason = reason } }

// versions returns the files of the log.
func versions(t *testing.T, s *Store) (names []string) {
	t.Helper()
	files, err := os.ReadDir(s.walDir())
	check(t, err)
	for _, f := range files {
		names = append(names, f.Name())
	}
	return names
}

// TestAppend: every reader, in this process and another, sees the newest version of an entry, by
// each way to it. The transaction that writes the entry removes the file.
func TestAppend(t *testing.T) {
	s := newStore(t)
	e, other := stored(t, s, "a", "10.0.0.1"), stored(t, s, "b", "10.0.0.2")
	appended(t, s, e, because("first"))
	appended(t, s, e, func(e *Entry) {
		e.State, e.Reason = Unwinding, "second"
		e.Generations[0].Claims = append(e.Generations[0].Claims, adding("a", "10.0.0.2", "::ffff:10.0.0.3").Generations[0].Claims...)
		e.Generations[0].NetNS.Ino = 7
	})
	see := func(what string, s *Store, want *Entry) {
		t.Helper()
		if diff := cmp.Diff(want, get(t, s, e.Key), byMeaning); diff != "" {
			t.Errorf("%s, Get (-want +got):\n%s", what, diff)
		}
		view(t, s, func(tx *Tx) error {
			seen := 0
			check(t, tx.All(func(got *Entry, err error) error {
				if seen++; got.Key == e.Key && !cmp.Equal(want, got, byMeaning) {
					t.Errorf("%s, All: %+v", what, got)
				}
				return err
			}))
			check(t, tx.Outlines(func(o Outline, err error) error {
				if seen++; o.Key == e.Key && (o.State != want.State || o.NetNS.Ino != want.Newest().NetNS.Ino) {
					t.Errorf("%s, Outlines: %+v", what, o)
				}
				return err
			}))
			if seen != 4 {
				t.Errorf("%s: %d entries and outlines, want 4", what, seen)
			}
			for address, owners := range map[string][]string{"10.0.0.1": {"a"}, "10.0.0.2": {"a", "b"}, "10.0.0.3": {"a"}, "10.0.0.30": nil} {
				got, err := tx.ByAddress(adding("", address).Addresses()[0])
				slices.SortFunc(got, func(a, b *Entry) int { return strings.Compare(a.ContainerID, b.ContainerID) })
				wantIDs(t, what+", "+address, owners)(got, err)
			}
			return nil
		})
	}
	see("appended", s, e)
	see("in a store that has read nothing", &Store{Dir: s.Dir}, e)
	if got := versions(t, s); len(got) != 1 || got[0] != filepath.Base(s.LockPath(e.Key)) {
		t.Errorf("the log has %q", got)
	}
	if info, err := os.Stat(s.walPath(e.Key)); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}

	put(t, s, e)
	see("put", s, e)
	appended(t, s, other, because("of another"))
	update(t, s, func(tx *Tx) error { return tx.Delete(e.Key) })
	put(t, s, other)
	if got := versions(t, s); len(got) > 0 {
		t.Errorf("after Put and Delete the log has %q", got)
	}
}

// TestAppendRefuses: an entry that no transaction stored or read, an illegal change of state, text
// that JSON would change. The version before stays.
func TestAppendRefuses(t *testing.T) {
	s := newStore(t)
	if err := s.Append(adding("new")); !errors.Is(err, ErrNotStored) {
		t.Errorf("of an entry that is not stored: %v", err)
	}
	e := stored(t, s, "a")
	failed := errors.New("not committed")
	fresh := adding("b")
	if err := s.Update(t.Context(), func(tx *Tx) error { return errors.Join(tx.Put(fresh), failed) }); !errors.Is(err, failed) {
		t.Fatal(err)
	}
	if err := s.Append(fresh); !errors.Is(err, ErrNotStored) {
		t.Errorf("of an entry whose transaction failed: %v", err)
	}
	appended(t, s, e, func(e *Entry) { e.State, e.Reason = Unwinding, "kept" })
	for what, change := range map[string]func(*Entry){
		"to a state that its newest version forbids": func(e *Entry) { e.State = Live },
		"with a path that has a zero byte":           func(e *Entry) { e.Newest().NetNS.Path = "/a\x00b" },
	} {
		bad := get(t, s, e.Key)
		change(bad)
		if err := s.Append(bad); err == nil {
			t.Errorf("%s: no error", what)
		}
		if err := s.Update(t.Context(), func(tx *Tx) error { return tx.Put(bad) }); err == nil {
			t.Errorf("%s, Put: no error", what)
		}
	}
	if got := get(t, s, e.Key); got.State != Unwinding || got.Reason != "kept" {
		t.Errorf("afterwards it is %s, %q", got.State, got.Reason)
	}
}

// TestStaleVersion: a version counts only while the bbolt file has the entry that it was made from.
func TestStaleVersion(t *testing.T) {
	s := newStore(t)
	e := stored(t, s, "a", "10.0.0.1")
	appended(t, s, e, func(e *Entry) {
		e.Reason, e.Generations[0].Claims = "stale", adding("a", "10.0.0.9").Generations[0].Claims
	})
	old, err := os.ReadFile(s.walPath(e.Key))
	check(t, err)
	back := func() { check(t, os.WriteFile(s.walPath(e.Key), old, 0o600)) }
	notThere := func(what string) {
		t.Helper()
		if got := get(t, s, e.Key); got != nil && got.Reason == "stale" {
			t.Errorf("%s it is read", what)
		}
		view(t, s, func(tx *Tx) error {
			wantIDs(t, what, nil)(tx.ByAddress(adding("", "10.0.0.9").Addresses()[0]))
			return nil
		})
	}

	e.Reason, e.Generations[0].Claims = "put", nil
	put(t, s, e)
	back()
	notThere("after a later Put")
	appended(t, s, e, because("newer"))
	if got := get(t, s, e.Key); got.Reason != "newer" {
		t.Errorf("a version behind a stale one is not read: %q", got.Reason)
	}
	update(t, s, func(tx *Tx) error { return tx.Delete(e.Key) })
	back()
	notThere("after a Delete")
	put(t, s, adding("a"))
	back()
	notThere("after an ADD of the same key")

	value, err := encodeEntry(adding("b"))
	check(t, err)
	anothers := encodeVersion(version{key: encodeKey(keyOf("b")), made: storedText(get(t, s, e.Key).Updated), value: value})
	check(t, os.WriteFile(s.walPath(e.Key), anothers, 0o600))
	if got := get(t, s, e.Key); got.Key != e.Key || got.Reason != "" {
		t.Errorf("another attachment's version is read: %+v", got)
	}
}

// TestTornVersion: of a file that is cut or damaged at any byte, the last whole version counts, and
// the next one is written behind it.
func TestTornVersion(t *testing.T) {
	s := newStore(t)
	e := stored(t, s, "a")
	var ends []int
	var first []byte
	for _, reason := range []string{"one", "two"} {
		appended(t, s, e, because(reason))
		data, err := os.ReadFile(s.walPath(e.Key))
		check(t, err)
		ends = append(ends, len(data))
		if first == nil {
			first = data
		}
	}
	whole, err := os.ReadFile(s.walPath(e.Key))
	check(t, err)
	if len(whole) <= len(first) || !bytes.HasPrefix(whole, first) {
		t.Fatal("the second version is not behind the first: a kill in between would lose both")
	}
	for at := 0; at < len(whole); at += 3 {
		damaged := slices.Clone(whole)
		damaged[at] ^= 0x41
		want := ""
		if at >= ends[0] {
			want = "one"
		}
		for what, data := range map[string][]byte{"cut": whole[:at], "damaged": damaged, "followed by zeros": append(slices.Clone(whole[:at]), make([]byte, 3*len(whole))...)} {
			check(t, os.WriteFile(s.walPath(e.Key), data, 0o600))
			got := get(t, s, e.Key)
			if got.Reason != want {
				t.Fatalf("%s at byte %d: %q, want %q", what, at, got.Reason, want)
			}
			if at%60 == 0 {
				appended(t, s, got, because("behind"))
				if again := get(t, s, e.Key); again.Reason != "behind" {
					t.Fatalf("%s at byte %d: a version behind it is not read: %q", what, at, again.Reason)
				}
			}
		}
	}
}

// helpAppend appends versions until it is killed, and tells each.
func helpAppend(s *Store, args []string) error {
	l, err := s.Acquire(context.Background(), keyOf(args[0]))
	if err != nil {
		return err
	}
	defer l.Release()
	e := adding(args[0])
	e.Generations[0].Args = strings.Repeat("x", 3*4096) // more than a page
	if err := s.Update(context.Background(), func(tx *Tx) error { return tx.Put(e) }); err != nil {
		return err
	}
	for n := 1; ; n++ {
		e.Reason = fmt.Sprint(n)
		if err := s.Append(e); err != nil {
			return err
		}
		tell(e.Reason)
	}
}

// TestAppendKilled: a version survives the SIGKILL of the process that appended it.
func TestAppendKilled(t *testing.T) {
	for try := range 6 {
		s := newStore(t)
		p := start(t, "append", s.Dir, "a")
		said := p.line()
		for range try * 9 {
			said = p.line()
		}
		p.signal(syscall.SIGKILL)
		for line := p.line(); line != ""; line = p.line() {
			said = line
		}
		var last, got int
		_, err := fmt.Sscan(said, &last)
		check(t, err)
		_, err = fmt.Sscan(get(t, s, keyOf("a")).Reason, &got)
		check(t, err)
		if got < last {
			t.Errorf("version %d is there, and %d was told", got, last)
		}
	}
}

// TestCommittedBeforeRemoval: a process that dies between its commit and the removal of the file
// leaves a version that does not count.
func TestCommittedBeforeRemoval(t *testing.T) {
	s := newStore(t)
	e := stored(t, s, "b") // as helpCrash has it
	appended(t, s, e, because("stale"))
	_ = start(t, "crash", s.Dir, "committed").wait()
	if got := versions(t, s); len(got) != 1 {
		t.Fatalf("the log has %q", got)
	}
	if got := get(t, s, e.Key); got.Reason == "stale" {
		t.Error("the version still counts")
	}
}

// TestStrayVersions: RemoveStrayLocks removes a file that no entry has, with or without a lock file,
// and no other one.
func TestStrayVersions(t *testing.T) {
	s := newStore(t)
	a, gone, held := stored(t, s, "a"), stored(t, s, "gone"), stored(t, s, "held")
	for _, e := range []*Entry{a, gone, held} {
		appended(t, s, e, because("newer"))
	}
	keep := map[string][]byte{}
	for _, e := range []*Entry{gone, held} {
		data, err := os.ReadFile(s.walPath(e.Key))
		check(t, err)
		keep[s.walPath(e.Key)] = data
		update(t, s, func(tx *Tx) error { return tx.Delete(e.Key) })
	}
	for path, data := range keep {
		check(t, os.WriteFile(path, data, 0o600))
	}
	l, err := s.Acquire(within(t, time.Second), held.Key)
	check(t, err)
	check(t, s.RemoveStrayLocks(t.Context()))
	left := versions(t, s)
	if want := []string{filepath.Base(s.LockPath(a.Key))}; !slices.Equal(left, want) {
		t.Errorf("the log has %q, want %q", left, want)
	}
	if _, err := os.Stat(s.LockPath(held.Key)); err != nil {
		t.Errorf("the held lock's file: %v", err)
	}
	l.Release()
	check(t, s.RemoveStrayLocks(t.Context()))
	if left := versions(t, s); !slices.Equal(left, []string{filepath.Base(s.LockPath(a.Key))}) {
		t.Errorf("afterwards the log has %q", left)
	}
	if locks, err := os.ReadDir(filepath.Join(s.Dir, locksName)); err != nil || len(locks) > 0 {
		t.Errorf("lock files: %v, %v", locks, err)
	}
}

// TestTwoClaimsAtOnce: of two processes that append a claim on the same address and then look for
// others, at least one finds the other's.
func TestTwoClaimsAtOnce(t *testing.T) {
	for range 50 {
		s := newStore(t)
		address := adding("", "10.0.0.1").Addresses()[0]
		found := make(chan bool)
		for _, id := range []string{"a", "b"} {
			e := stored(t, s, id)
			go func() {
				e.Generations[0].Claims = adding("", "10.0.0.1").Generations[0].Claims
				err := s.Append(e)
				other := false
				err = errors.Join(err, s.View(context.Background(), func(tx *Tx) error {
					entries, err := tx.ByAddress(address)
					other = slices.ContainsFunc(entries, func(o *Entry) bool { return o.ContainerID != id })
					return err
				}))
				if err != nil {
					t.Error(err)
				}
				found <- other
			}()
		}
		if first, second := <-found, <-found; !first && !second {
			t.Fatal("neither finds the other")
		}
	}
}
