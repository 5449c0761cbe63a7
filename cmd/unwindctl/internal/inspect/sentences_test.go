package inspect

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin"
)

// TestSentences has what no script can show: times, which go on.
func TestSentences(t *testing.T) {
	t.Parallel()
	a := &Attachment{Network: "podnet", ContainerID: "c", IfName: "eth0", State: journal.Removing, Steps: []Step{
		{Plugin: "calico", Attempts: 1, LastError: "no route.", LastCode: 11, retry: 20 * time.Second},
		{Plugin: "old", Attempts: 2, LastError: "of another boot", retry: time.Hour, Killed: true, repeat: time.Hour},
		{Plugin: "killed", Attempts: 1, Killed: true, repeat: 10 * time.Minute},
		{Plugin: "lies", Attempts: 1, ProvesNothing: true, prove: 10 * time.Minute},
		{Plugin: "lied", Attempts: 1, ProvesNothing: true},
		{Plugin: "gone", Attempts: 1, Parked: true},
		{Plugin: "aws-cni", Attempts: 1, Unproven: "10.0.0.9 is not free", retry: 20 * time.Second},
		{Plugin: "cilium-cni", Attempts: 1, Unproven: "the deletion is queued: f", retry: 20 * time.Second},
	}}
	a.Addresses = []netip.Addr{netip.MustParseAddr("10.9.0.2")}
	for thisBoot, want := range map[bool]string{
		true:  "killed was killed while it worked, so that something behind it may have gone on: its DEL runs once more in 10m. No sweep runs it sooner.",
		false: "killed was killed while it worked, so that something behind it may have gone on: the next sweep runs its DEL once more.",
	} {
		got := pendingSentences(a, thisBoot, []Attachment{*a})
		for _, want := range []string{
			"The DEL of calico has failed 1 time, the last time with code 11: no route. It is tried again in 20s.",
			"The DEL of aws-cni has passed, but 10.0.0.9 is not free: it is unproven. It is tried again in 20s.",
			"The DEL of cilium-cni has passed, but the deletion is queued: f: it is unproven. It does not run again while that file is there.",
			"The DEL of old has failed 2 times, the last time with code 0: of another boot. The next sweep tries it again.",
			"The DEL of lies also passes where it frees nothing, and no store could be asked: its DEL runs once more in 10m. No sweep runs it sooner.",
			"The DEL of lied also passes where it frees nothing, and no store could be asked: the next sweep runs its DEL once more.",
			"The DEL of gone waits, for it would take the rules of the address's new owner. It is run once that one is gone.", want,
		} {
			if !slices.Contains(got, want) {
				t.Errorf("this boot %t: no %q in\n%s", thisBoot, want, strings.Join(got, "\n"))
			}
		}
	}
	locked := &plugin.Finding{Fate: plugin.Unknown, Reason: plugin.Reason{Text: "its lock cannot be looked at"}}
	if got := summary(a, locked, nil); !strings.HasPrefix(got[0], "10.9.0.2 is held by container c, interface eth0 ") {
		t.Errorf("%q", got)
	}
}
