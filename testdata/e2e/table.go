package e2e

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
)

// Table collects the results of tests, which may run in parallel, and logs them sorted when the test that made it ends.
type Table struct {
	mu     sync.Mutex
	header string
	rows   []string
}

// NewTable makes a table with these columns.
func NewTable(t testing.TB, title string, columns ...string) *Table {
	table := &Table{header: strings.Join(columns, "\t")}
	t.Cleanup(func() { t.Logf("%s\n%s", title, table) })
	return table
}

// Row adds one.
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
	for _, row := range slices.Sorted(slices.Values(t.rows)) {
		fmt.Fprintln(w, row)
	}
	_ = w.Flush()
	return out.String()
}
