package term

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"
	"unicode"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"

	"cni-unwind/testdata/nodetest"
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

// TestWatch: what two looks print is two documents, and the end is no error.
func TestWatch(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	var o Output
	var out strings.Builder
	looks := 0
	cmd := &cobra.Command{Use: "list", RunE: func(cmd *cobra.Command, _ []string) error {
		if looks++; looks == 2 {
			defer cancel()
		}
		return o.PrintObject(cmd.OutOrStdout(), "look", looks)
	}}
	o.AddFlags(cmd, cmd.Flags(), "look", Plain, JSON)
	AddWatch(cmd)
	cmd.SetOut(&out)
	cmd.SetArgs([]string{"--watch", "-o", "json"})
	if err := cmd.ExecuteContext(ctx); err != nil {
		t.Error(err)
	}
	next := json.NewDecoder(strings.NewReader(out.String()))
	for want := 1; want <= 2; want++ {
		var got struct{ Look int }
		if err := next.Decode(&got); err != nil || got.Look != want {
			t.Errorf("look %d: %v, %v in\n%s", want, got.Look, err, out.String())
		}
	}
	if err := next.Decode(new(any)); !errors.Is(err, io.EOF) {
		t.Errorf("after them: %v", err)
	}
}
