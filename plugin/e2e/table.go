package e2e

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
)

// Table collects rows from tests, which may run in parallel. When the test that created the table
// ends, the table is logged, with sorted rows.
type Table struct {
	mu     sync.Mutex
	header string
	rows   []string
	steps  bool
}

// NewTable creates a table with these columns.
func NewTable(t testing.TB, title string, columns ...string) *Table {
	table := &Table{header: strings.Join(columns, "\t")}
	t.Cleanup(func() { t.Logf("%s\n%s", title, table) })
	return table
}

// NewSteps creates a table of steps. Its rows stay in the order of the calls of Row.
func NewSteps(t testing.TB, title string, columns ...string) *Table {
	table := NewTable(t, title, columns...)
	table.steps = true
	return table
}

// ChainOf returns the name that tables use for a chain with or without unwind.
func ChainOf(unwind bool) string { return map[bool]string{false: "plain", true: "unwind"}[unwind] }

func (t *Table) Row(cells ...any) {
	texts := make([]string, len(cells))
	for i, cell := range cells {
		texts[i] = fmt.Sprint(cell)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.rows = append(t.rows, strings.Join(texts, "\t"))
}

func (t *Table) String() string {
	var out strings.Builder
	w := tabwriter.NewWriter(&out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, t.header)
	rows := slices.Clone(t.rows)
	if !t.steps {
		slices.Sort(rows)
	}
	for _, row := range rows {
		fmt.Fprintln(w, row)
	}
	_ = w.Flush()
	return out.String()
}
