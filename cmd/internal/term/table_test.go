package term

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"cni-unwind/plugin/plugintest/nodetest"
)

// TestFit: if a table is too wide, its texts are cut. If that is not enough, its optional columns
// are left out, the last one first. All other columns remain, however narrow the terminal is.
func TestFit(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name  string
		width int
		want  string
	}{
		{"wide enough", 38, "NAME  OPTIONAL  MORE       TEXT\nkey   some      also some  a long text"},
		{"the widest cells are cut", 36, "NAME  OPTIONAL  MORE       TEXT\nkey   some      also some  a long t…"},
		{"the last optional column goes", 28, "NAME  OPTIONAL  TEXT\nkey   some      a long text"},
		{"and the next", 17, "NAME  TEXT\nkey   a long text"},
		{"and cells are cut again", 15, "NAME  TEXT\nkey   a long t…"},
		{"names stay", 4, "NAME  TEXT\nkey   a lon…"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			table := NewTable(Column{Name: "NAME"}, Column{Name: "OPTIONAL", Optional: true},
				Column{Name: "MORE", Optional: true}, Column{Name: "TEXT", Least: 6})
			table.Add("NAME", "OPTIONAL", "MORE", "TEXT")
			table.Add("key", "some", "also some", "a long text")
			table.fit(tt.width)
			var lines []string
			widths, total := table.widths()
			for _, row := range table.rows {
				line := ""
				for i, cell := range row {
					line += cell + strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell)+gap)
				}
				lines = append(lines, strings.TrimRight(line, " "))
			}
			if got := strings.Join(lines, "\n"); got != tt.want {
				t.Errorf("got\n%s\nwant\n%s", got, tt.want)
			}
			if total > tt.width && tt.name != "names stay" {
				t.Errorf("%d characters in %d", total, tt.width)
			}
		})
	}
}

// TestFitEmpty: a column without values is removed first.
func TestFitEmpty(t *testing.T) {
	t.Parallel()
	table := NewTable(Column{Name: "NAME"}, Column{Name: "POD", Least: 3}, Column{Name: "TEXT", Least: 6})
	table.Add("NAME", "POD", "TEXT")
	table.Add("key", "-", "a long text")
	table.fit(17)
	if got := strings.Join(table.rows[1], "  "); got != "key  a long text" || table.isCut {
		t.Errorf("the table is cut to %q", got)
	}
}

// TestFitFairly: of two texts, the one that exceeds its minimum width by more is cut first.
func TestFitFairly(t *testing.T) {
	t.Parallel()
	table := NewTable(Column{Name: "POD", Least: 10}, Column{Name: "REASON", Least: 4})
	table.Add("a-pod-with-a-name", "a reason as long.")
	for _, tt := range []struct {
		width int
		want  string
	}{{30, "a-pod-with-a-name|a reason a…"}, {22, "a-pod-with-a…|a reas…"}, {1, "a-pod-wit…|a r…"}} {
		if table.fit(tt.width); strings.Join(table.rows[0], "|") != tt.want {
			t.Errorf("%d: %q, want %s", tt.width, table.rows[0], tt.want)
		}
	}
}

// TestWrap: a text that must not be cut continues on the next lines. It is broken between words.
// Only a word that is wider than the column is broken itself.
func TestWrap(t *testing.T) {
	t.Parallel()
	table := NewTable(Column{}, Column{}, Column{Least: 8, Wrap: true})
	table.Add("error", "long", "one two three a-long-word")
	table.Add("ok", "", "four")
	table.fit(21)
	var lines []string
	for _, row := range table.rows {
		lines = append(lines, strings.Join(row, "|"))
	}
	want := "error|long|one two\n||three\n||a-long-w\n||ord\nok||four"
	if got := strings.Join(lines, "\n"); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// TestWrapText: a line is broken only between words. It continues at its indent or, if it has a
// second column, below that column. Color codes have no width.
func TestWrapText(t *testing.T) {
	t.Parallel()
	const red, plain = "\x1b[31m", "\x1b[0m"
	for _, tt := range []struct{ text, want string }{
		{"short\n", "short\n"},
		{"no end of line, and too long", "no end of\nline, and too\nlong"},
		{"exactly twelve\nnext\n", "exactly twelve\nnext\n"},
		{"  indented lines go on\n", "  indented\n  lines go on\n"},
		{"off:  since then, by ann\n", "off:  since\n      then, by\n      ann\n"},
		{"/a/word/that/is/too/long for it\n", "/a/word/that/is/too/long\nfor it\n"},
		{"  x  /a/word/that/is/too/long\n", "  x\n     /a/word/that/is/too/long\n"},
		{red + "fourteen chars" + plain + "\n", red + "fourteen chars" + plain + "\n"},
		{red + "fifteen chars" + plain + " more\n", red + "fifteen chars" + plain + "\nmore\n"},
		{"\n\n", "\n\n"},
	} {
		if got := Wrap(tt.text, 14); got != tt.want {
			t.Errorf("%q: %q, want %q", tt.text, got, tt.want)
		}
	}
	if got := reflow("One\ntwo.\n\nThree:\n  four\n  five\nsix\n"); got != "One two.\n\nThree:\n  four\n  five\nsix\n" {
		t.Errorf("%q", got)
	}
}

// TestPrintObject: the JSON output decodes to the same values, and contains no characters that
// control a terminal.
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
