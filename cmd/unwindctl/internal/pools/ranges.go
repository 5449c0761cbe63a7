package pools

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/containernetworking/plugins/plugins/ipam/host-local/backend/allocator"
)

// Ranges returns the range sets in a plugin's configuration, as host-local itself reads them. The
// runtime's ranges come first, then the old-style range, then "ranges". The configuration must come
// from OfNode.
func Ranges(config json.RawMessage) ([]Set, error) {
	var conf allocator.Net
	if err := json.Unmarshal(config, &conf); err != nil {
		return nil, err
	}
	if conf.IPAM == nil {
		return nil, errors.New(`key "ipam" is missing`)
	}
	given := conf.RuntimeConfig.IPRanges
	if old := conf.IPAM.Range; old != nil && old.Subnet.IP != nil {
		given = append(given, allocator.RangeSet{*old})
	}
	given = append(given, conf.IPAM.Ranges...)
	var sets []Set
	for i := range given {
		err := given[i].Canonicalize()
		for _, other := range given[:i] {
			if err == nil && other.Overlaps(&given[i]) {
				err = fmt.Errorf("%s and %s overlap", &given[i], &other)
			}
		}
		set := Set{}
		for _, r := range given[i] {
			one := Range{addressOf(r.RangeStart), addressOf(r.RangeEnd), addressOf(r.Gateway)}
			if err == nil && one.Last.Less(one.First) { // host-local accepts this
				err = fmt.Errorf("range %s is empty: its end is below its start", one)
			}
			set = append(set, one)
		}
		if err != nil {
			return nil, fmt.Errorf("range set %d: %w", i, err)
		}
		sets = append(sets, set)
	}
	return sets, nil
}

func addressOf(ip net.IP) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
}
