package inspect

import (
	"fmt"
	"io"
	"math/big"
	"net/netip"
	"slices"
	"strings"

	"cni-unwind/cmd/unwindctl/internal/pools"
)

// A pool's map shows one character for each address. If the pool is too large for that, each
// character stands for a run of addresses, and shows the state in it that comes first in Signs.
const (
	mapWidth = 64 // halved on a narrow terminal
	mapRows  = 8
	mapLeft  = 19      // the width of a row's first address, with blanks
	mapMost  = 1 << 24 // the size of the largest range that gets a map
)

type sign struct{ State, sign, colour string }

// Signs are the states of addresses with their characters in the map, the most important first.
var Signs = []sign{
	{"empty", "!", "35"},
	{"leaked", "x", "31"},
	{"unknown", "?", "33"},
	{"recent", "+", "36"},
	{"live", "o", "32"},
	{"free", "·", "2"},
	{"gateway", "g", "2"},
}

const (
	free    = 5 // indexes in Signs
	gateway = 6
)

// drawMap prints a map of each range that is not too large, with the states of its addresses, and a
// legend.
func drawMap(out io.Writer, sets []pools.Set, state map[netip.Addr]string, colours bool,
	terminal int) {
	width := mapWidth
	if terminal > 0 && terminal < mapLeft+mapWidth {
		width /= 2
	}
	paint := func(i int) string {
		if !colours {
			return Signs[i].sign
		}
		return "\x1b[" + Signs[i].colour + "m" + Signs[i].sign + "\x1b[0m"
	}
	drawn := false
	for _, r := range slices.Concat(sets...) {
		if r.Size() <= mapMost {
			drawn = true
			drawRange(out, r, state, paint, width)
		}
	}
	var legend []string
	for i, s := range Signs {
		legend = append(legend, paint(i)+" "+s.State)
	}
	if drawn {
		fmt.Fprintf(out, "  %s\n", strings.Join(legend, "  "))
	}
}

// drawRange prints a range as rows of signs, each row with its first address.
func drawRange(out io.Writer, r pools.Range, state map[netip.Addr]string, paint func(int) string,
	width int) {
	number := func(a netip.Addr) *big.Int { return new(big.Int).SetBytes(a.AsSlice()) }
	first := number(r.First)
	offset := func(a netip.Addr) int { return int(new(big.Int).Sub(number(a), first).Int64()) }
	shift := 0 // each character stands for 1<<shift addresses
	for offset(r.Last)>>shift >= width*mapRows {
		shift++
	}
	best := slices.Repeat([]int{free}, offset(r.Last)>>shift+1)
	if shift > 0 {
		fmt.Fprintf(out, "  each character stands for %d addresses\n", 1<<shift)
	} else if r.Contains(r.Gateway) {
		best[offset(r.Gateway)] = gateway
	}
	for a, s := range state {
		if r.Contains(a) {
			cell := offset(a) >> shift
			best[cell] = min(best[cell],
				slices.IndexFunc(Signs, func(is sign) bool { return is.State == s }))
		}
	}
	for row := 0; row < len(best); row += width {
		var line strings.Builder
		for _, sign := range best[row:min(len(best), row+width)] {
			line.WriteString(paint(sign))
		}
		at := big.NewInt(int64(row << shift))
		address, _ := netip.AddrFromSlice(at.Add(at, first).FillBytes(r.First.AsSlice()))
		fmt.Fprintf(out, "  %-16s %s\n", address, line.String())
	}
}
