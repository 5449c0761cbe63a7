package alive

import (
	"slices"
	"testing"
)

// recordable are the reasons that the journal may have in an entry.
var recordable = []Reason{Requested, Superseded, FailedADD, EarlierBoot, CutOff, NetNSGone, Unlisted, OtherMachine}

// TestReasonsHaveLabels: each reason for which something is undone has a code of its own, which is
// its label but for one that a verb of the runtime brings about.
func TestReasonsHaveLabels(t *testing.T) {
	t.Parallel()
	var codes []string
	for _, r := range recordable {
		if r.Code == "" || r.Text == "" || slices.Contains(codes, r.Code) {
			t.Errorf("%+v: a code of its own and a text are needed", r)
		}
		codes = append(codes, r.Code)
		if want := r.Code; r.Label() != want && r != Superseded || r == Superseded && r.Label() != "requested" {
			t.Errorf("%+v has the label %q", r, r.Label())
		}
		if got := Recorded(r.Code, "other words"); !got.Is(r) {
			t.Errorf("%q in other words is read as %+v", r.Code, got)
		}
	}
	if got := Recorded("", ""); got != Requested {
		t.Errorf("no reason is read as %+v", got)
	}
}
