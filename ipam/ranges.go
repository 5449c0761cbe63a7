package ipam

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
)

// givenRange is a range in host-local's configuration (plugins v1.9 host-local/backend/allocator,
// README of host-local). unwind does not import that package, because the init functions of its
// imports (iptables, knftables) take a tenth of unwind's start time.
type givenRange struct {
	RangeStart net.IP      `json:"rangeStart"`
	RangeEnd   net.IP      `json:"rangeEnd"`
	Subnet     givenSubnet `json:"subnet"`
	Gateway    net.IP      `json:"gateway"`
}

// givenSubnet is a subnet, or a keyword that calico replaces with one of the node's pod CIDRs.
type givenSubnet struct {
	types.IPNet
	ofNode bool
}

// UnmarshalJSON accepts calico's keywords (projectcalico/calico 0c474030,
// cni-plugin/internal/pkg/utils/utils.go, replaceHostLocalIPAMPodCIDR).
func (s *givenSubnet) UnmarshalJSON(data []byte) error {
	var text string
	if json.Unmarshal(data, &text) == nil {
		s.ofNode = strings.EqualFold(text, "usePodCidr") || strings.EqualFold(text, "usePodCidrIPv6")
	}
	if s.ofNode {
		return nil
	}
	return s.IPNet.UnmarshalJSON(data)
}

// Ranges returns the range sets of a delegate's pool, or none if its configuration does not have
// them. It accepts and rejects the same ranges as host-local. The runtime's ranges come first, then
// the range of the old style. The delegates flannel and calico pass other ranges to host-local than
// they get:
//   - flannel replaces all of them with the node's subnets (flannel-io/cni-plugin 6f13a99d,
//     flannel_linux.go, getDelegateIPAM), so its pool has no set;
//   - calico replaces two keywords, and a set with one of them has no range.
func Ranges(config json.RawMessage) ([]Set, error) {
	var conf struct {
		Type string `json:"type"`
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
	if conf.Type == "flannel" {
		return nil, nil
	}
	given := conf.RuntimeConfig.IPRanges
	if old := conf.IPAM.givenRange; old.Subnet.IP != nil || old.Subnet.ofNode {
		given = append(given, []givenRange{old})
	}
	given = append(given, conf.IPAM.Ranges...)
	if len(given) == 0 {
		if conf.IPAM.Type != "" {
			return nil, nil
		}
		return nil, errors.New(`key "ipam" is missing`)
	}
	var sets []Set
	var all []Range
	for i, g := range given {
		set, err := setOf(g, conf.Type == "calico")
		if err != nil {
			return nil, fmt.Errorf("range set %d: %w", i, err)
		}
		for _, r := range set {
			for _, other := range all {
				if r.overlaps(other) {
					return nil, fmt.Errorf("range set %d: %s and %s overlap", i, r, other)
				}
			}
			all = append(all, r)
		}
		sets = append(sets, set)
	}
	return sets, nil
}

// setOf returns a set as host-local interprets it, without a range if calico replaces its ranges.
func setOf(given []givenRange, calico bool) (set Set, err error) {
	if len(given) == 0 {
		return nil, errors.New("empty")
	}
	if calico && slices.ContainsFunc(given, func(g givenRange) bool { return g.Subnet.ofNode }) {
		return nil, nil
	}
	for _, g := range given {
		r, err := g.complete()
		if err != nil {
			return nil, err
		}
		if len(set) > 0 && r.First.BitLen() != set[0].First.BitLen() {
			return nil, errors.New("mixes IPv4 and IPv6")
		}
		set = append(set, r)
	}
	return set, nil
}

// complete fills in what the configuration leaves out: all addresses of the subnet but its first,
// and for IPv4 its last; the gateway is the second one.
func (g givenRange) complete() (Range, error) {
	if g.Subnet.ofNode {
		return Range{}, errors.New("usePodCidr is not a subnet; only calico replaces it with one")
	}
	subnet, err := prefixOf(net.IPNet(g.Subnet.IPNet))
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
		return Range{}, fmt.Errorf("%s is not a range in %s", r, subnet)
	}
	return r, nil
}

// prefixOf returns a subnet as a prefix, and rejects one without assignable addresses.
func prefixOf(n net.IPNet) (netip.Prefix, error) {
	ones, bits := n.Mask.Size()
	address := addressOf(n.IP)
	subnet := netip.PrefixFrom(address, ones)
	switch {
	case address.BitLen() != bits || !subnet.IsValid():
		return subnet, fmt.Errorf("%q is not a subnet", n.String())
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
