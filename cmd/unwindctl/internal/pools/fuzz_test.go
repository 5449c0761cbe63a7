package pools

import (
	"path/filepath"
	"testing"

	"cni-unwind/ipam"
	"cni-unwind/plugin/known"
)

// FuzzRanges reads a delegate's configuration. There is a pool only for host-local, in the
// directory of the network, and its size can be computed.
func FuzzRanges(f *testing.F) {
	for _, ipam := range []string{
		`"subnet": "10.1.0.0/24"`, `"subnet": "10.1.0.0/31"`, `"subnet": "fd00::/64", "dataDir": "/tmp/../x"`,
		`"ranges": [[{"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.9", "rangeEnd": "10.1.0.2"}]]`, `"ranges": [[]]`, `"ranges": [null]`,
		`"ranges": [[{"subnet": "10.1.0.0/24"}, {"subnet": "fd00::/64"}]], "dataDir": "relative"`, `"subnet": "10.1.0.5"`, `"subnet": "0.0.0.0/0"`,
		`"subnet": "::/0"`, `"subnet": "10.1.0.0/24", "gateway": "fd00::1"`, `"ranges": [[{"subnet": "10.1.0.0/24", "gateway": ""}]]`,
	} {
		f.Add([]byte(`{"cniVersion": "1.0.0", "name": "podnet", "type": "bridge", "ipam": {"type": "host-local", ` + ipam + `}}`))
	}
	f.Add([]byte(`{"ipam": {"type": "static"}}`))
	f.Fuzz(func(t *testing.T, config []byte) {
		pool := ipam.Pool(known.IPAMOf(config).Name, config, "podnet")
		if pool != "" && (!filepath.IsAbs(pool) || filepath.Base(pool) != "podnet" || filepath.Clean(pool) != pool) {
			t.Errorf("pool %q", pool)
		}
		sets, err := Ranges(config)
		if err != nil {
			return
		}
		for _, set := range sets {
			for _, r := range set {
				if !r.First.IsValid() || !r.Last.IsValid() || r.Last.Less(r.First) {
					t.Errorf("%+v", r)
				}
			}
			if size := set.Size(); size < 0 || size > Unbounded {
				t.Errorf("%+v has the size %d", set, size)
			}
		}
	})
}
