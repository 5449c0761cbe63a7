package undo

import (
	"encoding/json"
	"testing"
	"time"

	"cni-unwind/journal"
)

// TestBackoff: the time between two tries grows up to a bound, and varies.
func TestBackoff(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		attempts int
		from, to time.Duration
	}{
		{0, 0, 0}, {1, 0, 0}, {2, time.Second, 2 * time.Second}, {3, 2 * time.Second, 4 * time.Second},
		{4, 4 * time.Second, 8 * time.Second}, {5, 8 * time.Second, 16 * time.Second},
		{6, 15 * time.Second, 30 * time.Second}, {20, 15 * time.Second, 30 * time.Second},
		{21, 150 * time.Second, 300 * time.Second}, {1 << 40, 150 * time.Second, 300 * time.Second},
	} {
		seen := map[time.Duration]bool{}
		for range 100 {
			d := backoff(c.attempts)
			if seen[d] = true; d < c.from || d > c.to {
				t.Fatalf("after %d attempts: %s, want %s to %s", c.attempts, d, c.from, c.to)
			}
		}
		if len(seen) < 10 && c.to > 0 {
			t.Errorf("after %d attempts there are %d times only", c.attempts, len(seen))
		}
	}
}

// TestNextTry has each thing that a pending DEL waits for, and for whom.
func TestNextTry(t *testing.T) {
	t.Parallel()
	const now, minute = int64(time.Hour), int64(time.Minute)
	failed := journal.Step{Attempts: 30, LastError: "no", RetryAt: now + 4*minute}
	elsewhere := journal.Step{Attempts: 1, ConfirmAt: now + minute, RetryAt: now - 1,
		Config: json.RawMessage(`{"ipam": {"type": "whereabouts"}}`)}
	for _, tt := range []struct {
		name string
		step journal.Step
		by   Asker
		want Next
	}{
		{"never tried", journal.Step{RepeatAt: now + minute}, Asker{SameBoot: true}, Next{}},
		{"failed", failed, Asker{}, Next{Pause, 4 * time.Minute}},
		{"failed, asked", failed, Asker{IgnoresPause: true}, Next{}},
		{"failed in another boot", journal.Step{Attempts: 1, LastError: "no", RetryAt: now + 6*minute}, Asker{}, Next{}},
		{"queued", journal.Step{Attempts: 1, Unproven: "queued"}, Asker{IgnoresPause: true, Queued: func(*journal.Step) bool { return true }}, Next{Awaits: Queue}},
		{"unproven", journal.Step{Attempts: 2, Unproven: "held", RetryAt: now + minute}, Asker{}, Next{Pause, time.Minute}},
		{"parked", journal.Step{Attempts: 1, Parked: true, RetryAt: now + minute}, Asker{}, Next{Awaits: NewOwner}},
		{"killed", journal.Step{Attempts: 1, RepeatAt: now + minute}, Asker{SameBoot: true, IgnoresPause: true}, Next{GracePeriod, time.Minute}},
		{"killed before a reboot", journal.Step{Attempts: 1, RepeatAt: now + minute}, Asker{}, Next{}},
		{"to be confirmed", elsewhere, Asker{GracePeriod: time.Hour}, Next{GracePeriod, time.Minute}},
		{"to be confirmed, of another boot", elsewhere, Asker{}, Next{}},
		{"to be confirmed, by who can ask", elsewhere, Asker{GracePeriod: time.Hour, AsksStores: true}, Next{}},
		{"left to the runtime", journal.Step{Type: skipUnnamed[0]}, Asker{SameBoot: true, NoNetNS: true, Since: now - minute, GracePeriod: time.Hour},
			Next{Runtime, 59 * time.Minute}},
		{"left to the runtime for long", journal.Step{Type: skipUnnamed[0]}, Asker{SameBoot: true, NoNetNS: true, GracePeriod: time.Hour}, Next{}},
		{"the container lives", elsewhere, Asker{IgnoresPause: true, ContainerLives: func() bool { return true }}, Next{Awaits: Container}},
	} {
		tt.by.Now = now
		if tt.by.ContainerLives == nil {
			tt.by.ContainerLives = func() bool { return false }
		}
		if tt.by.Queued == nil {
			tt.by.Queued = func(*journal.Step) bool { return false }
		}
		if got := NextTry(&tt.step, tt.by); got != tt.want {
			t.Errorf("%s: %+v, want %+v", tt.name, got, tt.want)
		}
	}
}
