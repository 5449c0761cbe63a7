package journal

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
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

// TestHistory: events come back as they were written, the oldest first; of too many the last are kept.
func TestHistory(t *testing.T) {
	t.Parallel()
	s := &Store{Dir: t.TempDir() + "/state"}
	if events := history(t, s); events != nil {
		t.Errorf("without a journal: %v", events)
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

// TestCounters: they are kept apart by name and labels.
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
