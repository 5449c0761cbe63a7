package decide

import (
	"testing"
	"time"
)

// TestDecideGrace: an owner is as young as its youngest file. Of a time that the clock cannot have shown
// in this boot nothing follows, and only --grace-period ends the grace period.
func TestDecideGrace(t *testing.T) {
	t.Parallel()
	const minute = time.Minute
	ago := func(all ...time.Duration) []time.Duration { return all }
	const year = 365 * 24 * time.Hour
	for _, tt := range []struct {
		name  string
		ages  []time.Duration
		given time.Duration
		want  Grace
	}{
		{"young", ago(4 * minute), 0, Grace{Dated: true, Left: 6 * minute}},
		{"just written", ago(0), 0, Grace{Dated: true, Left: 10 * minute}},
		{"old", ago(11 * minute), 0, Grace{Dated: true, Over: true}},
		{"at its end", ago(10 * minute), 0, Grace{Dated: true, Over: true}},
		{"at the boot", ago(time.Hour), 0, Grace{Dated: true, Over: true}},
		{"the youngest counts", ago(30*minute, 4*minute, 20*minute), 0, Grace{Dated: true, Left: 6 * minute}},
		{"before the boot", ago(time.Hour + 1), 0, Grace{}},
		{"the clock began at 1970", ago(50 * year), 0, Grace{}},
		{"the future", ago(-1), 0, Grace{}},
		{"the clock was set back", ago(-year), 0, Grace{}},
		{"one of them before the boot", ago(11*minute, year), 0, Grace{}},
		{"one of them in the future", ago(11*minute, -year), 0, Grace{}},
		{"young, given", ago(4 * minute), minute, Grace{Dated: true, Over: true}},
		{"younger than given", ago(4 * minute), 5 * minute, Grace{Dated: true, Left: minute}},
		{"before the boot, given", ago(year), minute, Grace{Over: true}},
		{"the future, given", ago(-year), minute, Grace{Over: true}},
	} {
		if got := DecideGrace(tt.ages, time.Hour, 10*minute, tt.given); got != tt.want {
			t.Errorf("%s: %+v, want %+v", tt.name, got, tt.want)
		}
	}
}
