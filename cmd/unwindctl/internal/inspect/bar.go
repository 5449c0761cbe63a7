package inspect

import (
	"fmt"
	"io"
	"strings"

	"cni-unwind/cmd/internal/term"
)

// barStates are the states of addresses, in the order of a bar.
var barStates = []string{"live", "recent", "leaked", "empty", "unknown"}

// percent returns how full a set is, or -1 if its size is unknown or has no limit.
func (s *Set) percent() int64 {
	if s.Size == nil || *s.Size <= 0 {
		return -1
	}
	return min(100, int64(s.Used)*100 / *s.Size)
}

// maxBar is the width of a bar, in columns. A set with fewer addresses has a shorter bar.
const maxBar = 50

// bar returns a line that shows how full a set is, or "" if its size is unknown or has no limit.
// The line fits a terminal.
func (s *Set) bar(out io.Writer) string {
	if s.percent() < 0 {
		return ""
	}
	const around = len("  ") + len("  100 %")
	width := maxBar
	if columns := term.Width(out); columns > 0 {
		width = max(1, min(width, columns-around))
	}
	var counts []int
	for _, state := range barStates {
		counts = append(counts, *s.ByState()[state])
	}
	var text strings.Builder
	cells := cellsOf(counts, *s.Size, width)
	for i, state := range barStates {
		text.WriteString(term.Colour(out, state, strings.Repeat("█", cells[i])))
	}
	text.WriteString(strings.Repeat("░", cells[len(barStates)]))
	return fmt.Sprintf("  %s  %d %%\n", &text, s.percent())
}

// cellsOf divides a bar among the counts and, last, what is left of size. Each that is not 0 gets a
// cell, as far as there are enough.
func cellsOf(counts []int, size int64, width int) (cells []int) {
	width = int(min(int64(width), size))
	used := int64(0)
	for _, n := range counts {
		used += int64(n)
	}
	left := width
	for _, n := range append(counts, int(max(0, size-used))) {
		share := int(int64(n) * int64(width) / max(size, used))
		if n > 0 {
			share = max(1, share)
		}
		cells = append(cells, min(share, left))
		left -= min(share, left)
	}
	most := 0 // it gets the rest
	for i := range cells {
		if cells[i] > cells[most] {
			most = i
		}
	}
	cells[most] += left
	return cells
}
