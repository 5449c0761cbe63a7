package decide

import (
	"testing"
	"time"
)

// TestDecideGrace: an owner of addresses is as old as its youngest file. A file time in the future
// proves nothing. If the clock was changed in this boot, a time before the boot proves nothing
// either. In both cases, the grace period is over only if --grace-period is given.
func TestDecideGrace(t *testing.T) {
	t.Parallel()
	const minute = time.Minute
	ago := func(all ...time.Duration) []time.Duration { return all }
	const year = 365 * 24 * time.Hour
	set, kept := Clock{SinceBoot: time.Hour}, Clock{SinceBoot: time.Hour, Kept: true}
	over, left := Grace{Over: true, SameBoot: True}, Grace{SameBoot: True, Left: 6 * minute}
	earlier, unknown := Grace{Over: true, SameBoot: False}, Grace{SameBoot: Unclear}
	for _, tt := range []struct {
		name  string
		ages  []time.Duration
		clock Clock
		given time.Duration
		want  Grace
	}{
		{"no file", nil, kept, 0, over},
		{"within the grace period", ago(4 * minute), set, 0, left},
		{"just written", ago(0), set, 0, Grace{SameBoot: True, Left: 10 * minute}},
		{"past the grace period", ago(11 * minute), set, 0, over},
		{"at the end of the grace period", ago(10 * minute), set, 0, over},
		{"at the boot", ago(time.Hour), set, 0, over},
		{"the youngest counts", ago(30*minute, 4*minute, 20*minute), set, 0, left},
		{"before the boot", ago(time.Hour + 1), kept, 0, earlier},
		{"all before the boot", ago(time.Hour+1, year), kept, 0, earlier},
		{"one of them before the boot", ago(4*minute, year), kept, 0, left},
		{"before the boot, --grace-period", ago(year), kept, minute, earlier},
		{"before the boot, and the clock was set", ago(time.Hour + 1), set, 0, unknown},
		{"the clock began at 1970", ago(50 * year), set, 0, unknown},
		{"one of them before the boot, and the clock was set", ago(11*minute, year), set, 0, unknown},
		{"in the future", ago(-1), kept, 0, unknown},
		{"the clock was set back", ago(-year), set, 0, unknown},
		{"one of them in the future", ago(11*minute, -year), kept, 0, unknown},
		{"past a given --grace-period", ago(4 * minute), set, minute, over},
		{"within a given --grace-period", ago(4 * minute), set, 5 * minute, Grace{SameBoot: True, Left: minute}},
		{"before the boot, the clock was set, --grace-period", ago(year), set, minute, Grace{Over: true, SameBoot: Unclear}},
		{"in the future, --grace-period", ago(-year), kept, minute, Grace{Over: true, SameBoot: Unclear}},
	} {
		if got := DecideGrace(tt.ages, tt.clock, 10*minute, tt.given); got != tt.want {
			t.Errorf("%s: %+v, want %+v", tt.name, got, tt.want)
		}
	}
}
