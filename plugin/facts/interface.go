package facts

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"cni-unwind/journal"
)

// Interface is an interface in a network namespace.
type Interface struct {
	Netns     journal.NetNS
	Addresses []netip.Addr
	mac       string // "" for an interface without one, such as a loopback
	index     int    // 0: the namespace has no interface of that name
}

// There reports whether the namespace contains the interface.
func (s Interface) There() bool { return s.index != 0 }

// Occupant returns the value for journal.Entry.Occupant. It is "" for a loopback, because every
// namespace has one.
func (s Interface) Occupant() string {
	if s.mac == "" {
		return ""
	}
	return fmt.Sprintf("%d %s", s.index, s.mac)
}

// Is reports whether the interface exists, and has one of the addresses of a result, if that has
// any.
func (s Interface) Is(addresses []netip.Addr) bool {
	return s.There() && (len(addresses) == 0 || slices.ContainsFunc(addresses,
		func(a netip.Addr) bool { return slices.Contains(s.Addresses, a) }))
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
	s.mac = canonicalMAC(links[i].HardwareAddr)
	addresses, err := links[i].Addrs()
	s.Addresses = addressesOf(addresses)
	return err
}

// canonicalMAC returns a hardware address as the kernel prints it. It returns "" for an all-zero
// one, such as a loopback's, because that identifies no interface.
func canonicalMAC(mac net.HardwareAddr) string {
	if !slices.ContainsFunc(mac, func(b byte) bool { return b != 0 }) {
		return ""
	}
	return mac.String()
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
