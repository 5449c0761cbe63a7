package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"unicode"
	"unicode/utf16"

	"github.com/spf13/cobra"
)

// view is how a command asks a node, and shows the answers of all.
type view struct {
	unwindctl []string // the command on the node
	codes     []int    // it ends with one of these also if all went well
	key       string   // of the list in the object that it prints
	whole     bool     // the report is the object, not the list
	report    func() report
	words     []string // of the counts, as the summary has them
	none      string   // said of a node that has nothing to show
	columns   []string // after the node's name; the last has sentences
	wide      []string // the same, with -o wide
}

// report is a node's answer.
type report interface {
	count() map[string]int // by the words of the view
	rows(wide bool) []row
}

// row is a row of a table, without the node's name. One that weighs more comes first.
type row struct {
	weight float64
	cells  []string
}

// command returns a command that asks all nodes.
func (v *view) command(o *options, cmd *cobra.Command) *cobra.Command {
	cmd.Args = noArgs
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		agents, err := findAgents(cmd.Context(), o, cmd.ErrOrStderr())
		if err != nil {
			return err
		}
		answers := askAll(cmd.Context(), o, v, agents, cmd.ErrOrStderr())
		if err := cmd.Context().Err(); err != nil {
			return err
		}
		if o.format == "json" {
			err = printJSON(cmd.OutOrStdout(), answers)
		} else {
			err = v.print(cmd.OutOrStdout(), answers, o.format == "wide")
		}
		return errors.Join(err, outcome(answers))
	}
	return cmd
}

// outcome returns the error that the answers make together.
func outcome(answers []answer) error {
	worst, failed := 0, 0
	for _, a := range answers {
		if a.Error != "" {
			failed++
		}
		if d, is := a.report.(*diagnosis); is {
			worst = max(worst, d.worst())
		}
	}
	f := &failure{code: 2 + worst}
	if failed > 0 {
		f.text = fmt.Sprintf("%d of %s not reached, or answered in part", failed,
			nodes(len(answers)))
	}
	switch {
	case failed > 0 && f.code != exitFailure:
		f.code = exitError
	case worst == 0:
		return nil
	}
	return f
}

// print prints a table of the answers, and a line that sums them up.
func (v *view) print(out io.Writer, answers []answer, wide bool) error {
	columns := v.columns
	if wide {
		columns = v.wide
	}
	var rows []row
	for i := range answers {
		rows = append(rows, v.rows(&answers[i], len(columns), wide)...)
	}
	slices.SortStableFunc(rows, func(a, b row) int { return cmp.Compare(b.weight, a.weight) })
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "NODE\t"+strings.Join(columns, "\t"))
	for _, r := range rows {
		for i := range r.cells {
			r.cells[i] = printable(r.cells[i])
		}
		if last := len(r.cells) - 1; !wide {
			r.cells[last] = short(r.cells[last])
		}
		fmt.Fprintln(w, strings.Join(r.cells, "\t"))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintln(out, v.summary(answers))
	return err
}

// rows returns the rows of a node, of which there is at least one.
func (v *view) rows(a *answer, columns int, wide bool) (rows []row) {
	special := func(weight float64, first, last string) {
		cells := slices.Repeat([]string{"-"}, columns)
		cells[0], cells[columns-1] = first, last
		rows = append(rows, row{weight, cells})
	}
	switch {
	case a.report == nil:
		special(math.Inf(1), "not reached", a.Error)
	case a.Error != "":
		special(math.MaxFloat64, "in part", a.Error)
	}
	if a.report != nil {
		rows = append(rows, a.report.rows(wide)...)
	}
	if len(rows) == 0 {
		special(0, "-", v.none)
	}
	for i := range rows {
		rows[i].cells = slices.Insert(rows[i].cells, 0, a.Node)
	}
	return rows
}

// summary returns how much of each kind all nodes have.
func (v *view) summary(answers []answer) string {
	total := map[string]int{}
	for _, a := range answers {
		if a.report == nil {
			total["not reached"]++
			continue
		}
		if a.Error != "" {
			total["in part"]++
		}
		for word, n := range a.report.count() {
			total[word] += n
		}
	}
	var counts []string
	for _, word := range append(slices.Clone(v.words), "in part", "not reached") {
		if total[word] > 0 {
			counts = append(counts, fmt.Sprintf("%d %s", total[word], word))
		}
	}
	return nodes(len(answers)) + ": " + cmp.Or(strings.Join(counts, ", "), v.none) + "."
}

func nodes(n int) string {
	if n == 1 {
		return "1 node"
	}
	return fmt.Sprintf("%d nodes", n)
}

// short cuts a text. The whole of it is in -o wide.
func short(text string) string {
	const most = 100
	if runes := []rune(text); len(runes) > most {
		return string(runes[:most]) + "…"
	}
	return text
}

// printable returns a text, perhaps a node's, as one line that does nothing to a terminal.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, strings.Join(strings.Fields(text), " "))
}

// printJSON prints the answers. What does something to a terminal is escaped, as JSON may have it
// in its texts alone.
func printJSON(out io.Writer, answers []answer) error {
	data, err := json.MarshalIndent(
		map[string]any{"version": formatVersion, "nodes": answers}, "", "  ")
	if err != nil {
		return err
	}
	var text strings.Builder
	for _, r := range string(data) { // bytes that are not UTF-8 become U+FFFD
		if r == '\n' || unicode.IsPrint(r) {
			text.WriteRune(r)
			continue
		}
		for _, unit := range utf16.AppendRune(nil, r) {
			fmt.Fprintf(&text, `\u%04x`, unit)
		}
	}
	_, err = fmt.Fprintln(out, text.String())
	return err
}
