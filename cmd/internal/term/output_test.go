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
	"go.yaml.in/yaml/v3"

	"cni-unwind/testdata/nodetest"
)

// TestPrintObject: JSON and YAML have the same values, as those of any reader, and nothing that does
// something to a terminal.
func TestPrintObject(t *testing.T) {
	t.Parallel()
	value := map[string]any{
		"texts": []any{"", "web-0", "yes", "1e3", "0x10", "2026-11-23T05:02:00Z", "a: b # c", "two\nlines", "tab\tbed",
			"\x1b[2J", "\u009b31m", "\u202eover", "\U000e0001", "no-break\u00a0space", "emoji 😀", "\\u202e", "<&>"},
		"numbers": []any{float64(1<<53 - 1), -1.5, 0.0}, "none": nil, "empty": map[string]any{}, "list": []any{}, "is": true,
	}
	want := map[string]any{"version": 1.0, "value": value, "more": "x"}
	for format, read := range map[Format]func([]byte, any) error{JSON: json.Unmarshal, YAML: yaml.Unmarshal} {
		var out strings.Builder
		nodetest.Check(t, (&Output{Format: format}).PrintObject(&out, "value", value, "more", "x"))
		var got map[string]any
		if err := read([]byte(out.String()), &got); err != nil {
			t.Fatalf("%s: %v in\n%s", format, err, out.String())
		}
		again, err := json.Marshal(got) // numbers of YAML are integers, too
		nodetest.Check(t, err)
		got = nil
		nodetest.Check(t, json.Unmarshal(again, &got))
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", format, diff)
		}
		if !strings.Contains(out.String(), "9007199254740991\n") && !strings.Contains(out.String(), "9007199254740991,") {
			t.Errorf("%s: a number is written otherwise:\n%s", format, out.String())
		}
		for _, r := range out.String() {
			if r != '\n' && !unicode.IsPrint(r) {
				t.Errorf("%s: %U is not escaped", format, r)
			}
		}
	}
}

// TestWatch: what two looks print is two documents, for a reader of JSON and of YAML, and the end is
// no error.
func TestWatch(t *testing.T) {
	t.Parallel()
	for _, format := range []Format{JSON, YAML} {
		t.Run(string(format), func(t *testing.T) {
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
			cmd.SetArgs([]string{"--watch", "-o", string(format)})
			if err := cmd.ExecuteContext(ctx); err != nil {
				t.Error(err)
			}
			var next interface{ Decode(any) error } = json.NewDecoder(strings.NewReader(out.String()))
			if format == YAML {
				next = yaml.NewDecoder(strings.NewReader(out.String()))
			}
			for want := 1; want <= 2; want++ {
				var got struct{ Look int }
				if err := next.Decode(&got); err != nil || got.Look != want {
					t.Errorf("look %d: %v, %v in\n%s", want, got.Look, err, out.String())
				}
			}
			if err := next.Decode(new(any)); !errors.Is(err, io.EOF) {
				t.Errorf("after them: %v", err)
			}
		})
	}
}
