package journal

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// history returns the reasons of all events.
func history(t *testing.T, s *Store) (reasons []string) {
	t.Helper()
	events, err := s.History()
	check(t, err)
	return reasonsOf(events)
}

func reasonsOf(events []Event) (reasons []string) {
	for _, e := range events {
		reasons = append(reasons, e.Reason)
	}
	return reasons
}

// TestHistory: History returns the events as they were recorded, oldest first. Reading creates no
// file.
func TestHistory(t *testing.T) {
	s := newStore(t)
	changed := untouched(t, filepath.Dir(s.Dir))
	want(t, "without a directory", history(t, s), []string(nil))
	changed()
	event := Event{Key: Key{"net", "id", "eth0"}, Kind: Swept, Pod: Pod{"ns", "pod", "uid"}, Reason: "one\nline",
		Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.1")}, Plugins: []string{"bridge"}, Count: []string{"c", "l"}}
	check(t, s.Record(event, Event{Reason: "two"}))
	check(t, s.Record(Event{Reason: "three"}))
	want(t, "history", history(t, s), []string{"one\nline", "two", "three"})
	events, err := s.History()
	check(t, err)
	if at := events[0].At; at.Boot == 0 || at.Wall.IsZero() {
		t.Errorf("the event has no time: %+v", at)
	}
	events[0].At = Time{}
	want(t, "event", events[0], event)
	if info, err := os.Stat(filepath.Join(s.Dir, historyName)); err != nil || info.Mode() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
}

// TestTornHistory: a malformed line hides no other event. A line without its line feed, as a killed
// writer leaves it, hides only the event that is recorded next.
func TestTornHistory(t *testing.T) {
	s := newStore(t)
	put(t, s)
	check(t, s.Record(Event{Reason: "1"}))
	for _, torn := range []string{"{\"kind\":\n", "\n", "[]\n", "\x00\x00\x00", "{\"reason\": \"cut off\""} {
		f, err := os.OpenFile(filepath.Join(s.Dir, historyName), os.O_WRONLY|os.O_APPEND, 0)
		check(t, err)
		_, err = f.WriteString(torn)
		check(t, err)
		check(t, f.Close())
		want(t, torn, history(t, s), []string{"1"})
	}
	check(t, s.Record(Event{Reason: "2"}))
	check(t, s.Record(Event{Reason: "3"}))
	want(t, "after all", history(t, s), []string{"1", "3"})
}

// TestHistoryIsBounded: eight writers record events at the same time. Two files of limited size
// contain the newest events. A Tail returns every event exactly once while the files are rotated.
func TestHistoryIsBounded(t *testing.T) {
	s := newStore(t)
	put(t, s)
	const writers, each = 8, 400
	why := strings.Repeat("why ", 100)
	tail := &Tail{Store: s}
	seen := map[string]int{}
	next := func() {
		events, err := tail.Next()
		check(t, err)
		for _, e := range events {
			seen[e.ContainerID]++
		}
	}
	for round := range each / 50 {
		var all sync.WaitGroup
		for w := range writers {
			all.Go(func() {
				for i := range 50 {
					id := fmt.Sprintf("%d-%d", w, round*50+i)
					if err := s.Record(Event{Key: keyOf(id), Reason: why}); err != nil {
						t.Error(err)
					}
				}
			})
		}
		all.Wait()
		next()
	}
	if len(seen) != writers*each {
		t.Errorf("the Tail returned %d of %d events", len(seen), writers*each)
	}
	for id, n := range seen {
		if n != 1 {
			t.Errorf("the Tail returned %s %d times", id, n)
		}
	}
	kept := history(t, s)
	if len(kept) < maxHistory/1000 || len(kept) > writers*each*3/4 {
		t.Errorf("%d events are kept", len(kept))
	}
	for _, name := range []string{historyName, historyName + ".1"} {
		if info, err := os.Stat(filepath.Join(s.Dir, name)); err != nil || info.Size() > maxHistory*5/4 {
			t.Errorf("%s: %v, %v", name, info, err)
		}
	}
	files, err := filepath.Glob(filepath.Join(s.Dir, historyName+"*"))
	if len(files) != 2 || err != nil {
		t.Errorf("%v, %v", files, err)
	}
}

// TestTail: a Tail returns the existing events first, then each new event once, across rotations of
// the file.
func TestTail(t *testing.T) {
	s := newStore(t)
	tail := &Tail{Store: s}
	next := func(when string, events ...string) {
		t.Helper()
		got, err := tail.Next()
		check(t, err)
		want(t, when, reasonsOf(got), events)
	}
	next("without a directory")
	put(t, s)
	path := filepath.Join(s.Dir, historyName)
	check(t, s.Record(Event{Reason: "1"}))
	next("first event", "1")
	next("nothing new")
	check(t, s.Record(Event{Reason: "2"}))
	check(t, os.Rename(path, path+".1"))
	next("renamed", "2")
	check(t, s.Record(Event{Reason: "3"}))
	next("another file", "3")
	check(t, s.Record(Event{Reason: "4"}))
	check(t, os.Rename(path, path+".1"))
	check(t, s.Record(Event{Reason: "5"}))
	next("another file, after an event in the previous one", "4", "5")
	want(t, "all", history(t, s), []string{"3", "4", "5"})
}
