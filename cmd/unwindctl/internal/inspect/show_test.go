package inspect

import (
	"testing"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/sweep"
)

// TestSentences has what no script can show: times, which go on.
func TestSentences(t *testing.T) {
	t.Parallel()
	in := func(why journal.Why, d time.Duration) journal.Next {
		return journal.Next{Why: why, At: journal.BootNanos() + int64(d+time.Second)}
	}
	for _, tt := range []struct {
		step journal.Step
		next journal.Next
		want string
	}{
		{journal.Step{Type: "calico", Tries: 1, Last: "no route.", Code: 11}, in(journal.ForBackoff, 2*time.Minute),
			"The DEL of calico has failed 1 time, the last time with code 11: no route. The first sweep after 2m retries it."},
		{journal.Step{Type: "old", Tries: 2, Last: "no", Code: 11}, journal.Next{},
			"The DEL of old has failed 2 times, the last time with code 11: no. The next sweep retries it."},
		{journal.Step{Type: "bridge"}, journal.Next{Why: journal.ForRules},
			"The DEL of bridge waits, because it would free an address for which a later plugin may still have rules or host ports. It runs once the DEL of that plugin succeeds or is out of tries, or after a reboot."},
		{journal.Step{Type: "macvlan"}, journal.Next{Why: journal.ForContainer},
			"The DEL of macvlan waits, because it could release resources of another ADD of its container or pod. It runs once that ADD is undone."},
		{journal.Step{Type: "new"}, journal.Next{}, "The DEL of new has not been tried yet."},
	} {
		tt.step.Next = tt.next
		e := &journal.Entry{Key: journal.Key{Network: "podnet", ContainerID: "c", IfName: "eth0"}, Added: journal.Added{GracePeriod: time.Hour},
			Undo: journal.Undo{State: journal.Deleting, Steps: []journal.Step{tt.step}}}
		a := judged(e, &sweep.Finding{})
		if got := pendingSentences(&a); got[0] != tt.want {
			t.Errorf("got\n%s\nwant\n%s", got[0], tt.want)
		}
	}
}
