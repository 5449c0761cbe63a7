package inspect

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"

	"cni-unwind/ipam"
	"cni-unwind/ipam/ipamtest"
	"cni-unwind/plugin/plugintest/nodetest"
	"cni-unwind/plugin/plugintest/sandbox"
	"cni-unwind/plugin/sweep"
)

// TestCells: a bar has a cell for each address or, in a large pool, for several addresses. Even a
// state with few addresses gets a cell, if the bar is wide enough.
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

// TestBar: the bar is printed even if the output is not a terminal.
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

var check = nodetest.Check

type files = ipamtest.Files

type pool struct{ *ipamtest.Plugin }

// newHostLocal returns a pool that host-local has not created yet.
func newHostLocal(t *testing.T, ipam string) *pool {
	sandbox.Need(t)
	return &pool{ipamtest.New(t, ipam)}
}

func (h *pool) read(config string) (*Pool, error) {
	return readPool(sweep.Pool{Network: "podnet", Dir: h.Pool(), Config: json.RawMessage(config)}, &Report{})
}

// wantFull checks that the pool is reported as full if want is true, and otherwise as not full.
func (h *pool) wantFull(when string, want bool) {
	h.Helper()
	if p, err := h.read(h.Config); err != nil || p.Full != want {
		h.Errorf("%s: %+v, %v; want full: %t", when, p, err, want)
	}
}

// TestFull fills pools with host-local itself, one address at a time. A pool is reported as full
// exactly when host-local has no address left. Then the test releases one address and assigns it
// again.
func TestFull(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, ipam string
		seed       files // files that exist before the first ADD
		addresses  int   // the number of addresses that host-local assigns
	}{
		{"subnet", `"subnet": "10.1.0.0/29"`, nil, 5},
		{"the smallest", `"subnet": "10.1.0.0/30"`, nil, 1},
		{"the smallest, IPv6", `"subnet": "fd00::/126"`, nil, 2},
		{"IPv6", `"subnet": "fd00::/125"`, nil, 6},
		{"a part of an IPv6 /64", `"subnet": "fd00::/64", "rangeStart": "fd00::ffff:ffff", "rangeEnd": "fd00::1:0:2"`, nil, 4},
		{"gateway within", `"subnet": "10.1.0.0/29", "gateway": "10.1.0.4"`, nil, 5},
		{"gateway outside of the range", `"subnet": "10.1.0.0/29", "gateway": "10.1.0.0"`, nil, 6},
		{"gateway at the end", `"subnet": "10.1.0.0/29", "gateway": "10.1.0.6"`, nil, 5},
		{"gateway of all ones", `"subnet": "10.1.0.0/29", "gateway": "10.1.0.7"`, nil, 6},
		{"range", `"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.250", "rangeEnd": "10.1.0.252"`, nil, 3},
		{"range to the broadcast address", `"subnet": "10.1.0.0/29", "rangeStart": "10.1.0.5", "rangeEnd": "10.1.0.7"`, nil, 3},
		{"range with the gateway", `"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.1", "rangeEnd": "10.1.0.3"`, nil, 2},
		{"range that is the gateway", `"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.1", "rangeEnd": "10.1.0.1"`, nil, 0},
		{"a set of two", `"ranges": [[{"subnet": "10.1.0.0/30"}, {"subnet": "10.2.0.0/29", "rangeEnd": "10.2.0.3"}]]`, nil, 3},
		{"two sets", `"ranges": [[{"subnet": "10.1.0.0/29"}], [{"subnet": "fd00::/126"}]]`, nil, 2},
		{"two sets, the first smaller", `"ranges": [[{"subnet": "10.1.0.0/30"}], [{"subnet": "fd00::/64"}]]`, nil, 1},
		{"two sets, the second smaller", `"ranges": [[{"subnet": "fd00::/64"}], [{"subnet": "10.1.0.0/29"}]]`, nil, 5},
		{"three sets", `"ranges": [[{"subnet": "10.1.0.0/29"}], [{"subnet": "fd00::/64"}], [{"subnet": "10.2.0.0/30"}, {"subnet": "10.3.0.0/30"}]]`,
			nil, 2},
		{"two sets, the other's addresses taken", `"ranges": [[{"subnet": "10.1.0.0/29"}], [{"subnet": "fd00::/125"}]]`,
			files{"fd00::2": "z", "fd00::3": "z", "fd00::4": "z", "fd00::5": "z"}, 2},
		{"a range over half of the address", `"subnet": "fd00::/48", "rangeStart": "fd00::ffff:ffff:ffff:fffe", "rangeEnd": "fd00::1:0:0:0:1"`, nil, 4},
		{"subnet and ranges", `"subnet": "10.1.0.0/24", "ranges": [[{"subnet": "10.2.0.0/30"}]]`, nil, 1},
		{"another's", `"subnet": "10.1.0.0/29"`, files{"10.1.0.3": "z\r\neth0", "10.1.0.4": "z"}, 3},
		{"empty, a folder and a link", `"subnet": "10.1.0.0/29"`,
			files{"10.1.0.3": "", "10.1.0.4": "folder", "10.1.0.5": "link to nowhere"}, 2},
		{"files that take no address", `"subnet": "10.1.0.0/29"`, files{"10.1.0.1": "z", "10.1.0.7": "z", "10.1.0.0": "z",
			"10.1.0.9": "z", "fd00::2": "z", "010.1.0.2": "z", "10.1.0.3.old": "z", "::ffff:10.1.0.4": "z", "notes": "z"}, 5},
		{"files that take no address, IPv6", `"subnet": "fd00::/125"`, files{"fd00::0002": "z", "FD00::3": "z",
			"fd00:0::4": "z", "fd00::5%eth0": "z", "fd00::8": "z", "10.1.0.2": "z"}, 6},
		{"a last address of another range", `"subnet": "10.1.0.0/29"`, files{"last_reserved_ip.0": "10.9.0.1"}, 5},
		{"a last address in the middle", `"subnet": "10.1.0.0/29"`, files{"last_reserved_ip.0": "10.1.0.4"}, 5},
		{"a last address that is the gateway's", `"subnet": "10.1.0.0/29"`, files{"last_reserved_ip.0": "10.1.0.1"}, 5},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			h := newHostLocal(t, tt.ipam)
			h.wantFull("without a pool", tt.addresses == 0)
			if _, err := os.Lstat(h.Pool()); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("a pool was made (%v)", err)
			}
			check(t, os.Mkdir(h.Pool(), 0o755))
			tt.seed.Fill(t, h.Pool())
			h.untilFull(tt.addresses)
			if tt.addresses == 0 {
				return
			}
			freed := fmt.Sprint(tt.addresses / 2)
			_, err := ipam.Release(t.Context(), h.Pool(), ipam.Owner{ContainerID: freed, IfName: "eth0"})
			check(t, err)
			h.wantFull("one was released", false)
			if failed := h.Run("ADD", "again"); failed != "" {
				t.Errorf("ADD after one was released: %s", failed)
			}
			h.wantFull("it was given again", true)
		})
	}
}

// untilFull checks that host-local can assign exactly the given number of addresses.
func (h *pool) untilFull(addresses int) {
	h.Helper()
	for i := range addresses + 1 {
		h.wantFull(fmt.Sprintf("%d were given", i), i == addresses)
		failed := h.Run("ADD", fmt.Sprint(i))
		if (failed != "") != (i == addresses) || failed != "" && !strings.Contains(failed, "no IP addresses available") {
			h.Fatalf("host-local, asked for address %d of %d: %q", i+1, addresses, failed)
		}
	}
}

// TestNotFull: a large pool is not full just because many addresses are assigned. A pool of unknown
// size is not full either.
func TestNotFull(t *testing.T) {
	sandbox.Need(t)
	t.Parallel()
	many := files{}
	for i := range 300 {
		many[fmt.Sprintf("fd00::%x", i)] = "z\r\neth0"
	}
	for _, subnet := range []string{"fd00::/64", "fd00::/8", "::/0", "0.0.0.0/0"} {
		h := newHostLocal(t, fmt.Sprintf(`"subnet": %q`, subnet))
		check(t, os.Mkdir(h.Pool(), 0o755))
		many.Fill(t, h.Pool())
		h.wantFull(subnet, false)
	}
	h := newHostLocal(t, `"subnet": "10.1.0.0/30"`)
	for _, tt := range []struct{ name, config string }{
		{"an empty range", `{"ipam": {"type": "host-local", "ranges": [[]]}}`},
		{"no IPAM", `{"type": "bridge"}`},
		{"a subnet that is none", `{"ipam": {"type": "host-local", "subnet": "10.1.0.0"}}`},
		{"too small", `{"ipam": {"type": "host-local", "subnet": "10.1.0.0/31"}}`},
		{"no JSON", `{`},
	} {
		if p, err := h.read(tt.config); err == nil || p.Full {
			t.Errorf("%s: %+v, %v; want an error", tt.name, p, err)
		}
	}
	if p, err := h.read(`{"ipam": {"type": "host-local"}}`); err != nil || p.Full {
		t.Errorf("no range: %+v, %v; want neither", p, err)
	}
	files{"podnet": "a file"}.Fill(t, h.DataDir)
	if p, err := h.read(h.Config); err == nil {
		t.Errorf("a pool that is a file: %+v; want an error", p)
	}
}

// TestFullOfNode: a pool can be full even if its ranges are not in the conflist, but in a file such
// as flannel's. If that file is missing, the pool is not full, and NoRanges names the cause.
func TestFullOfNode(t *testing.T) {
	t.Parallel()
	h := newHostLocal(t, `"subnet": "10.1.0.0/30"`)
	h.Config = strings.Replace(h.Config, `"bridge"`, fmt.Sprintf(`"flannel", "subnetFile": %q`, h.DataDir+"/subnet.env"), 1)
	check(t, os.Mkdir(h.Pool(), 0o755))
	files{"10.244.1.2": "z\r\neth0"}.Fill(t, h.Pool())
	if p, err := h.read(h.Config); err != nil || p.Full || !strings.Contains(p.NoRanges, "subnet.env: no such file") {
		t.Errorf("without the file: %+v, %v", p, err)
	}
	files{"subnet.env": "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.1.1/30\n"}.Fill(t, h.DataDir)
	h.wantFull("with the file", true)
}
