package sweep

import (
	"slices"
	"testing"
	"time"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/facts"
)

// TestMade: an owner is as young as the youngest of its files.
func TestMade(t *testing.T) {
	at := time.Unix(1000, 0)
	held := []ipam.Reservation{{File: ipam.File{Mtime: 5}}, {File: ipam.File{Mtime: at.UnixNano()}}, {}}
	cached := func(after int) *facts.Cached { return &facts.Cached{Written: at.Add(time.Duration(after))} }
	for i, tt := range []struct {
		of   owner
		want time.Time
	}{{owner{held: held}, at}, {owner{}, time.Unix(0, 0)}, {owner{held: held, cached: cached(1)}, at.Add(1)}, {owner{held: held, cached: cached(-1)}, at}} {
		if got := tt.of.made(); !got.Equal(tt.want) {
			t.Errorf("%d: %v, want %v", i, got, tt.want)
		}
	}
}

// TestSortByAge: a sweep begins with the record that was longest untouched, by the boot clock. The wall
// clock may have been set in between, and a time that is yet to come is of an earlier boot.
func TestSortByAge(t *testing.T) {
	t.Parallel()
	var entries [][]*journal.Entry
	for _, e := range []struct {
		id   string
		boot int64
		wall int
	}{{"last", 90, 1}, {"first", 10, 3}, {"second", 20, 2}, {"earlier boot", 101, 4}} {
		entries = append(entries, []*journal.Entry{{Key: journal.Key{ContainerID: e.id},
			Updated: journal.Time{Boot: e.boot, Wall: time.Unix(int64(e.wall), 0)}}})
	}
	sortByAge(entries, 100)
	var got []string
	for _, e := range entries {
		got = append(got, e[0].ContainerID)
	}
	if !slices.Equal(got, []string{"earlier boot", "first", "second", "last"}) {
		t.Errorf("%q", got)
	}
}
