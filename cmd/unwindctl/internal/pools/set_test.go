package pools

import (
	"encoding/json"
	"testing"
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
