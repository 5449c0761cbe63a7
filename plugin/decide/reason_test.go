package decide

import (
	"slices"
	"testing"
)

// recordable lists the reasons that a record of the journal may contain.
var recordable = []Reason{Requested, Superseded, FailedADD, EarlierBoot, Interrupted, NetNSGone, Unlisted, OtherMachine}

// TestReasonsHaveLabels: each recordable reason has a unique code. The label of Superseded is
// "requested"; the label of any other reason is its code.
func TestReasonsHaveLabels(t *testing.T) {
	t.Parallel()
	var codes []string
	for _, r := range recordable {
		if r.Code == "" || r.Text == "" || slices.Contains(codes, r.Code) {
			t.Errorf("%+v: it needs a unique code and a text", r)
		}
		codes = append(codes, r.Code)
		if want := r.Code; r.Label() != want && r != Superseded || r == Superseded && r.Label() != "requested" {
			t.Errorf("%+v has the label %q", r, r.Label())
		}
		if got := Recorded(r.Code, "other words"); !got.Is(r) {
			t.Errorf("code %q with another text is read as %+v", r.Code, got)
		}
	}
	if got := Recorded("", ""); got != Requested {
		t.Errorf("an empty reason is read as %+v", got)
	}
}

// TestIs: two reasons are the same if they have the same code or, if neither has one, the same
// text.
func TestIs(t *testing.T) {
	for _, tt := range []struct {
		a, b Reason
		same bool
	}{
		{Reason{"a", "x"}, Reason{"a", "y"}, true}, {Reason{"a", "x"}, Reason{"b", "x"}, false},
		{Reason{"", "x"}, Reason{"", "x"}, true}, {Reason{"", "x"}, Reason{"", "y"}, false}, {Reason{"", "x"}, Reason{"a", "x"}, false},
	} {
		if tt.a.Is(tt.b) != tt.same || tt.b.Is(tt.a) != tt.same {
			t.Errorf("%+v and %+v: want %t", tt.a, tt.b, tt.same)
		}
	}
}
