package journal

import (
	"fmt"
	"testing"
)

// TestAllocations bounds the allocations of a transaction and of a pass over many entries; neither
// depends on the machine's speed. A transaction opens the file anew. An outline takes two strings:
// the key and the outline.
func TestAllocations(t *testing.T) {
	s := newStore(t)
	e := adding("a", "10.0.0.1")
	update := testing.AllocsPerRun(20, func() {
		check(t, s.Update(t.Context(), func(tx *Tx) error { return tx.Put(e) }))
	})
	const entries = 1000
	check(t, s.Update(t.Context(), func(tx *Tx) error {
		for i := range entries {
			check(t, tx.Put(adding(fmt.Sprintf("c%d", i), fmt.Sprintf("10.1.%d.%d", i/250, i%250))))
		}
		return nil
	}))
	look := testing.AllocsPerRun(20, func() {
		check(t, s.View(t.Context(), func(tx *Tx) error {
			return tx.Outlines(func(Outline, error) error { return nil })
		}))
	})
	t.Logf("allocations: update %.0f, look at %d outlines %.0f", update, entries, look)
	if update > maxUpdateAllocs {
		t.Errorf("an update allocates %.0f times, want at most %d", update, maxUpdateAllocs)
	}
	if look > maxLookAllocs+2*entries {
		t.Errorf("a look at %d outlines allocates %.0f times, want at most 2 for each and %d", entries, look, maxLookAllocs)
	}
}

const (
	maxUpdateAllocs = 260
	maxLookAllocs   = 120
)
