package journal

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	bolt "go.etcd.io/bbolt"
)

// history returns all events.
func history(t *testing.T, s *Store) (events []Event) {
	t.Helper()
	err := s.View(t.Context(), func(tx *Tx) error {
		return tx.History(func(e Event) error {
			events = append(events, e)
			return nil
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	return events
}

// TestHistory: events come back as they were written, the oldest first; beyond maxHistory the
// newest are kept.
func TestHistory(t *testing.T) {
	t.Parallel()
	s := &Store{Dir: t.TempDir() + "/state"}
	if events := history(t, s); events != nil {
		t.Errorf("without a journal: %v", events)
	}
	put(t, s)
	if events := history(t, s); events != nil {
		t.Errorf("of a new journal: %v", events)
	}
	const written = maxHistory + 7
	event := func(i int) Event {
		return Event{Key: Key{"net", fmt.Sprint(i), "eth0"}, Kind: Swept, Pod: Pod{"ns", "pod", "uid"}, Reason: "why",
			Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.1")}, Plugins: []string{"bridge"}}
	}
	for from := 0; from < written; from += 100 {
		err := s.Update(t.Context(), func(tx *Tx) error {
			for i := from; i < min(from+100, written); i++ {
				if err := tx.Record(event(i)); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	events := history(t, s)
	if len(events) != maxHistory || events[0].ContainerID != fmt.Sprint(written-maxHistory) {
		t.Fatalf("%d events from %s on", len(events), events[0].ContainerID)
	}
	last := events[maxHistory-1]
	if last.At.Boot == 0 || last.At.Wall.IsZero() {
		t.Errorf("it has no time: %+v", last.At)
	}
	last.At = Time{}
	if diff := cmp.Diff(event(written-1), last, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
		t.Error(diff)
	}
}

// TestCounters: counters are separate by name and labels.
func TestCounters(t *testing.T) {
	t.Parallel()
	s := &Store{Dir: t.TempDir() + "/state"}
	err := s.Update(t.Context(), func(tx *Tx) error {
		for _, c := range [][]string{{"a"}, {"a"}, {"a", "x"}, {"a", "x", "y"}, {"ax"}} {
			if err := tx.Count(c[0], c[1:]...); err != nil {
				return err
			}
		}
		if err := tx.SetCounter(77, "b"); err != nil {
			return err
		}
		if tx.Count("a", "x\x00y") == nil {
			t.Error("a zero byte is taken")
		}
		return nil
	})
	got := map[string]uint64{}
	viewErr := s.View(t.Context(), func(tx *Tx) error {
		if n := tx.Counter("never"); n != 0 {
			t.Errorf("never counted: %d", n)
		}
		return tx.Counters(func(name string, labels []string, n uint64) error {
			got[fmt.Sprint(name, labels)] = n
			return nil
		})
	})
	want := map[string]uint64{"a[]": 2, "a[x]": 1, "a[x y]": 1, "ax[]": 1, "b[]": 77}
	if diff := cmp.Diff(want, got); diff != "" || err != nil || viewErr != nil {
		t.Error(diff, err, viewErr)
	}
}

// TestHistoryIsOfItsTransaction: an event and a counter are written with their transaction or not
// at all.
func TestHistoryIsOfItsTransaction(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	put(t, s, adding("a"))
	refused := errors.New("refused")
	err := s.Update(t.Context(), func(tx *Tx) error {
		return errors.Join(tx.Record(Event{Kind: Swept}), tx.Count("a"), tx.Delete(keyOf("a")), refused)
	})
	if !errors.Is(err, refused) || len(history(t, s)) > 0 || get(t, s, keyOf("a")) == nil {
		t.Errorf("%v; history: %v", err, history(t, s))
	}
	view(t, s, func(tx *Tx) error {
		if n := tx.Counter("a"); n != 0 {
			t.Errorf("counter: %d", n)
		}
		return nil
	})
}

// TestDamagedHistory: a damaged event hides no other; a damaged counter begins at 0 again.
func TestDamagedHistory(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	check(t, s.Update(t.Context(), func(tx *Tx) error {
		return errors.Join(tx.Record(Event{Reason: "1"}), tx.Record(Event{Reason: "2"}), tx.Record(Event{Reason: "3"}), tx.Count("a"))
	}))
	raw(t, s, func(tx *bolt.Tx) error {
		return errors.Join(tx.Bucket(bucketHistory).Put(sequence(2), []byte(`{"kind":`)), tx.Bucket(bucketCounters).Put([]byte("a"), []byte("x")))
	})
	if events := history(t, s); len(events) != 2 || events[0].Reason != "1" || events[1].Reason != "3" {
		t.Errorf("history: %v", events)
	}
	check(t, s.Update(t.Context(), func(tx *Tx) error { return tx.Count("a") }))
	view(t, s, func(tx *Tx) error {
		if n := tx.Counter("a"); n != 1 {
			t.Errorf("counter: %d", n)
		}
		return nil
	})
}

// TestSince: an entry says since when it is in its state, however often it is rewritten.
func TestSince(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	e := adding("a")
	put(t, s, e)
	began := get(t, s, e.Key)
	if began.Since != began.Updated || began.Since == (Time{}) {
		t.Errorf("since %v, updated %v", began.Since, began.Updated)
	}
	time.Sleep(2 * time.Millisecond)
	put(t, s, began)
	again := get(t, s, e.Key)
	if again.Since.Boot != began.Since.Boot || again.Updated.Boot == again.Since.Boot {
		t.Errorf("written again: since %v, updated %v", again.Since, again.Updated)
	}
	again.State = Live
	put(t, s, again)
	live := get(t, s, e.Key)
	if live.Since.Boot != live.Updated.Boot || live.Since.Boot == began.Since.Boot {
		t.Errorf("another state: since %v, updated %v", live.Since, live.Updated)
	}
	live.State = Removing
	put(t, s, live)
	over := adding("a")
	put(t, s, over)
	if got := get(t, s, e.Key); got.Since.Boot <= live.Since.Boot {
		t.Errorf("another ADD: since %v", got.Since)
	}
}
