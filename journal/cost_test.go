package journal

import (
	"fmt"
	"os"
	"testing"

	"cni-unwind/plugin/plugintest/sandbox"
)

// TestAllocations limits the number of memory allocations in one Update (which opens the file) and
// in one View of 1,000 outlines. Unlike times, these counts don't depend on the machine.
func TestAllocations(t *testing.T) {
	s := newStore(t)
	e := adding("a", "10.0.0.1")
	update := testing.AllocsPerRun(20, func() {
		check(t, s.Update(t.Context(), func(tx *Tx) error { return tx.Put(e) }))
	})
	const records = 1000
	check(t, s.Update(t.Context(), func(tx *Tx) error {
		for i := range records {
			check(t, tx.Put(adding(fmt.Sprintf("c%d", i), fmt.Sprintf("10.1.%d.%d", i/250, i%250))))
		}
		return nil
	}))
	look := testing.AllocsPerRun(20, func() {
		check(t, s.View(t.Context(), func(tx *Tx) error {
			return tx.Outlines(func(Outline, error) error { return nil })
		}))
	})
	t.Logf("allocations: one update %.0f, reading %d outlines %.0f", update, records, look)
	if update > maxUpdateAllocs {
		t.Errorf("one update allocates %.0f times, want at most %d", update, maxUpdateAllocs)
	}
	if look > maxLookAllocs+perOutline*records {
		t.Errorf("reading %d outlines allocates %.0f times, want at most %d for each plus %d", records, look, perOutline, maxLookAllocs)
	}
}

const (
	maxUpdateAllocs = 220
	maxLookAllocs   = 120
	perOutline      = 9
)

// TestSteady adds and deletes 1,000 attachments (100,000 in `make proof`). Each takes four
// transactions: adding, live, deleting, deleted. 110 attachments exist at a time. After the first
// quarter of the run, the file must not grow any more.
func TestSteady(t *testing.T) {
	if testing.Short() {
		t.Skip("thousands of transactions: make test")
	}
	pairs := 1_000
	if sandbox.Long() {
		pairs = 100_000
	} else {
		t.Parallel()
	}
	const there = 110
	s := newStore(t)
	var early, now int64
	for i := range pairs + there {
		if i < pairs {
			e := adding(fmt.Sprintf("c%d", i), fmt.Sprintf("10.%d.%d.%d", i>>16&255, i>>8&255, i&255))
			e.Steps[0].Config = fmt.Appendf(nil, `{"type": "bridge", "padding": "%0*d"}`, 8*i%2000, i)
			put(t, s, e)
			e.State = Live
			put(t, s, e)
		}
		if i >= there {
			k := keyOf(fmt.Sprintf("c%d", i-there))
			check(t, s.Update(t.Context(), func(tx *Tx) error {
				e, err := tx.Get(k)
				if err != nil {
					return err
				}
				e.State = Deleting
				return tx.Put(e)
			}))
			check(t, s.Update(t.Context(), func(tx *Tx) error { return remove(tx, k) }))
		}
		info, err := os.Stat(s.Path())
		check(t, err)
		now = info.Size()
		if i == pairs/4 {
			early = now
		}
	}
	t.Logf("%d pairs: %d KiB after a quarter, %d KiB at the end", pairs, early>>10, now>>10)
	if now > early {
		t.Errorf("the file grew from %d to %d bytes", early, now)
	}
}
