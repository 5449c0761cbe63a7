package host

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/tristate"
)

// Interface is an interface in a network namespace.
type Interface struct {
	journal.Interface
	Netns journal.NetNS
	Name  string
	index int // 0: the namespace has no interface of that name
}

// There reports whether the namespace has the interface.
func (s Interface) There() bool { return s.index != 0 }

// Occupant names the interface for Generation.Occupant, or is "" for a loopback, which every
// namespace has.
func (s Interface) Occupant() string {
	if s.MAC == "" {
		return ""
	}
	return fmt.Sprintf("%d %s", s.index, s.MAC)
}

// HasMAC reports whether the interface has the hardware address of a result.
func (s Interface) HasMAC(named journal.Interface) tristate.Value {
	return tristate.Equal(s.MAC != "" && named.MAC != "", s.MAC == named.MAC)
}

// HasAny reports whether the interface has one of the addresses of a result.
func (s Interface) HasAny(named journal.Interface) tristate.Value {
	has := slices.ContainsFunc(named.Addresses, func(a netip.Addr) bool {
		return slices.Contains(s.Addresses, a)
	})
	return tristate.Equal(len(named.Addresses) > 0, has)
}

// Is reports whether the interface matches everything that a result says about it. A result that
// says nothing matches no interface.
func (s Interface) Is(named journal.Interface) bool {
	mac, address := s.HasMAC(named), s.HasAny(named)
	return s.There() && mac != tristate.No && address != tristate.No &&
		(mac == tristate.Yes || address == tristate.Yes)
}

// Look opens a network namespace, identifies it, and inspects an interface in it. A missing
// interface is not an error.
func Look(path, ifname string) (Interface, error) {
	seen := Interface{Netns: journal.NetNS{Path: path}, Name: ifname}
	netns, err := ns.GetNS(path)
	if err != nil {
		return seen, err
	}
	defer netns.Close()
	seen.Netns, err = identityAnd(netns, path, func() error {
		link, err := netlink.LinkByName(ifname)
		if errors.As(err, new(netlink.LinkNotFoundError)) {
			return nil
		}
		if err != nil {
			return err
		}
		addresses, err := netlink.AddrList(link, netlink.FAMILY_ALL)
		seen.take(link, addresses)
		return err
	})
	return seen, err
}

func (s *Interface) take(link netlink.Link, addresses []netlink.Addr) {
	attrs := link.Attrs()
	s.Name, s.index = attrs.Name, attrs.Index
	s.MAC = netconf.CanonicalMAC(strings.ToLower(attrs.HardwareAddr.String()))
	for _, a := range addresses {
		if ip, ok := netip.AddrFromSlice(a.IP); ok && a.LinkIndex == attrs.Index {
			s.Addresses = append(s.Addresses, ip.Unmap())
		}
	}
}
