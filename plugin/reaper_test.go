package plugin

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"cni-unwind/ipam"
)

// The race of whereabouts#162: a reaper reads what is attached, then an ADD gets an address. The
// reaper releases it, since it is not in what it read. The next pod then gets the same address.

// reap releases each address in a pool whose owner is not listed, as a reaper does that goes by its
// list alone.
func reap(t testing.TB, pool string, listed ...string) {
	t.Helper()
	found, err := ipam.Scan(pool)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range found {
		if !slices.Contains(listed, r.Owner.ContainerID) {
			if err := os.Remove(filepath.Join(pool, r.Address.String())); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestReaperRace runs the same schedule twice on a pool of one address. With such a reaper and the
// plain chain, two pods end with one address. With unwind and its GC, the second ADD fails because
// none is left.
func TestReaperRace(t *testing.T) {
	stories(t, `
	small; conf gracePeriod 10m; chain bridge | p1; plan p1 ADD hold; let held $dir/faulty/held/ADD.a.p1
	either a reaper: let past past
	or unwind: let past
	start $past add a; appears $held
	either the ADD is just done: lose $held; wait add a
	or the ADD is under way:
	if a reaper: reap
	if unwind: gc list
	if under way: lose $held; wait add a
	plan
	if a reaper: past add b; given b $ip2
	if unwind: fails add b 'no IP addresses available'; owners '$ip2 a eth0'
	leaves`, acts{
		"small": func(s *story, _ []string) { s.subnet = strings.Replace(s.subnet, ".0/24", ".0/30", 1) },
		"reap":  func(s *story, _ []string) { reap(s, filepath.Join(s.dataDir(), s.network)) }, // lists what was there before the ADD
	})
}
