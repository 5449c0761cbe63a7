package inspect

import (
	"fmt"
	"io"
	"math/big"
	"net/netip"
	"slices"
	"strings"

	"cni-unwind/ipam"
)

// The map of a pool has one sign for an address, or for a run of addresses where a screen has no
// room for all. A run shows the sign that matters most.
const (
	mapWidth = 64 // half of it on a terminal that is too narrow
	mapRows  = 8
	mapLeft  = 19 // the first address of a row, with blanks
)

// signs are those of the map, the one that matters most first.
var signs = []struct {
	state, sign, colour string
}{
	{"ownerless", "!", "35"},
	{"leaked", "x", "31"},
	{"unknown", "?", "33"},
	{"live", "o", "32"},
	{"free", "·", "2"},
	{"gateway", "g", "2"},
}

// drawMap prints the map of each range, with the states of its addresses, and a legend.
func drawMap(out io.Writer, sets []ipam.Set, state map[netip.Addr]string, colours bool,
	terminal int) {
	width := int64(mapWidth)
	if terminal > 0 && terminal < mapLeft+mapWidth {
		width /= 2
	}
	paint := func(i int) string {
		if !colours {
			return signs[i].sign
		}
		return "\x1b[" + signs[i].colour + "m" + signs[i].sign + "\x1b[0m"
	}
	for _, set := range sets {
		for _, r := range set {
			drawRange(out, r, state, paint, width)
		}
	}
	var legend []string
	for i, s := range signs {
		legend = append(legend, paint(i)+" "+s.state)
	}
	fmt.Fprintf(out, "  %s\n", strings.Join(legend, "  "))
}

// drawRange prints a range as rows of signs, each row with its first address.
func drawRange(out io.Writer, r ipam.Range, state map[netip.Addr]string, paint func(int) string,
	width int64) {
	first := number(r.First)
	span := new(big.Int).Sub(number(r.Last), first)
	shift := uint(0) // each character stands for 1<<shift addresses
	for new(big.Int).Rsh(span, shift).Cmp(big.NewInt(width*mapRows)) >= 0 {
		shift++
	}
	cells := new(big.Int).Rsh(span, shift).Int64() + 1
	best := slices.Repeat([]int{4}, int(cells))
	mark := func(a netip.Addr, sign int) {
		at := new(big.Int).Sub(number(a), first)
		if at.Sign() < 0 || at.Cmp(span) > 0 {
			return
		}
		cell := at.Rsh(at, shift).Int64()
		if sign < best[cell] || best[cell] == 4 && shift == 0 {
			best[cell] = sign
		}
	}
	if r.Gateway.BitLen() == r.First.BitLen() {
		mark(r.Gateway, 5)
	}
	for a, s := range state {
		for i := range signs {
			if signs[i].state == s && a.BitLen() == r.First.BitLen() {
				mark(a, i)
			}
		}
	}
	if shift > 0 {
		each := new(big.Int).Lsh(big.NewInt(1), shift)
		fmt.Fprintf(out, "  each character stands for %d addresses\n", each)
	}
	for row := int64(0); row < cells; row += width {
		var line strings.Builder
		for _, sign := range best[row:min(cells, row+width)] {
			line.WriteString(paint(sign))
		}
		at := new(big.Int).Lsh(big.NewInt(row), shift)
		address, _ := netip.AddrFromSlice(at.Add(at, first).FillBytes(r.First.AsSlice()))
		fmt.Fprintf(out, "  %-16s %s\n", address, line.String())
	}
}

func number(a netip.Addr) *big.Int { return new(big.Int).SetBytes(a.AsSlice()) }
