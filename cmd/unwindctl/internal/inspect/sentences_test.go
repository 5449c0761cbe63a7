package inspect

import (
	"encoding/json"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/sweep"
)

// TestSentences has what no script can show: times, which go on.
func TestSentences(t *testing.T) {
	t.Parallel()
	in := func(d time.Duration) int64 { return journal.BootNanos() + int64(d) }
	entry := &journal.Entry{Key: journal.Key{Network: "podnet", ContainerID: "c", IfName: "eth0"}, State: journal.Removing, Since: journal.Now(),
		Generations: []journal.Generation{{GracePeriod: time.Hour, Steps: []journal.Step{
			{Type: "calico", State: journal.StepFailed, Attempts: 1, LastError: "no route.", LastCode: 11, RetryAt: in(150 * time.Second)},
			{Type: "often", State: journal.StepFailed, Attempts: 21, LastError: "no.", LastCode: 11, RetryAt: in(270 * time.Second)},
			{Type: "old", State: journal.StepFailed, Attempts: 2, LastError: "of another boot", RetryAt: in(time.Hour), RepeatAt: in(time.Hour)},
			{Type: "killed", State: journal.StepRepeat, Attempts: 1, RepeatAt: in(630 * time.Second)},
			{Type: "lies", State: journal.StepRepeat, Attempts: 1, ConfirmAt: in(630 * time.Second)},
			{Type: "lied", State: journal.StepRepeat, Attempts: 1, ConfirmAt: in(-time.Second)},
			{Type: "gone", State: journal.StepParked, Attempts: 1},
			{Type: "aws-cni", State: journal.StepUnproven, Attempts: 1, Unproven: "10.0.0.9 is still allocated", RetryAt: in(150 * time.Second)},
			{Type: "sriov"},
			{Type: "cilium-cni", State: journal.StepUnproven, Attempts: 1, Unproven: "the deletion is queued: f", RetryAt: in(20 * time.Second)},
			{Type: "macvlan", Config: json.RawMessage(`{"ipam": {"type": "whereabouts"}}`), State: journal.StepRepeat, Attempts: 1, ConfirmAt: in(0)},
		}}}}
	described := describe(entry)
	a := &described
	a.Addresses = []netip.Addr{netip.MustParseAddr("10.9.0.2")}
	second := Attachment{Key: journal.Key{Network: "other", ContainerID: "c", IfName: "net1"}, State: journal.Live}
	for thisBoot, want := range map[bool]string{
		true:  "killed was killed while it ran, so something that it started may have continued: its DEL runs again in 10m. No sweep runs it earlier.",
		false: "killed was killed while it ran, so something that it started may have continued: the next sweep runs its DEL again.",
	} {
		left := "Pending DEL, not tried yet: sriov."
		if thisBoot {
			left = "The DEL of sriov waits for the runtime, which may still send a DEL with the network namespace. A sweep runs it in 59m."
		}
		got := pendingSentences(a, thisBoot, []Attachment{*a, second})
		for _, want := range []string{
			"The DEL of calico has failed 1 time, the last time with code 11: no route. It is retried in 2m.",
			"The DEL of often has failed 21 times, the last time with code 11: no. It is retried in 4m.",
			"The DEL of macvlan waits, because it could free what another attachment of its container has. It runs once that one is gone.",
			"The DEL of aws-cni has passed, but 10.0.0.9 is still allocated: it is unproven. It is retried in 2m.",
			"The DEL of cilium-cni has passed, but the deletion is queued: f: it is unproven. It does not run again while that file exists.",
			"The DEL of old has failed 2 times, the last time with code 0: of another boot. The next sweep retries it.",
			"The DEL of lies passes even if it frees nothing, and no store could be queried: its DEL runs again in 10m. No sweep runs it earlier.",
			"The DEL of lied passes even if it frees nothing, and no store could be queried: the next sweep runs its DEL again.",
			"The DEL of gone waits, because it would remove the rules of the address's new owner. It runs once that one is gone.", want, left,
		} {
			if !slices.Contains(got, want) {
				t.Errorf("this boot %t: no %q in\n%s", thisBoot, want, strings.Join(got, "\n"))
			}
		}
	}
	locked := &sweep.Finding{Verdict: alive.Verdict{Fate: alive.Unknown, Reason: alive.Reason{Text: "its lock cannot be inspected"}}}
	if got := summary(a, locked, nil); !strings.HasPrefix(got[0], "10.9.0.2 is held by container c, interface eth0 ") {
		t.Errorf("%q", got)
	}
}
