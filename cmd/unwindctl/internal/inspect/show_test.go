package inspect

import (
	"encoding/json"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/sweep"
)

// TestSentences has what no script can show: times, which go on.
func TestSentences(t *testing.T) {
	t.Parallel()
	in := func(d time.Duration) int64 { return journal.BootNanos() + int64(d) }
	entry := &journal.Entry{Key: journal.Key{Network: "podnet", ContainerID: "c", IfName: "eth0"}, Undo: journal.Undo{State: journal.Deleting, Since: journal.Now(), Steps: []journal.Step{
		{Type: "calico", Tries: 1, Last: "no route.", Code: 11, Next: journal.Next{Why: journal.ForBackoff, At: in(150 * time.Second)}},
		{Type: "often", Tries: 21, Last: "no.", Code: 11, Next: journal.Next{Why: journal.ForBackoff, At: in(270 * time.Second)}},
		{Type: "old", Tries: 2, Last: "of another boot", Code: 11, Next: journal.Next{Why: journal.ForBackoff, At: in(2 * time.Hour)}},
		{Type: "killed", Tries: 1, ADD: journal.AddKilled, Next: journal.Next{At: in(630 * time.Second), Why: journal.ForRepeat}},
		{Type: "lies", Tries: 1, Next: journal.Next{At: in(630 * time.Second), Why: journal.ForRepeat}},
		{Type: "lied", Tries: 1, Next: journal.Next{At: in(-time.Second), Why: journal.ForRepeat}},
		{Type: "gone", Tries: 1, Next: journal.Next{Why: journal.ForOwner}},
		{Type: "bridged", Index: 1},
		{Type: "ports", Index: 2, Config: json.RawMessage(`{"runtimeConfig": {"portMappings": [{"hostPort": 80}]}}`), Tries: 1, Last: "no.", Code: 7},
		{Type: "sriov"},
		{Type: "macvlan", Config: json.RawMessage(`{"ipam": {"type": "whereabouts"}}`), Tries: 1, Next: journal.Next{At: in(0), Why: journal.ForRepeat}},
	}}, Added: journal.Added{GracePeriod: time.Hour}, Got: journal.Got{Claims: []journal.Claim{{Step: 1}}}}
	described := describe(entry)
	a := &described
	a.Addresses = []netip.Addr{netip.MustParseAddr("10.9.0.2")}
	second := Attachment{Key: journal.Key{Network: "other", ContainerID: "c", IfName: "net1"}, State: journal.Live}
	for thisBoot, want := range map[bool]string{
		true:  "killed was killed while it ran, so a process that it started may have continued. unwind will run the DEL again in 10m.",
		false: "killed was killed while it ran, so a process that it started may have continued. The next sweep runs the DEL again.",
	} {
		left := "The DEL of bridged and of sriov has not been tried yet."
		waits := left
		if thisBoot {
			left = "The DEL of bridged waits, because a host port may forward to its address. It runs once the DEL of the plugin that created the host port succeeds, or after a reboot."
			waits = "The DEL of sriov waits, because the runtime may still send a DEL with the network namespace. If it does not, a sweep will run it in 59m."
		}
		got := pendingSentences(a, thisBoot, []Attachment{*a, second})
		for _, want := range []string{
			"The DEL of calico has failed 1 time, the last time with code 11: no route. unwind will retry it in 2m.",
			"The DEL of often has failed 21 times, the last time with code 11: no. unwind will retry it in 4m.",
			"The DEL of macvlan waits, because it could release resources of another ADD of its container or pod. It runs once that ADD is undone.",
			"The DEL of old has failed 2 times, the last time with code 11: of another boot. The next sweep retries it.",
			"The DEL of lies succeeds even if it frees nothing. unwind will run the DEL again in 10m.",
			"The DEL of lied succeeds even if it frees nothing. The next sweep runs the DEL again.",
			"The DEL of gone waits, because it would remove the rules of the address's new owner. It runs once that owner is gone.", want, left, waits,
		} {
			if !slices.Contains(got, want) {
				t.Errorf("this boot %t: no %q in\n%s", thisBoot, want, strings.Join(got, "\n"))
			}
		}
	}
	locked := &sweep.Finding{Verdict: decide.Verdict{Fate: decide.Unknown, Reason: decide.Reason{Text: "its lock cannot be inspected"}}}
	if got := summary(a, locked, nil); !strings.HasPrefix(got[0], "10.9.0.2 is assigned to container c, interface eth0 ") {
		t.Errorf("%q", got)
	}
}
