package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
)

// view describes how a command queries the nodes and shows their answers.
type view struct {
	unwindctl []string                      // the command on the node, without the user's arguments
	flags     handedOn                      // the flags that are passed on to it
	key       string                        // of the list that it prints; "" if it prints an item
	whole     bool                          // the report is the whole object, not only the list
	report    func() report                 // returns an empty report; nil for items
	fine      func(code int, r report) bool // reports whether this exit code is a success
	words     []string                      // the counts of the summary, in order
	none      string                        // printed for a node without rows
	quiet     bool                          // leave out nodes without rows
	needed    bool                          // it is an error if no node has rows
	columns   []string                      // after the node's name
	wide      []string                      // the columns of -o wide; nil for the same
	// first is the name of the last column in a table with one row for each node, or "" if the
	// command has no such table. A row shows the node's counts, and in this column its first problem.
	first string
	exits bool // the first column of that table is unwindctl's exit code

	atOnce  int           // the number of nodes to query in parallel; 0: mostAtOnce
	timeout time.Duration // for each node, unless --timeout is set; 0: the default of --timeout
}

type report interface {
	count() map[string]int // keyed by the view's words
	rows(v *view, wide bool) []row
}

// row is a row of a table, without the node's name. A row with a larger weight comes first.
type row struct {
	weight float64
	cells  []string
}

func (v *view) command(o *options, cmd *cobra.Command) *cobra.Command {
	v.flags.addTo(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ctx, out := cmd.Context(), cmd.OutOrStdout()
		agents, err := findAgents(ctx, o, cmd.ErrOrStderr())
		var answers []answer
		if err == nil {
			asked := slices.Concat(v.unwindctl, v.flags.of(cmd.Flags()), args)
			answers = askAll(ctx, o, v, asked, agents, cmd.ErrOrStderr())
		}
		switch {
		case ctx.Err() != nil:
			return errors.New("interrupted")
		case err != nil:
			return err
		case o.output.IsObject():
			err = o.output.PrintObject(out, "nodes", answers, "build", version)
		default:
			err = v.print(out, answers, &o.output)
		}
		return errors.Join(err, v.outcome(answers))
	}
	return cmd
}

func (v *view) outcome(answers []answer) error {
	worst, failed, found := 0, 0, 0
	for _, a := range answers {
		if a.Error != "" {
			failed++
		}
		if a.report != nil {
			found += len(a.report.count())
		}
		if d, is := a.report.(*diagnosis); is {
			worst = max(worst, d.worst())
		}
	}
	text := ""
	if failed > 0 {
		text = fmt.Sprintf("no complete results from %d of %s", failed, nodes(len(answers)))
	}
	switch code := 2 + worst; {
	case code == exitFailure:
		return term.Coded{Code: code, Text: text}
	case failed > 0:
		return errors.New(text)
	case v.needed && found == 0:
		return fmt.Errorf("%s on %s", v.none, nodes(len(answers)))
	case worst > 0:
		return term.Coded{Code: code}
	}
	return nil
}

func (v *view) names(wide bool) []string {
	names := v.columns
	switch {
	case wide && v.wide != nil:
		return v.wide
	case v.exits:
		names = []string{"EXIT"}
	}
	if v.first == "" {
		return names
	}
	for _, word := range v.words {
		names = append(names, strings.ToUpper(word))
	}
	return append(names, v.first)
}

// least is the width to which a text may be cut on a terminal. -o wide shows the full text.
const least = 12

func (v *view) print(out io.Writer, answers []answer, o *term.Output) error {
	wide := o.Format == term.Wide
	names := v.names(wide)
	columns := []term.Column{{Name: "NODE"}}
	for _, name := range names {
		c := term.Column{Name: name, Least: max(least, len(name))}
		switch name {
		case "WORST", "SEVERITY":
			c.Severity = true
		case "VERSION":
			c.Most, c.Optional = least, true
		case "ERRORS", "WARNINGS":
			c.Optional = true
		case "BUSY", "RECENT", "LIVE":
			c.Optional = v.exits
		}
		columns = append(columns, c)
	}
	if v.exits { // prefer a longer reason to the optional columns
		columns[len(names)].Least = 2 * least
	}
	var rows []row
	for i := range answers {
		rows = append(rows, v.rows(&answers[i], len(names), wide)...)
	}
	slices.SortStableFunc(rows, func(a, b row) int { return cmp.Compare(b.weight, a.weight) })
	t := term.NewTable(columns...)
	for _, r := range rows {
		for i := range r.cells {
			r.cells[i] = term.Printable(r.cells[i])
		}
		t.Add(r.cells...)
	}
	err := t.Print(out, o)
	if err == nil && !o.NoHeaders {
		_, err = fmt.Fprintln(out, v.summary(answers))
	}
	return err
}

// rows returns the rows of a node: at least one, unless the view is quiet.
func (v *view) rows(a *answer, columns int, wide bool) (rows []row) {
	special := func(weight float64, first, last string) {
		cells := slices.Repeat([]string{"-"}, columns)
		cells[0], cells[columns-1] = first, last
		rows = append(rows, row{weight, cells})
	}
	switch {
	case a.report == nil:
		special(math.Inf(1), "unreachable", a.Error)
	case a.Error != "" && (wide || !v.exits):
		special(math.MaxFloat64, "partial", a.Error)
	}
	if a.report != nil {
		for _, r := range a.report.rows(v, wide) {
			if v.exits && !wide {
				r.cells = slices.Insert(r.cells, 0, strconv.Itoa(a.ExitCode))
				if r.cells[columns-1] == "-" {
					r.cells[columns-1] = term.OrDash(a.Error)
				}
			}
			rows = append(rows, r)
		}
	}
	if len(rows) == 0 && !v.quiet {
		special(0, "-", v.none)
	}
	for i := range rows {
		rows[i].cells = slices.Insert(rows[i].cells, 0, a.Node)
	}
	return rows
}

func (v *view) summary(answers []answer) string {
	total := map[string]int{}
	for _, a := range answers {
		if a.report == nil {
			total["unreachable"]++
			continue
		}
		if a.Error != "" {
			total["partial"]++
		}
		for word, n := range a.report.count() {
			total[word] += n
		}
	}
	var counts []string
	for _, word := range append(slices.Clone(v.words), "partial", "unreachable") {
		if total[word] > 0 {
			counts = append(counts, fmt.Sprintf("%d %s", total[word], word))
		}
	}
	return nodes(len(answers)) + ": " + cmp.Or(strings.Join(counts, ", "), v.none) + "."
}

func nodes(n int) string { return term.Plural(n, "node", "nodes") }
