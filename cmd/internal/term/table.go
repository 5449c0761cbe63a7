package term

import (
	"io"
	"slices"
	"strings"
	"unicode/utf8"
)

// Column is a column of a Table.
type Column struct {
	Name     string
	Least    int  // its cells may be cut to this many characters; 0: never
	Optional bool // it may be left out
	Wide     bool // it is only in the format Wide

	Severity bool // its cells are severities, in colours on a terminal
}

// Table is a table of texts of one line. On a terminal in the format Plain it fits the width, as
// far as its columns may be cut or left out: first those that are furthest above their least are
// cut, and end with "…"; if that is not enough, the last optional column is left out.
type Table struct {
	columns []Column
	rows    [][]string
}

// NewTable returns a table with no rows.
func NewTable(columns ...Column) *Table { return &Table{columns: columns} }

// Add adds a row. It has a cell for each column.
func (t *Table) Add(cells ...string) { t.rows = append(t.rows, cells) }

// colours are those of the severities, as the terminal has them (ECMA-48 SGR).
var colours = map[string]string{"error": "31", "warning": "33", "ok": "32"}

// gap is the number of blanks between two columns.
const gap = 2

// Print prints the table, and no names of columns if no column has one.
func (t *Table) Print(out io.Writer, o *Output) error {
	var names []string
	for _, c := range t.columns {
		names = append(names, c.Name)
	}
	if !o.NoHeaders && strings.Join(names, "") != "" {
		t.rows = slices.Insert(t.rows, 0, names)
	}
	if o.Format != Wide {
		t.leaveOut(func(c Column) bool { return c.Wide })
		if width := Width(out); width > 0 {
			t.fit(width)
		}
	}
	widths, _ := t.widths()
	coloured, _ := OnTerminal(out)
	var text strings.Builder
	for _, row := range t.rows {
		for i, cell := range row {
			if i > 0 {
				text.WriteString(strings.Repeat(" ", gap+widths[i-1]-utf8.RuneCountInString(row[i-1])))
			}
			if colour := colours[cell]; coloured && t.columns[i].Severity && colour != "" {
				cell = "\x1b[" + colour + "m" + cell + "\x1b[0m"
			}
			text.WriteString(cell)
		}
		text.WriteByte('\n')
	}
	_, err := io.WriteString(out, text.String())
	return err
}

// leaveOut leaves out the columns that are unwanted.
func (t *Table) leaveOut(unwanted func(Column) bool) {
	for i := len(t.columns) - 1; i >= 0; i-- {
		if !unwanted(t.columns[i]) {
			continue
		}
		t.columns = slices.Delete(t.columns, i, i+1)
		for r := range t.rows {
			t.rows[r] = slices.Delete(t.rows[r], i, i+1)
		}
	}
}

// fit cuts cells and leaves out columns until the table has this width, or nothing is left to do.
func (t *Table) fit(width int) {
	for {
		widths, total := t.widths()
		for total > width {
			most, at := 0, -1
			for i, c := range t.columns {
				if more := widths[i] - c.Least; c.Least > 0 && more > most {
					most, at = more, i
				}
			}
			if at < 0 {
				break
			}
			widths[at]--
			total--
		}
		last := ""
		for _, c := range t.columns {
			if c.Optional {
				last = c.Name
			}
		}
		if total <= width || last == "" {
			t.cut(widths)
			return
		}
		t.leaveOut(func(c Column) bool { return c.Name == last })
	}
}

// widths returns the widths of the columns, and that of the table.
func (t *Table) widths() (widths []int, total int) {
	widths, total = make([]int, len(t.columns)), gap*(len(t.columns)-1)
	for i := range t.columns {
		for _, row := range t.rows {
			widths[i] = max(widths[i], utf8.RuneCountInString(row[i]))
		}
		total += widths[i]
	}
	return widths, total
}

func (t *Table) cut(widths []int) {
	for _, row := range t.rows {
		for i, cell := range row {
			if text := []rune(cell); len(text) > widths[i] {
				row[i] = string(text[:widths[i]-1]) + "…"
			}
		}
	}
}
