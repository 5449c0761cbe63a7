package inspect

import (
	"testing"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/sweep"
)

// TestStepState has what no script can show: times, which go on.
func TestStepState(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		step journal.Step
		next time.Duration
		want string
	}{
		{journal.Step{Tries: 1, Last: "no route.", Code: 11}, 2 * time.Minute, "failed (code 11); next try in 2m"},
		{journal.Step{Tries: 2, Last: "no", Code: 11}, -time.Hour, "failed (code 11)"},
		{journal.Step{Tries: 1}, -time.Hour, "killed, or still running"},
	} {
		tt.step.Next = journal.Next{Why: journal.ForBackoff, At: journal.BootNanos() + int64(tt.next+time.Second)}
		e := &journal.Entry{Undo: journal.Undo{State: journal.Deleting, Steps: []journal.Step{tt.step}}}
		a := judged(e, &sweep.Finding{})
		if got := a.Steps[0].state(true); got != tt.want {
			t.Errorf("%q, want %q", got, tt.want)
		}
	}
}
