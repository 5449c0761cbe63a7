package journal

import (
	"encoding/json"
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
	view(t, s, func(tx *Tx) error {
		return tx.History(func(e Event) error {
			events = append(events, e)
			return nil
		})
	})
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
	update(t, s, func(tx *Tx) error {
		for i := range written {
			if err := tx.Record(event(i)); err != nil {
				return err
			}
		}
		return nil
	})
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

func tombstone(t *testing.T, s *Store, k Key) (tomb *Tombstone) {
	t.Helper()
	view(t, s, func(tx *Tx) (err error) {
		tomb, err = tx.Tombstone(k)
		return err
	})
	return tomb
}

func bury(t *testing.T, s *Store, tombs ...Tombstone) {
	t.Helper()
	update(t, s, func(tx *Tx) error {
		for _, tomb := range tombs {
			if err := tx.PutTombstone(tomb); err != nil {
				return err
			}
		}
		return nil
	})
}

// burials returns the number of tombstones, and of records of their order.
func burials(t *testing.T, s *Store) (tombstones, order int) {
	t.Helper()
	view(t, s, func(tx *Tx) error {
		tombstones, order = len(bucketOf(tx, bucketTombstones)), len(bucketOf(tx, bucketExpiry))
		return nil
	})
	return tombstones, order
}

func TestTombstonesAreBoundedInNumber(t *testing.T) {
	s := newStore(t)
	key := func(i int) Key { return keyOf(fmt.Sprint(i)) }
	const tooMany = 3
	update(t, s, func(tx *Tx) error {
		for i := range maxTombstones + tooMany {
			if err := tx.PutTombstone(Tombstone{Key: key(i), BootID: fmt.Sprint(i % 2)}); err != nil {
				return err
			}
		}
		return nil
	})
	if n, order := burials(t, s); n != maxTombstones || order != maxTombstones {
		t.Errorf("%d tombstones, %d records of their order, want %d", n, order, maxTombstones)
	}
	for i, want := range map[int]bool{0: false, tooMany - 1: false, tooMany: true, maxTombstones + tooMany - 1: true} {
		if got := tombstone(t, s, key(i)) != nil; got != want {
			t.Errorf("tombstone %d is there: %t, want %t", i, got, want)
		}
	}
}

// age makes a tombstone older.
func age(t *testing.T, s *Store, k Key, d time.Duration) {
	t.Helper()
	tomb := tombstone(t, s, k)
	tomb.Written.Boot -= int64(d)
	data, err := json.Marshal(tomb)
	check(t, err)
	raw(t, s, func(btx *bolt.Tx) error {
		b := btx.Bucket(bucketTombstones)
		n := append([]byte(nil), b.Get(encodeKey(k))[:8]...)
		return b.Put(encodeKey(k), append(n, data...))
	})
}

// TestTombstonesAreBoundedInAge: the age counts within one boot only; the age of a tombstone of
// another boot is unknown.
func TestTombstonesAreBoundedInAge(t *testing.T) {
	s := newStore(t)
	all := []struct {
		id, boot string
		age      time.Duration
		stays    bool
	}{
		{"other boot, first", "before", 2 * maxTombstoneAge, true},
		{"old", "now", maxTombstoneAge + time.Minute, false},
		{"other boot", "before", 2 * maxTombstoneAge, true},
		{"older", "now", 2 * maxTombstoneAge, false},
		{"almost old", "now", maxTombstoneAge - time.Minute, true},
		{"new", "now", 0, true},
	}
	for i, tt := range all {
		if i == len(all)-1 { // the one that drops others: all are as old as they are to be
			for _, old := range all[:i] {
				age(t, s, keyOf(old.id), old.age)
			}
		}
		bury(t, s, Tombstone{Key: keyOf(tt.id), BootID: tt.boot})
	}
	for _, tt := range all {
		if got := tombstone(t, s, keyOf(tt.id)) != nil; got != tt.stays {
			t.Errorf("tombstone %q is there: %t, want %t", tt.id, got, tt.stays)
		}
	}
	if n, order := burials(t, s); n != 4 || order != 4 {
		t.Errorf("%d tombstones, %d records of their order, want 4 of each", n, order)
	}
}

// TestDamagedTombstone: the next PutTombstone drops a damaged tombstone, which hinders nothing.
func TestDamagedTombstone(t *testing.T) {
	s := newStore(t)
	bury(t, s, Tombstone{Key: keyOf("a")}, Tombstone{Key: keyOf("b")}, Tombstone{Key: keyOf("c")})
	raw(t, s, func(btx *bolt.Tx) error {
		return errors.Join(
			btx.Bucket(bucketTombstones).Put(encodeKey(keyOf("a")), append(sequence(1), '?')),
			btx.Bucket(bucketExpiry).Put(sequence(2), []byte("?")))
	})
	err := s.View(t.Context(), func(tx *Tx) error {
		_, err := tx.Tombstone(keyOf("a"))
		return err
	})
	var damaged *DamagedError
	if !errors.As(err, &damaged) || damaged.Key != keyOf("a") {
		t.Errorf("got error %v, want a DamagedError", err)
	}
	bury(t, s, Tombstone{Key: keyOf("d")})
	if tombstone(t, s, keyOf("a")) != nil || tombstone(t, s, keyOf("c")) == nil || tombstone(t, s, keyOf("d")) == nil {
		t.Error("want the damaged one gone, the others kept")
	}
}
