package term

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode"

	"github.com/google/go-cmp/cmp"

	"cni-unwind/plugin/plugintest/nodetest"
)

// TestPrintObject: any reader gets the same values, and nothing does something to a terminal.
func TestPrintObject(t *testing.T) {
	t.Parallel()
	value := map[string]any{
		"texts": []any{"", "web-0", "yes", "1e3", "0x10", "2026-11-23T05:02:00Z", "a: b # c", "two\nlines", "tab\tbed",
			"\x1b[2J", "\u009b31m", "\u202eover", "\U000e0001", "no-break\u00a0space", "emoji 😀", "\\u202e", "<&>"},
		"numbers": []any{float64(1<<53 - 1), -1.5, 0.0}, "none": nil, "empty": map[string]any{}, "list": []any{}, "is": true,
	}
	want := map[string]any{"version": 1.0, "value": value, "more": "x"}
	var out strings.Builder
	nodetest.Check(t, (&Output{Format: JSON}).PrintObject(&out, "value", value, "more", "x"))
	var got map[string]any
	if err := json.Unmarshal([]byte(out.String()), &got); err != nil {
		t.Fatalf("%v in\n%s", err, out.String())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if !strings.Contains(out.String(), "9007199254740991,") {
		t.Errorf("a number is written otherwise:\n%s", out.String())
	}
	for _, r := range out.String() {
		if r != '\n' && !unicode.IsPrint(r) {
			t.Errorf("%U is not escaped", r)
		}
	}
}
