package journal

import (
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	bolt "go.etcd.io/bbolt"
)

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
		tombstones, order = len(bucketOf(tx, bucketTombstones)), len(bucketOf(tx, bucketBuried))
		return nil
	})
	return tombstones, order
}

func TestTombstone(t *testing.T) {
	s := newStore(t)
	put(t, s, adding("a", "10.0.0.1"), adding("b"))
	before := Now()
	want := Tombstone{Key: keyOf("a"), NetNS: NetNS{"/var/run/netns/a", 4, 5, 6, 7}, Reason: "reboot", BootID: "b007"}
	update(t, s, func(tx *Tx) error { return errors.Join(tx.Delete(want.Key), tx.PutTombstone(want)) })

	got := tombstone(t, s, want.Key)
	if diff := cmp.Diff(&want, got, cmpopts.IgnoreFields(Tombstone{}, "Buried")); diff != "" {
		t.Errorf("tombstone (-want +got):\n%s", diff)
	}
	if got.Buried.Boot < before.Boot || got.Buried.Boot > Now().Boot {
		t.Errorf("buried at %v, it is %v", got.Buried, Now())
	}
	if tombstone(t, s, keyOf("b")) != nil {
		t.Error("an entry has a tombstone")
	}
	if diff := cmp.Diff([]string{"b"}, idsOf(t, s)); diff != "" {
		t.Errorf("a tombstone is no entry (-want +got):\n%s", diff)
	}

	want.Reason = "again"
	bury(t, s, want)
	if got := tombstone(t, s, want.Key).Reason; got != "again" {
		t.Errorf("the tombstone that was replaced has the reason %q", got)
	}
	if n, order := burials(t, s); n != 1 || order != 1 {
		t.Errorf("%d tombstones, %d records of their order, want 1 of each", n, order)
	}

	put(t, s, adding("a"))
	if tombstone(t, s, want.Key) != nil {
		t.Error("there is a tombstone beside the entry")
	}
	if n, order := burials(t, s); n != 0 || order != 0 {
		t.Errorf("%d tombstones, %d records of their order, want none", n, order)
	}
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
	tomb.Buried.Boot -= int64(d)
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
	bury(t, s,
		Tombstone{Key: keyOf("other boot, first"), BootID: "before"},
		Tombstone{Key: keyOf("old"), BootID: "now"},
		Tombstone{Key: keyOf("other boot"), BootID: "before"},
		Tombstone{Key: keyOf("older"), BootID: "now"},
		Tombstone{Key: keyOf("almost old"), BootID: "now"})
	for id, d := range map[string]time.Duration{
		"other boot, first": 2 * maxTombstoneAge,
		"old":               maxTombstoneAge + time.Minute,
		"other boot":        2 * maxTombstoneAge,
		"older":             2 * maxTombstoneAge,
		"almost old":        maxTombstoneAge - time.Minute,
	} {
		age(t, s, keyOf(id), d)
	}
	bury(t, s, Tombstone{Key: keyOf("new"), BootID: "now"})
	for id, want := range map[string]bool{
		"other boot, first": true, "old": false, "other boot": true, "older": false, "almost old": true, "new": true,
	} {
		if got := tombstone(t, s, keyOf(id)) != nil; got != want {
			t.Errorf("tombstone %q is there: %t, want %t", id, got, want)
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
			btx.Bucket(bucketBuried).Put(sequence(2), []byte("?")))
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
