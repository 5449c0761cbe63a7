package journal

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// TestTorn: if the meta page of the newest transaction is on the disk and another of its pages is not,
// the transaction before counts. A reader changes nothing.
func TestTorn(t *testing.T) {
	s := newStore(t)
	put(t, s, adding("a", "10.0.0.1"))
	put(t, s, adding("b", "10.0.0.2"))
	before, err := os.ReadFile(s.Path())
	check(t, err)
	put(t, s, adding("c", "10.0.0.3"))
	after, err := os.ReadFile(s.Path())
	check(t, err)
	before = append(before, make([]byte, len(after)-len(before))...) // it has grown
	size := int(metasOf(after)[0].size)
	torn := 0
	for at := 2 * size; at < len(after); at += size {
		page := slices.Clone(after[at:][:size])
		if bytes.Equal(page, before[at:][:size]) {
			continue
		}
		torn++
		copy(after[at:], before[at:][:size])
		check(t, os.WriteFile(s.Path(), after, 0o600))
		check(t, os.Remove(filepath.Join(s.Dir, queueName))) // with the stamp
		wantEntries(t, s, "a", "b")
		if data, err := os.ReadFile(s.Path()); !bytes.Equal(data, after) || err != nil {
			t.Errorf("page %d: a reader has changed the file (%v)", at/size, err)
		}
		put(t, s, adding("d", "10.0.0.4"))
		wantEntries(t, s, "a", "b", "d")
		wantAside(t, s, 0)
		copy(after[at:], page)
	}
	if torn < 2 {
		t.Errorf("a transaction wrote %d pages, want at least a bucket's and the freelist", torn)
	}
	check(t, os.WriteFile(s.Path(), after, 0o600))
	check(t, os.Remove(filepath.Join(s.Dir, queueName)))
	wantEntries(t, s, "a", "b", "c")
}

// TestSyncFails: a transaction whose sync failed is taken back. The kernel reports the error once, and
// takes the pages for written from then on.
func TestSyncFails(t *testing.T) {
	needDisk(t)
	mnt := t.TempDir()
	d := mountDisk(t, mnt)
	p := start(t, "act", filepath.Join(mnt, "state"))
	say := func(line, want string) {
		t.Helper()
		p.say(line)
		p.expect(want)
	}
	say("put a", "ok")
	d.unsynced.Store(true)
	p.say("put b")
	if got := p.line(); got == "ok" {
		t.Error("an Update whose sync failed succeeded")
	}
	d.unsynced.Store(false)
	say("list", "a")
	say("put c", "ok")
	say("list", "a c")
	say("aside", "0")
}

// TestTakeBack: only the transaction whose sync failed is taken back, and no earlier one, which was
// synced: a file system may have taken back the pages of the one that failed.
func TestTakeBack(t *testing.T) {
	s := newStore(t)
	put(t, s, adding("a"))
	put(t, s, adding("b"))
	f, err := os.OpenFile(s.Path(), os.O_RDWR, 0)
	check(t, err)
	defer f.Close()
	newest := newestIn(f)
	check(t, takeBack(f, newest+1))
	wantEntries(t, s, "a", "b")
	check(t, takeBack(f, newest))
	wantEntries(t, s, "a")
}

// TestUnstamped: while a transaction is not synced, the file has no stamp, not even one that fits since
// its times have not changed within a tick of the clock.
func TestUnstamped(t *testing.T) {
	s := newStore(t)
	put(t, s, adding("a"))
	seen := 0
	s.Point = func(name string) {
		if name != "committed" {
			return
		}
		seen++
		stamp, err := os.ReadFile(filepath.Join(s.Dir, queueName))
		if len(bytes.Trim(stamp, "\x00")) > 0 || err != nil {
			t.Errorf("the stamp is %q (%v)", stamp, err)
		}
	}
	put(t, s, adding("b"))
	if seen != 1 {
		t.Errorf("%d commits, want one", seen)
	}
}
