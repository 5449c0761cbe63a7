package journal

import (
	"errors"
	"testing"
)

// TestCheckFindsDamagedEntry: Check finds a damaged entry beside good ones, in a file that is
// whole.
func TestCheckFindsDamagedEntry(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	put(t, s, adding("a"), adding("b"), adding("c"))
	look := func() error { return s.View(t.Context(), (*Tx).Check) }
	check(t, look())
	check(t, s.Update(t.Context(), func(tx *Tx) error {
		return tx.btx.Bucket(bucketEntries).Put(encodeKey(keyOf("b")), []byte("no entry"))
	}))
	var damaged *DamagedError
	if err := look(); !errors.As(err, &damaged) || damaged.Key != keyOf("b") {
		t.Errorf("%v, want that b is damaged", err)
	}
}
