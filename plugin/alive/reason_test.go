package alive

import (
	"slices"
	"testing"
)

// TestReasonsHaveLabels: each reason for which something is undone has a code of its own, which is
// its label but for one that a verb of the runtime brings about; and its text alone, as the first
// releases wrote it, still tells its code.
func TestReasonsHaveLabels(t *testing.T) {
	t.Parallel()
	var codes []string
	for _, r := range recorded {
		if r.Code == "" || r.Text == "" || slices.Contains(codes, r.Code) {
			t.Errorf("%+v: a code of its own and a text are needed", r)
		}
		codes = append(codes, r.Code)
		if want := r.Code; r.Label() != want && r != Superseded || r == Superseded && r.Label() != "requested" {
			t.Errorf("%+v has the label %q", r, r.Label())
		}
		for _, text := range []string{r.Text, r.Text + ": and more"} {
			if got := Recorded("", text); got.Code != r.Code || got.Text != text || !got.Is(r) {
				t.Errorf("%q is read as %+v", text, got)
			}
		}
		if got := Recorded(r.Code, "other words"); !got.Is(r) {
			t.Errorf("%q in other words is read as %+v", r.Code, got)
		}
	}
	for _, text := range []string{"", "words that nobody knows"} {
		if got := Recorded("", text); got.Label() != "requested" || got.Text == "" {
			t.Errorf("%q is read as %+v", text, got)
		}
	}
}
