package ipam

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/containernetworking/cni/pkg/types"
)

// givenRange is a range as host-local's configuration has it (plugins v1.9
// host-local/backend/allocator, README of host-local). unwind does not import that package: the
// init of its imports (iptables, knftables) takes a tenth of the time in which unwind starts.
type givenRange struct {
	RangeStart net.IP      `json:"rangeStart"`
	RangeEnd   net.IP      `json:"rangeEnd"`
	Subnet     types.IPNet `json:"subnet"`
	Gateway    net.IP      `json:"gateway"`
}

// Ranges accepts and refuses the same ranges as host-local. The runtime's ranges come first, then
// the range of the old style. flannel's delegate has none here: it gets them later.
func (hostLocal) Ranges(config json.RawMessage) ([][]Range, error) {
	var conf struct {
		IPAM struct {
			givenRange
			Type   string         `json:"type"`
			Ranges [][]givenRange `json:"ranges"`
		} `json:"ipam"`
		RuntimeConfig struct {
			IPRanges [][]givenRange `json:"ipRanges"`
		} `json:"runtimeConfig"`
	}
	if err := json.Unmarshal(config, &conf); err != nil {
		return nil, err
	}
	given := conf.RuntimeConfig.IPRanges
	if old := conf.IPAM.givenRange; old.Subnet.IP != nil {
		given = append(given, []givenRange{old})
	}
	given = append(given, conf.IPAM.Ranges...)
	if len(given) == 0 {
		if conf.IPAM.Type != "" {
			return nil, nil
		}
		return nil, errors.New(`no "ipam"`)
	}
	var sets [][]Range
	var all []Range
	for i, g := range given {
		set, err := setOf(g)
		if err != nil {
			return nil, fmt.Errorf("range set %d: %w", i, err)
		}
		for _, r := range set {
			for _, other := range all {
				if r.overlaps(other) {
					return nil, fmt.Errorf("range set %d: %s-%s and %s-%s overlap", i, r.First, r.Last, other.First, other.Last)
				}
			}
			all = append(all, r)
		}
		sets = append(sets, set)
	}
	return sets, nil
}

func setOf(given []givenRange) (set []Range, err error) {
	if len(given) == 0 {
		return nil, errors.New("it is empty")
	}
	for _, g := range given {
		r, err := g.complete()
		if err != nil {
			return nil, err
		}
		if len(set) > 0 && r.First.BitLen() != set[0].First.BitLen() {
			return nil, errors.New("it mixes IPv4 and IPv6")
		}
		set = append(set, r)
	}
	return set, nil
}

// complete fills in what the configuration leaves out: all addresses of the subnet but its first,
// and for IPv4 its last; the gateway is the second one.
func (g givenRange) complete() (Range, error) {
	subnet, err := prefixOf(net.IPNet(g.Subnet))
	if err != nil {
		return Range{}, err
	}
	last := lastOf(subnet)
	if subnet.Addr().Is4() {
		last = last.Prev()
	}
	r := Range{First: subnet.Addr().Next(), Last: last, Gateway: subnet.Addr().Next()}
	for _, given := range []struct {
		ip   net.IP
		into *netip.Addr
	}{{g.RangeStart, &r.First}, {g.RangeEnd, &r.Last}, {g.Gateway, &r.Gateway}} {
		if given.ip != nil {
			*given.into = addressOf(given.ip)
		}
	}
	if !subnet.Contains(r.First) || !subnet.Contains(r.Last) || r.Last.Less(r.First) {
		return Range{}, fmt.Errorf("%s-%s is no range in %s", r.First, r.Last, subnet)
	}
	return r, nil
}

// prefixOf returns a subnet as a prefix, and refuses one without addresses to give out.
func prefixOf(n net.IPNet) (netip.Prefix, error) {
	ones, bits := n.Mask.Size()
	address := addressOf(n.IP)
	subnet := netip.PrefixFrom(address, ones)
	switch {
	case address.BitLen() != bits || !subnet.IsValid():
		return subnet, fmt.Errorf("%q is no subnet", n.String())
	case ones > bits-2:
		return subnet, fmt.Errorf("%s is too small", subnet)
	case subnet.Masked() != subnet:
		return subnet, fmt.Errorf("%s has host bits set; the subnet is %s", subnet, subnet.Masked())
	}
	return subnet, nil
}

func lastOf(subnet netip.Prefix) netip.Addr {
	bytes := subnet.Addr().AsSlice()
	for bit := subnet.Bits(); bit < 8*len(bytes); bit++ {
		bytes[bit/8] |= 0x80 >> (bit % 8)
	}
	a, _ := netip.AddrFromSlice(bytes)
	return a
}

func (r Range) overlaps(o Range) bool {
	return r.First.BitLen() == o.First.BitLen() && !o.Last.Less(r.First) && !r.Last.Less(o.First)
}

func addressOf(ip net.IP) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
}
