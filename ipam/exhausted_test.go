package ipam

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"cni-unwind/testdata/sandbox"

	"github.com/google/go-cmp/cmp"
)

// reference is the reference plugin with a configuration.
type reference struct {
	*testing.T
	config  json.RawMessage
	dataDir string
}

// newHostLocal returns one with a directory of its own for its pool, which it creates. ipam has
// further keys of its configuration.
func newHostLocal(t *testing.T, ipam string) *reference {
	sandbox.Need(t)
	h := &reference{T: t, dataDir: t.TempDir()}
	h.config = json.RawMessage(fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "podnet", "type": "bridge",
		"ipam": {"type": "host-local", "dataDir": %q, %s}}`, h.dataDir, ipam))
	return h
}

func (h *reference) pool() string { return filepath.Join(h.dataDir, "podnet") }

// call prepares a verb.
func (h *reference) call(verb, containerID string) *exec.Cmd {
	h.Helper()
	tools, err := filepath.Abs("../.tools/cni")
	check(h, err)
	cmd := exec.Command(filepath.Join(tools, "host-local"))
	cmd.Env = []string{"CNI_COMMAND=" + verb, "CNI_CONTAINERID=" + containerID, "CNI_IFNAME=eth0", "CNI_PATH=" + tools,
		"CNI_NETNS=/run/netns/none", "CNI_NETNS_OVERRIDE=1"}
	cmd.Stdin = strings.NewReader(string(h.config))
	return cmd
}

// do runs a verb. It returns the plugin's error, if it fails.
func (h *reference) do(verb, containerID string) (failed string) {
	h.Helper()
	out, err := h.call(verb, containerID).Output()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		h.Fatalf("%v; run make tools", err)
	}
	if err != nil {
		return string(out) + string(exit.Stderr)
	}
	return ""
}

// wantExhausted checks what Exhausted says.
func (h *reference) wantExhausted(when string, want bool) {
	h.Helper()
	if got, err := Exhausted(h.config, "podnet"); got != want || err != nil {
		h.Errorf("%s: exhausted %t, %v; there are %v", when, got, err, filesOf(h.T, h.pool()))
	}
}

// TestExhausted fills pools by host-local itself, one address at a time. Exhausted is true exactly
// when host-local has no address left. Then one is released and given out again.
func TestExhausted(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, ipam string
		seed       files // there before
		addresses  int   // the number that host-local gives out
	}{
		{"subnet", `"subnet": "10.1.0.0/29"`, nil, 5},
		{"the smallest", `"subnet": "10.1.0.0/30"`, nil, 1},
		{"the smallest, IPv6", `"subnet": "fd00::/126"`, nil, 2},
		{"IPv6", `"subnet": "fd00::/125"`, nil, 6},
		{"a part of an IPv6 /64", `"subnet": "fd00::/64", "rangeStart": "fd00::ffff:ffff", "rangeEnd": "fd00::1:0:2"`, nil, 4},
		{"gateway within", `"subnet": "10.1.0.0/29", "gateway": "10.1.0.4"`, nil, 5},
		{"gateway elsewhere", `"subnet": "10.1.0.0/29", "gateway": "10.2.0.1"`, nil, 6},
		{"gateway at the end", `"subnet": "10.1.0.0/29", "gateway": "10.1.0.6"`, nil, 5},
		{"gateway of all ones", `"subnet": "10.1.0.0/29", "gateway": "10.1.0.7"`, nil, 6},
		{"range", `"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.250", "rangeEnd": "10.1.0.252"`, nil, 3},
		{"range to the broadcast address", `"subnet": "10.1.0.0/29", "rangeStart": "10.1.0.5", "rangeEnd": "10.1.0.7"`, nil, 3},
		{"range with the gateway", `"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.1", "rangeEnd": "10.1.0.3"`, nil, 2},
		{"range that is the gateway", `"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.1", "rangeEnd": "10.1.0.1"`, nil, 0},
		{"a set of two", `"ranges": [[{"subnet": "10.1.0.0/30"}, {"subnet": "10.2.0.0/29", "rangeEnd": "10.2.0.3"}]]`, nil, 3},
		{"a set of two, one the other's gateway", `"ranges": [[{"subnet": "10.1.0.0/30", "gateway": "10.2.0.2"},
			{"subnet": "10.2.0.0/30", "gateway": "10.1.0.2"}]]`, nil, 4},
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
		{"ownerless, a folder and a link", `"subnet": "10.1.0.0/29"`,
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
			if full, err := Exhausted(h.config, "podnet"); full != (tt.addresses == 0) || err != nil {
				t.Errorf("without a pool: exhausted %t, %v", full, err)
			}
			if _, err := os.Lstat(h.pool()); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("a pool was made (%v)", err)
			}
			check(t, os.Mkdir(h.pool(), 0o755))
			fill(t, h.pool(), tt.seed)
			h.untilExhausted(tt.addresses)
			if tt.addresses == 0 {
				return
			}
			freed := fmt.Sprint(tt.addresses / 2)
			check(t, Release(t.Context(), h.pool(), freed, "eth0"))
			h.wantExhausted("one was released", false)
			if failed := h.do("ADD", "again"); failed != "" {
				t.Errorf("ADD after one was released: %s", failed)
			}
			h.wantExhausted("it was given again", true)
		})
	}
}

// untilExhausted asks for addresses until host-local has none, which must be after this many.
func (h *reference) untilExhausted(addresses int) {
	h.Helper()
	for i := range addresses + 1 {
		h.wantExhausted(fmt.Sprintf("%d were given", i), i == addresses)
		failed := h.do("ADD", fmt.Sprint(i))
		if (failed != "") != (i == addresses) || failed != "" && !strings.Contains(failed, "no IP addresses available") {
			h.Fatalf("host-local, asked for address %d of %d: %q", i+1, addresses, failed)
		}
	}
}

// TestTooSmall: host-local has no address in a subnet of one or two addresses, and says so in
// another way than of a pool that is exhausted.
func TestTooSmall(t *testing.T) {
	t.Parallel()
	for _, subnet := range []string{"10.1.0.0/31", "10.1.0.0/32", "fd00::/127", "fd00::/128"} {
		h := newHostLocal(t, fmt.Sprintf(`"subnet": %q`, subnet))
		if failed := h.do("ADD", "a"); !strings.Contains(failed, "too small to allocate from") {
			t.Errorf("%s: host-local: %q", subnet, failed)
		}
		if sets, err := Ranges(h.config); err == nil || !strings.Contains(err.Error(), "too small") {
			t.Errorf("%s: %v, %v", subnet, sets, err)
		}
	}
}

// TestExhaustedIsNot: a large pool is not exhausted because many addresses are given out; nor is an
// unknown one.
func TestExhaustedIsNot(t *testing.T) {
	sandbox.Need(t)
	t.Parallel()
	many := files{}
	for i := range 300 {
		many[fmt.Sprintf("fd00::%x", i)] = "z\r\neth0"
	}
	for _, subnet := range []string{"fd00::/64", "fd00::/8", "::/0", "0.0.0.0/0"} {
		h := newHostLocal(t, fmt.Sprintf(`"subnet": %q`, subnet))
		check(t, os.Mkdir(h.pool(), 0o755))
		fill(t, h.pool(), many)
		h.wantExhausted(subnet, false)
	}
	for _, tt := range []struct{ name, config string }{
		{"an empty range", `{"ipam": {"type": "host-local", "ranges": [[]]}}`},
		{"no IPAM", `{"type": "bridge"}`},
		{"a subnet that is none", `{"ipam": {"type": "host-local", "subnet": "10.1.0.0"}}`},
		{"too small", `{"ipam": {"type": "host-local", "subnet": "10.1.0.0/31"}}`},
		{"no JSON", `{`},
	} {
		if full, err := Exhausted(json.RawMessage(tt.config), "podnet"); full || err == nil {
			t.Errorf("%s: exhausted %t, %v; want an error", tt.name, full, err)
		}
	}
	if full, err := Exhausted(json.RawMessage(`{"ipam": {"type": "host-local"}}`), "podnet"); full || err != nil {
		t.Errorf("no range: exhausted %t, %v; want neither", full, err)
	}
	h := newHostLocal(t, `"subnet": "10.1.0.0/30"`)
	fill(t, h.dataDir, files{"podnet": "a file"})
	if full, err := Exhausted(h.config, "podnet"); full || err == nil {
		t.Errorf("a pool that is a file: exhausted %t, %v; want an error", full, err)
	}
}

// TestReleaseFromHostLocal releases the address that host-local itself gave to one attachment of
// two. host-local then gives it to the next, and its own DEL finds nothing to do.
func TestReleaseFromHostLocal(t *testing.T) {
	t.Parallel()
	h := newHostLocal(t, `"ranges": [[{"subnet": "10.1.0.0/29"}], [{"subnet": "fd00::/125"}]]`)
	for _, id := range []string{"a", "b"} {
		if failed := h.do("ADD", id); failed != "" {
			t.Fatal(failed)
		}
	}
	held, err := HeldBy(h.pool(), "a", "eth0")
	want := []netip.Addr{netip.MustParseAddr("10.1.0.2"), netip.MustParseAddr("fd00::2")}
	if slices.SortFunc(held, netip.Addr.Compare); !slices.Equal(held, want) || err != nil {
		t.Errorf("a holds %v, %v; want %v", held, err, want)
	}
	check(t, Release(t.Context(), h.pool(), "a", "eth0"))
	left := files{"lock": "", "last_reserved_ip.0": "10.1.0.3", "last_reserved_ip.1": "fd00::3",
		"10.1.0.3": "b\r\neth0", "fd00::3": "b\r\neth0"}
	if diff := cmp.Diff(left, filesOf(t, h.pool())); diff != "" {
		t.Errorf("left (-want +got):\n%s", diff)
	}
	if failed := h.do("DEL", "a"); failed != "" {
		t.Errorf("host-local's DEL: %s", failed)
	}
	if diff := cmp.Diff(left, filesOf(t, h.pool())); diff != "" {
		t.Errorf("left by the DEL (-want +got):\n%s", diff)
	}
}
