package journal

import (
	"errors"
	"fmt"
	"testing"

	bolt "go.etcd.io/bbolt"
)

// undone returns the undone record of an attachment, or nil.
func undone(t *testing.T, s *Store, k Key) (e *Entry) {
	t.Helper()
	view(t, s, func(tx *Tx) (err error) {
		e, err = undoneOf(tx, k)
		return err
	})
	return e
}

func TestUndoneAreBounded(t *testing.T) {
	s := newStore(t)
	const tooMany = 3
	update(t, s, func(tx *Tx) error {
		var errs []error
		for i := range maxUndone + tooMany {
			errs = append(errs, tx.Put(&Entry{Key: keyOf(fmt.Sprint(-i)), Undo: Undo{State: Undone}}))
		}
		return errors.Join(errs...)
	})
	view(t, s, func(tx *Tx) error {
		if n := numberOfRecords(tx); n != maxUndone {
			t.Errorf("%d records, want %d", n, maxUndone)
		}
		return nil
	})
	if undone(t, s, keyOf(fmt.Sprint(1-tooMany))) != nil || undone(t, s, keyOf(fmt.Sprint(-tooMany))) == nil {
		t.Error("the oldest are not those that are gone")
	}
}

// TestDamagedUndone: a damaged undone record hinders nothing, and goes with the attachment's next ADD.
func TestDamagedUndone(t *testing.T) {
	s := newStore(t)
	update(t, s, func(tx *Tx) error {
		return errors.Join(buryIn(tx, keyOf("a"), "", ""), buryIn(tx, keyOf("b"), "", ""))
	})
	raw(t, s, func(btx *bolt.Tx) error {
		return btx.Bucket(bucketEntries).Put(recordKey(keyOf("a"), 1), []byte(`sum:{"state":"`+Undone+`"?`))
	})
	err := s.View(t.Context(), func(tx *Tx) error {
		_, err := tx.Records(keyOf("a"))
		return err
	})
	var damaged *DamagedError
	if !errors.As(err, &damaged) || damaged.Key != keyOf("a") {
		t.Errorf("got error %v, want a DamagedError", err)
	}
	put(t, s, adding("a"))
	if undone(t, s, keyOf("a")) != nil || undone(t, s, keyOf("b")) == nil || get(t, s, keyOf("a")) == nil {
		t.Error("want the damaged one gone, the others kept")
	}
}
