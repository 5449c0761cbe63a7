package inspect

import (
	"net/netip"
	"strings"
	"testing"
	"unicode/utf8"

	"cni-unwind/cmd/unwindctl/internal/pools"
)

// TestNotDrawn: a range that is too large has no map.
func TestNotDrawn(t *testing.T) {
	large := pools.Range{First: netip.MustParseAddr("fd00::1"), Last: netip.MustParseAddr("fd00::ffff:ffff:ffff:ffff")}
	var out strings.Builder
	if drawMap(&out, []pools.Set{{large}}, nil, false, 80); out.Len() > 0 {
		t.Errorf("%s", &out)
	}
}

// TestDraw has pools of every size: one sign an address, or, where they are too many for a screen,
// one for a run of them, of which the sign that matters most is shown.
func TestDraw(t *testing.T) {
	for _, tt := range []struct {
		name                 string
		first, last, gateway string
		states               map[string]string
		want                 []string
		lines                int
	}{
		{"a /29", "10.1.0.1", "10.1.0.6", "10.1.0.1", map[string]string{"10.1.0.2": "live", "10.1.0.4": "leaked", "10.2.0.3": "leaked"},
			[]string{"  10.1.0.1         go·x··"}, 2},
		{"a gateway outside", "10.1.0.2", "10.1.0.4", "10.1.0.1", map[string]string{"10.1.0.3": "empty", "10.1.0.4": "unknown"},
			[]string{"  10.1.0.2         ·!?"}, 2},
		{"a /24", "10.1.0.1", "10.1.0.254", "10.1.0.1", map[string]string{"10.1.0.254": "live"},
			[]string{"  10.1.0.1         g" + strings.Repeat("·", 63), "  10.1.0.193       " + strings.Repeat("·", 61) + "o"}, 5},
		{"a /16", "10.1.0.1", "10.1.255.254", "10.1.0.1", map[string]string{"10.1.0.2": "live", "10.1.0.3": "leaked", "10.1.255.254": "live"},
			[]string{"  each character stands for 128 addresses", "  10.1.0.1         x" + strings.Repeat("·", 63), "  10.1.224.1       " + strings.Repeat("·", 63) + "o"}, 10},
		{"a /120 of IPv6", "fd00::1", "fd00::ff", "fd00::1", map[string]string{"fd00::2": "leaked", "10.1.0.3": "live"},
			[]string{"  fd00::1          gx" + strings.Repeat("·", 62)}, 5},
	} {
		t.Run(tt.name, func(t *testing.T) {
			set := pools.Set{{First: netip.MustParseAddr(tt.first), Last: netip.MustParseAddr(tt.last), Gateway: netip.MustParseAddr(tt.gateway)}}
			states := map[netip.Addr]string{}
			for a, s := range tt.states {
				states[netip.MustParseAddr(a)] = s
			}
			var plain, coloured strings.Builder
			drawMap(&plain, []pools.Set{set}, states, false, 0)
			drawMap(&coloured, []pools.Set{set}, states, true, 83)
			for _, line := range append(tt.want, "  ! empty  x leaked  ? unknown  + recent  o live  · free  g gateway") {
				if !strings.Contains(plain.String(), line+"\n") {
					t.Errorf("no line %q in\n%s", line, &plain)
				}
			}
			if n := strings.Count(plain.String(), "\n"); n != tt.lines {
				t.Errorf("%d lines, want %d:\n%s", n, tt.lines, &plain)
			}
			if strings.Contains(plain.String(), "\x1b") || !strings.Contains(coloured.String(), "\x1b[31mx\x1b[0m") {
				t.Errorf("colours:\n%q\n%q", &plain, &coloured)
			}
			var narrow strings.Builder
			drawMap(&narrow, []pools.Set{set}, states, false, 80)
			for line := range strings.Lines(narrow.String()) {
				if n := utf8.RuneCountInString(line); n > 80 {
					t.Errorf("%d characters on 80 columns:\n%s", n, line)
				}
			}
		})
	}
}
