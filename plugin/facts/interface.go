package facts

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"

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

// There reports whether the namespace contains the interface.
func (s Interface) There() bool { return s.index != 0 }

// Occupant returns the value for journal.Entry.Occupant. It is "" for a loopback, because every
// namespace has one.
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

// Is reports whether the interface can be the one in a result: both have the same MAC, and share an
// address. Is does not compare a value that one of them lacks, but at least one value must match.
func (s Interface) Is(named journal.Interface) bool {
	mac, address := s.HasMAC(named), s.HasAny(named)
	return s.There() && mac != tristate.No && address != tristate.No &&
		(mac == tristate.Yes || address == tristate.Yes)
}

// inspect identifies the network namespace of this thread, and inspects an interface in it unless
// the name is "".
func (s *Interface) inspect(name string) error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	// Kernels before 5.14 give a socket no cookie; an error leaves it at zero.
	s.Netns.Cookie, _ = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if name == "" {
		return nil
	}
	links, err := net.Interfaces()
	i := slices.IndexFunc(links, func(l net.Interface) bool { return l.Name == name })
	if i < 0 {
		return err
	}
	s.index = links[i].Index
	s.MAC = netconf.CanonicalMAC(links[i].HardwareAddr.String())
	addresses, err := links[i].Addrs()
	s.Addresses = addressesOf(addresses)
	return err
}

func addressesOf(found []net.Addr) (all []netip.Addr) {
	for _, a := range found {
		if prefix, err := netip.ParsePrefix(a.String()); err == nil {
			all = append(all, prefix.Addr().Unmap())
		}
	}
	return all
}

// IsOwnNetNS reports whether a path leads to the network namespace of this process. It returns
// false if nothing exists at the path.
func IsOwnNetNS(path string) (bool, error) {
	its, err := os.Stat(path)
	if err != nil {
		return false, nil //nolint:nilerr // nothing exists at the path
	}
	own, err := os.Stat("/proc/self/ns/net")
	return err == nil && os.SameFile(its, own), err
}
