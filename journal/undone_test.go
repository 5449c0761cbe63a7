package journal

import (
	"errors"
	"fmt"
	"testing"
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
