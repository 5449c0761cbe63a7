package ipam

import (
	"encoding/json"
	"fmt"
	"math/big"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// TestSize has the sizes at which a count could go wrong. TestExhausted compares the small ones with
// host-local.
func TestSize(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		ipam string
		want int64
	}{
		{`"subnet": "10.1.0.0/16"`, 65533},
		{`"subnet": "0.0.0.0/0"`, 1<<32 - 3},
		{`"subnet": "10.1.0.0/24", "gateway": "10.2.0.1"`, 254},
		{`"subnet": "fd00::/120"`, 254},
		{`"subnet": "fd00::/75", "gateway": "fd01::1"`, 1<<53 - 1},
		{`"subnet": "fd00::/75", "gateway": "fd01::1", "rangeStart": "fd00::"`, Unbounded},
		{`"subnet": "fd00::/75"`, 1<<53 - 2},
		{`"subnet": "fd00::/74"`, Unbounded},
		{`"subnet": "fd00::/64"`, Unbounded},
		{`"subnet": "::/0"`, Unbounded},
		{`"subnet": "fd00::/48", "rangeStart": "fd00::ffff:ffff:ffff:fffe", "rangeEnd": "fd00::1:0:0:0:1"`, 4},
		{`"ranges": [[{"subnet": "10.1.0.0/24"}, {"subnet": "10.2.0.0/30"}]]`, 254},
		{`"ranges": [[{"subnet": "fd00::/64"}, {"subnet": "fd01::/64"}]]`, Unbounded},
		{`"ranges": [[{"subnet": "fd00::/75"}, {"subnet": "fd01::/75"}]]`, Unbounded},
	} {
		sets, err := Ranges(json.RawMessage(`{"ipam": {"type": "host-local", ` + tt.ipam + `}}`))
		if err != nil || len(sets) != 1 || sets[0].Size() != tt.want {
			t.Errorf("%s: %v, %v; want the size %d", tt.ipam, sets, err, tt.want)
		}
	}
}

// TestRandomSize compares sizes with those that big numbers have.
func TestRandomSize(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		address := func(name string) netip.Addr {
			// Few bits differ, so that ranges of all sizes come up.
			at, value := rapid.IntRange(0, 15).Draw(t, name+"'s byte"), rapid.Byte().Draw(t, name)
			bytes := [16]byte{0: 0xfd, 15: 1}
			bytes[at] ^= value
			return netip.AddrFrom16(bytes)
		}
		r := Range{address("first"), address("last"), address("gateway")}
		if r.Last.Less(r.First) {
			r.First, r.Last = r.Last, r.First
		}
		number := func(a netip.Addr) *big.Int { return new(big.Int).SetBytes(a.AsSlice()) }
		want := new(big.Int).Sub(number(r.Last), number(r.First))
		if r.Gateway.Less(r.First) || r.Last.Less(r.Gateway) {
			want.Add(want, big.NewInt(1))
		}
		if most := big.NewInt(Unbounded); want.Cmp(most) > 0 {
			want = most
		}
		if got := r.Size(); got != want.Int64() {
			t.Errorf("%s with the gateway %s: %d, want %d", r, r.Gateway, got, want)
		}
	})
}

// TestRangesOfDelegate: what flannel and calico replace is not taken for a range. For other
// delegates it is.
func TestRangesOfDelegate(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		delegate, ipam string
		want           []string // the ranges of each set
	}{
		{"bridge", `"subnet": "10.1.0.0/24"`, []string{"[10.1.0.1-10.1.0.254]"}},
		{"flannel", `"ranges": [[{"subnet": "10.244.0.0/16"}]]`, nil},
		{"flannel", `"dataDir": "/x"`, nil},
		{"calico", `"subnet": "usePodCidr"`, []string{"[]"}},
		{"calico", `"subnet": "USEPODCIDRIPV6"`, []string{"[]"}},
		{"calico", `"ranges": [[{"subnet": "usePodCidr"}], [{"subnet": "usePodCidrIPv6"}]]`, []string{"[]", "[]"}},
		{"calico", `"ranges": [[{"subnet": "usePodCidr"}], [{"subnet": "fd00::/120"}]]`, []string{"[]", "[fd00::1-fd00::ff]"}},
		{"calico", `"ranges": [[{"subnet": "10.1.0.0/30"}, {"subnet": "10.2.0.0/30"}]]`, []string{"[10.1.0.1-10.1.0.2 10.2.0.1-10.2.0.2]"}},
	} {
		sets, err := Ranges(json.RawMessage(fmt.Sprintf(`{"type": %q, "ipam": {"type": "host-local", %s}}`, tt.delegate, tt.ipam)))
		var got []string
		for _, set := range sets {
			got = append(got, fmt.Sprint(set))
		}
		if diff := cmp.Diff(tt.want, got); diff != "" || err != nil {
			t.Errorf("%s, %s: %v\n%s", tt.delegate, tt.ipam, err, diff)
		}
	}
}

// TestExhaustedOfUnknown: a set whose ranges are not known is not exhausted, and hides no other.
func TestExhaustedOfUnknown(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		second string
		want   bool
	}{{"usePodCidrIPv6", false}, {"fd00::/126", true}, {"fd00::/64", false}} {
		dir := t.TempDir()
		fill(t, dir, files{"podnet": "folder"})
		fill(t, dir, files{"podnet/10.1.0.2": "z\r\neth0", "podnet/fd00::2": "z\r\neth0", "podnet/fd00::3": "y\r\neth0"})
		config := fmt.Sprintf(`{"type": "calico", "ipam": {"type": "host-local", "dataDir": %q,
			"ranges": [[{"subnet": "usePodCidr"}], [{"subnet": %q}]]}}`, dir, tt.second)
		if got, err := Exhausted(json.RawMessage(config), "podnet"); got != tt.want || err != nil {
			t.Errorf("%s: exhausted %t, %v", tt.second, got, err)
		}
	}
}
