package inspect

import (
	"slices"
	"strings"
	"testing"
)

// TestCells: a bar has a cell for each address, or its part of them. What there is, is seen, also beside many.
func TestCells(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		counts []int
		size   int64
		width  int
		want   []int
	}{
		{[]int{1, 0, 1}, 13, 50, []int{1, 0, 1, 11}},
		{[]int{0, 0, 13}, 13, 50, []int{0, 0, 13, 0}},
		{[]int{0, 0, 0}, 13, 50, []int{0, 0, 0, 13}},
		{[]int{1, 0, 1}, 253, 50, []int{1, 0, 1, 48}},
		{[]int{200, 1, 1}, 253, 50, []int{39, 1, 1, 9}},
		{[]int{252, 0, 0}, 253, 50, []int{49, 0, 0, 1}},
		{[]int{15, 0, 0}, 13, 50, []int{13, 0, 0, 0}}, // more files than addresses
		{[]int{1, 1, 1}, 253, 2, []int{1, 1, 0, 0}},
		{[]int{3, 0, 0}, 1 << 52, 50, []int{1, 0, 0, 49}},
	} {
		got := cellsOf(slices.Clone(tt.counts), tt.size, tt.width)
		if !slices.Equal(got, tt.want) {
			t.Errorf("%v of %d in %d: %v, want %v", tt.counts, tt.size, tt.width, got, tt.want)
		}
	}
}

// TestBar: what is piped has a bar too.
func TestBar(t *testing.T) {
	size := int64(13)
	s := &Set{Size: &size, Counts: Counts{Used: 4, Live: 1, Leaked: 3}}
	if got := s.bar(&strings.Builder{}); got != "  ████░░░░░░░░░  30 %\n" {
		t.Errorf("%q", got)
	}
	if got := (&Set{Counts: s.Counts}).bar(&strings.Builder{}); got != "" {
		t.Errorf("without a size: %q", got)
	}
}
