package pools

import (
	"encoding/json"
	"math/big"
	"net/netip"
	"testing"

	"pgregory.net/rapid"
)

// TestSize has the sizes at which a count could go wrong. inspect.TestFull compares the small ones with
// host-local.
func TestSize(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		ipam string
		want int64
	}{
		{`"subnet": "10.1.0.0/16"`, 65533},
		{`"subnet": "0.0.0.0/0"`, 1<<32 - 3},
		{`"subnet": "10.1.0.0/24", "gateway": "10.1.0.0"`, 254},
		{`"subnet": "fd00::/120"`, 254},
		{`"subnet": "fd00::/75", "gateway": "fd00::"`, 1<<53 - 1},
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
