package facts

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/tristate"
)

// Interface is an interface in a network namespace.
type Interface struct {
	journal.Interface
	Netns journal.NetNS
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

// inspect looks at an interface in the network namespace of this thread.
func (s *Interface) inspect(name string) error {
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer handle.Close()
	link, err := handle.LinkByName(name)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil
	}
	if err != nil {
		return err
	}
	attrs := link.Attrs()
	s.index = attrs.Index
	s.MAC = netconf.CanonicalMAC(strings.ToLower(attrs.HardwareAddr.String()))
	addresses, err := handle.AddrList(link, netlink.FAMILY_ALL)
	for _, a := range addresses {
		if ip, ok := netip.AddrFromSlice(a.IP); ok {
			s.Addresses = append(s.Addresses, ip.Unmap())
		}
	}
	return err
}

// IsOwnNetNS reports whether a path leads to the network namespace of this process. One that leads
// nowhere does not.
func IsOwnNetNS(path string) (bool, error) {
	its, err := os.Stat(path)
	if err != nil {
		return false, nil //nolint:nilerr // nothing is there
	}
	own, err := os.Stat("/proc/self/ns/net")
	return err == nil && os.SameFile(its, own), err
}
