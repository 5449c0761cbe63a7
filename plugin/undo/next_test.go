package undo

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"cni-unwind/journal"
	"cni-unwind/testdata/document"
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
	failed := journal.Step{State: journal.StepFailed, Attempts: 30, LastError: "no", RetryAt: now + 4*minute}
	elsewhere := journal.Step{State: journal.StepRepeat, Attempts: 1, ConfirmAt: now + minute, RetryAt: now - 1,
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
		{"failed in another boot", journal.Step{State: journal.StepFailed, Attempts: 1, LastError: "no", RetryAt: now + 6*minute}, Asker{}, Next{}},
		{"queued", journal.Step{State: journal.StepUnproven, Attempts: 1, Unproven: "queued"}, Asker{IgnoresPause: true, Queued: func(*journal.Step) bool { return true }}, Next{Awaits: Queue}},
		{"unproven", journal.Step{State: journal.StepUnproven, Attempts: 2, Unproven: "held", RetryAt: now + minute}, Asker{}, Next{Pause, time.Minute}},
		{"parked", journal.Step{State: journal.StepParked, Attempts: 1, RetryAt: now + minute}, Asker{}, Next{Awaits: NewOwner}},
		{"killed", journal.Step{State: journal.StepRepeat, Attempts: 1, RepeatAt: now + minute}, Asker{SameBoot: true, IgnoresPause: true}, Next{GracePeriod, time.Minute}},
		{"killed before a reboot", journal.Step{State: journal.StepRepeat, Attempts: 1, RepeatAt: now + minute}, Asker{}, Next{}},
		{"to be confirmed", elsewhere, Asker{GracePeriod: time.Hour}, Next{GracePeriod, time.Minute}},
		{"to be confirmed, of another boot", elsewhere, Asker{}, Next{}},
		{"to be confirmed, by who can ask", elsewhere, Asker{GracePeriod: time.Hour, AsksStores: true}, Next{}},
		{"left to the runtime", journal.Step{Type: "sriov"}, Asker{SameBoot: true, NoNetNS: true, Since: now - minute, GracePeriod: time.Hour},
			Next{Runtime, 59 * time.Minute}},
		{"left to the runtime for long", journal.Step{Type: "sriov"}, Asker{SameBoot: true, NoNetNS: true, GracePeriod: time.Hour}, Next{}},
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

// TestRetryTable keeps the table in plugin/README.md, "Retries", in step with NextTry.
func TestRetryTable(t *testing.T) {
	const now, later = int64(time.Hour), int64(time.Hour + time.Minute)
	whereabouts := json.RawMessage(`{"ipam": {"type": "whereabouts"}}`)
	words := map[Awaits]string{
		Nothing: "at once", Pause: "after the pause", NewOwner: "once that owner is gone", GracePeriod: "once `gracePeriod` is over",
		Queue: "once the queue does not have it", Container: "once the others are gone", Runtime: "after `gracePeriod`",
	}
	table := "| its DEL | STATUS, the agent | GC, `unwindctl sweep` |\n|---|---|---|\n"
	for _, row := range []struct {
		name string
		step journal.Step
		by   Asker
	}{
		{"was never tried", journal.Step{}, Asker{}},
		{"failed", journal.Step{State: journal.StepFailed, RetryAt: later}, Asker{}},
		{"passed, and the store of its IPAM plugin has the address, or cannot be asked (`unproven`)",
			journal.Step{State: journal.StepUnproven, Unproven: "held", RetryAt: later}, Asker{}},
		{"passed, and its plugin has it in a queue of its own (cilium-cni)",
			journal.Step{State: journal.StepUnproven, Unproven: "queued", RetryAt: later}, Asker{Queued: func(*journal.Step) bool { return true }}},
		{"passed without an address that has another owner (`parked`)", journal.Step{State: journal.StepParked, RetryAt: later}, Asker{}},
		{"passed, after its delegate was killed (`repeat`)", journal.Step{State: journal.StepRepeat, RepeatAt: later}, Asker{SameBoot: true}},
		{"the same, before a reboot", journal.Step{State: journal.StepRepeat, RepeatAt: later}, Asker{}},
		{"passed, which proves nothing for this plugin (`repeat`)", journal.Step{State: journal.StepRepeat, ConfirmAt: later}, Asker{SameBoot: true}},
		{"passed, or may have; it frees by the container ID, which other attachments have (whereabouts)",
			journal.Step{State: journal.StepRepeat, Config: whereabouts}, Asker{ContainerLives: func() bool { return true }}},
		{"does nothing without CNI_NETNS, and the namespace is gone (kube-ovn, sriov)",
			journal.Step{Type: "kube-ovn"}, Asker{SameBoot: true, NoNetNS: true, Since: now}},
	} {
		by := row.by
		by.Now, by.GracePeriod = now, 10*time.Minute
		if by.ContainerLives == nil {
			by.ContainerLives = func() bool { return false }
		}
		if by.Queued == nil {
			by.Queued = func(*journal.Step) bool { return false }
		}
		asked := by
		asked.IgnoresPause = true
		table += fmt.Sprintf("| %s | %s | %s |\n", row.name, words[NextTry(&row.step, by).Awaits], words[NextTry(&row.step, asked).Awaits])
	}
	document.Table(t, "../README.md", "retries", table)
}
