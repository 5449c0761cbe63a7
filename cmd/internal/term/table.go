package term

import (
	"io"
	"slices"
	"strings"
)

type Column struct {
	Name     string
	Least    int  // cells may be cut to this many characters; 0: they are never cut
	Wrap     bool // cells are not cut, but continue on the next line
	Optional bool // the column may be left out on a narrow terminal
	Wide     bool // the column appears only in the format Wide
}

// Table is a table of single-line texts. If it is wider than the terminal and the format is not
// Wide, Print first leaves out columns without a value. Then it narrows columns, always the one
// that exceeds its Least by the most, and marks cut cells with "…". If that is not enough, it
// leaves out optional columns, the last one first. A line below the table says that it is cut.
type Table struct {
	columns []Column
	rows    [][]string
	isCut   bool
}

func NewTable(columns ...Column) *Table { return &Table{columns: columns} }

// Add adds a row, with one cell for each column.
func (t *Table) Add(cells ...string) { t.rows = append(t.rows, cells) }

// gap is the number of blanks between two columns.
const gap = 2

// Print prints the table. It prints no header if no column has a name.
func (t *Table) Print(out io.Writer, o *Output) error {
	var names []string
	for _, c := range t.columns {
		names = append(names, c.Name)
	}
	if strings.Join(names, "") != "" {
		t.rows = slices.Insert(t.rows, 0, names)
	}
	if o.Format != Wide {
		t.leaveOut(func(c Column) bool { return c.Wide })
		if width := Width(out); width > 0 {
			t.fit(width)
		}
	}
	widths, _ := t.widths()
	var text strings.Builder
	for _, row := range t.rows {
		for i, cell := range row {
			if i > 0 {
				text.WriteString(strings.Repeat(" ", gap+widths[i-1]-columns(row[i-1])))
			}
			text.WriteString(cell)
		}
		text.WriteByte('\n')
	}
	if t.isCut {
		text.WriteString("The table is cut to fit the terminal; -o wide shows all columns in full.\n")
	}
	_, err := io.WriteString(out, text.String())
	return err
}

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

// fit cuts cells and leaves out columns until the table fits the width or cannot shrink further.
func (t *Table) fit(width int) {
	if _, total := t.widths(); total > width {
		t.leaveOut(func(c Column) bool { return t.isEmpty(c.Name) })
	}
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
		t.isCut = true
	}
}

// isEmpty reports whether a column has a name, but no value in any row.
func (t *Table) isEmpty(name string) bool {
	if name == "" || len(t.rows) < 2 {
		return false
	}
	at := slices.IndexFunc(t.columns, func(c Column) bool { return c.Name == name })
	return !slices.ContainsFunc(t.rows[1:], func(row []string) bool { return row[at] != "-" })
}

func (t *Table) widths() (widths []int, total int) {
	widths, total = make([]int, len(t.columns)), gap*(len(t.columns)-1)
	for i := range t.columns {
		for _, row := range t.rows {
			widths[i] = max(widths[i], columns(row[i]))
		}
		total += widths[i]
	}
	return widths, total
}

// cut cuts or wraps the cells that are wider than their columns.
func (t *Table) cut(widths []int) {
	for r := 0; r < len(t.rows); r++ {
		row, rest := t.rows[r], make([]string, len(widths))
		for i, cell := range row {
			if columns(cell) <= widths[i] {
				continue
			}
			if !t.columns[i].Wrap {
				row[i], t.isCut = string([]rune(cell)[:widths[i]-1])+"…", true
				continue
			}
			if row[i], rest[i] = split(cell, widths[i]); columns(row[i]) > widths[i] {
				text := []rune(cell) // the cell's first word is wider than the column
				row[i], rest[i] = string(text[:widths[i]]), string(text[widths[i]:])
			}
		}
		if strings.Join(rest, "") != "" {
			t.rows = slices.Insert(t.rows, r+1, rest)
		}
	}
}
