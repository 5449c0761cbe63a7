package facts

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
)

// Place is a network namespace that this process keeps open, so it stays the same even if another
// namespace is mounted at its path. The zero value contains no namespace.
type Place struct {
	Path string // where it was found; "" for the zero value
	Seen Interface
	held ns.NetNS
}

func (p Place) There() bool { return p.held != nil }

// Pinned returns a path that always leads to this namespace, until the place is closed.
func (p Place) Pinned() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), p.held.Fd()) }

// Interface inspects an interface of the namespace as it is now.
func (p Place) Interface(ifname string) (seen Interface, err error) {
	err = In(p.held, func() error { return seen.inspect(p.held, ifname) })
	return seen, err
}

// IsAt reports whether the namespace is at a path. While the place keeps its namespace open, no
// other namespace can have the same inode.
func (p Place) IsAt(path string) bool {
	var its unix.Stat_t
	return p.There() && unix.Stat(path, &its) == nil &&
		its.Dev == p.Seen.Netns.Dev && its.Ino == p.Seen.Netns.Ino
}

func (p Place) Close() {
	if p.There() {
		_ = p.held.Close()
	}
}

// Open opens the network namespace at a path. Unless ifname is "", it also inspects the interface
// with that name, which may be missing. After an error, the place contains only the path.
func Open(path, ifname string) (none Place, err error) {
	none.Seen.Netns.Path = path
	held, err := ns.GetNS(path)
	if err != nil {
		return none, err
	}
	p := Place{Path: path, Seen: none.Seen, held: held}
	if err = In(held, func() error { return p.Seen.inspect(held, ifname) }); err != nil {
		p.Close()
		return none, err
	}
	return p, nil
}

// InterfaceAt is like Open, but does not keep the namespace open.
func InterfaceAt(path, ifname string) (Interface, error) {
	place, err := Open(path, ifname)
	place.Close()
	return place.Seen, err
}

// IsNoNetNS reports whether an error means that no network namespace is at the path.
func IsNoNetNS(err error) bool {
	return errors.As(err, new(ns.NSPathNotExistErr)) || errors.As(err, new(ns.NSPathNotNSErr))
}

var errElsewhere = errors.New("another network namespace is at this path")

// openSame opens one particular network namespace (see Open). If a namespace with another inode is
// at the path, the error is errElsewhere. If another namespace has reused the inode, the wanted one
// is gone, and openSame returns an empty place without an error.
func openSame(path string, id journal.NetNS, ifname string) (Place, error) {
	place, err := Open(path, ifname)
	if err == nil && id.Same(place.Seen.Netns) {
		return place, nil
	}
	if err == nil && place.Seen.Netns.Ino != id.Ino {
		err = errElsewhere
	}
	place.Close()
	return Place{}, err
}

// Find opens a network namespace (see Open) at the first path that leads to it: one of the given
// paths, the path that the ADD recorded, or a mount in this process's mount namespace. If no path
// does, the place is empty. An error means that the namespace may still exist, for example under
// another mount.
func Find(id journal.NetNS, ifname string, paths ...string) (Place, error) {
	for _, path := range append(paths, id.Path) {
		if place, _ := openSame(path, id, ifname); place.There() { // the search below reports errors
			return place, nil
		}
	}
	return search(id, ifname, func(bool) ([]string, error) {
		mounts, err := lookAtMounts()
		return mounts[linkOf(id)], err
	})
}

// AddressesOf returns the addresses that the interface of an attachment has now.
func AddressesOf(e *journal.Record) ([]netip.Addr, error) {
	place, err := Find(e.Added.NetNS, e.IfName)
	place.Close()
	return place.Seen.Addresses, err
}

// search opens a network namespace at one of the paths that look returns. If one of them cannot be
// opened, or leads elsewhere by now, search calls look again, up to three times in all. An error
// means that the namespace may still exist.
func search(
	id journal.NetNS, ifname string, look func(again bool) ([]string, error),
) (place Place, err error) {
	for try := range 3 {
		paths, lookErr := look(try > 0)
		err = nil
		for _, path := range paths {
			place, openErr := openSame(path, id, ifname)
			if place.There() {
				return place, nil
			}
			if openErr != nil {
				err = fmt.Errorf("%s: %w", path, openErr)
			}
		}
		if err == nil {
			return Place{}, lookErr
		}
	}
	return Place{}, err
}

// linkOf returns a network namespace's link text, as in /proc/PID/ns/net.
func linkOf(id journal.NetNS) string { return fmt.Sprintf("net:[%d]", id.Ino) }

// lookAtMounts returns, by link text, the paths at which each network namespace is mounted in this
// process's mount namespace.
func lookAtMounts() (map[string][]string, error) {
	all := map[string][]string{}
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return all, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if !bytes.Contains(lines.Bytes(), []byte(" net:[")) {
			continue
		}
		// 36 35 98:0 ROOT MOUNTPOINT …, see proc_pid_mountinfo(5); \040 is a space
		fields := strings.Fields(lines.Text())
		if len(fields) < 5 || !strings.HasPrefix(fields[3], "net:[") {
			continue
		}
		point, err := strconv.Unquote(`"` + strings.ReplaceAll(fields[4], `"`, `\"`) + `"`)
		if err != nil {
			return all, fmt.Errorf("cannot decode mount point %q: %w", fields[4], err)
		}
		all[fields[3]] = append(all[fields[3]], point)
	}
	return all, lines.Err()
}

// visit is a function to run in a network namespace.
type visit struct {
	netns ns.NetNS
	do    func() error
	ended chan error
}

// visits returns the channel to the one thread that runs all visits, one at a time. A new thread
// for each visit would cost a verb up to half a millisecond.
var visits = sync.OnceValue(func() chan<- visit {
	all := make(chan visit)
	go func() {
		for {
			OnThread(func() { makeVisits(all) })
		}
	}()
	return all
})

// In runs fn in a network namespace. fn must not call In, because only one thread runs visits.
func In(netns ns.NetNS, fn func() error) error {
	v := visit{netns, fn, make(chan error)}
	visits() <- v
	return <-v.ended
}

// makeVisits runs visits on this thread. It returns if the thread cannot go back to its own
// namespace.
func makeVisits(all <-chan visit) {
	home, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err == nil {
		defer unix.Close(home)
	}
	for v := range all {
		err := unix.Setns(int(v.netns.Fd()), unix.CLONE_NEWNET)
		if err != nil {
			err = fmt.Errorf("cannot enter network namespace %s: %w", v.netns.Path(), err)
		} else {
			err = v.do()
		}
		stays := unix.Setns(home, unix.CLONE_NEWNET)
		v.ended <- err
		if stays != nil {
			return
		}
	}
}

// OnThread runs fn on a thread that ends after fn, so that no other goroutine gets a thread in
// another network namespace. It never uses the main thread, because /proc shows that thread's
// namespace as the process's.
func OnThread(fn func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if unix.Gettid() == os.Getpid() {
			OnThread(fn) // on another thread, while this one waits
			runtime.UnlockOSThread()
			return
		}
		fn()
	}()
	<-done
}

type Interface struct {
	Netns     journal.NetNS
	Addresses []netip.Addr
	occupant  string // see Occupant
	index     int    // 0: the namespace has no interface of that name
}

func (s Interface) There() bool { return s.index != 0 }

// Occupant describes the interface as in journal.Added.Occupant. It returns "" if there is none, or
// for the loopback, which every namespace has.
func (s Interface) Occupant() string { return s.occupant }

// Is reports whether the interface exists, and has at least one of the given addresses, if any are
// given.
func (s Interface) Is(addresses []netip.Addr) bool {
	return s.There() && (len(addresses) == 0 || slices.ContainsFunc(addresses,
		func(a netip.Addr) bool { return slices.Contains(s.Addresses, a) }))
}

// inspect identifies the network namespace of this thread, and inspects an interface in it.
func (s *Interface) inspect(netns ns.NetNS, name string) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(netns.Fd()), &st); err != nil {
		return err
	}
	s.Netns.Dev, s.Netns.Ino = st.Dev, st.Ino
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	// Kernels before 5.14 do not return the namespace's cookie. After an error, it is zero.
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
	if links[i].Flags&net.FlagLoopback == 0 {
		s.occupant = fmt.Sprintf("%d %s", s.index, links[i].HardwareAddr)
	}
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

// HostLinks returns the host ends of the container's interfaces in a result: the veths without a
// sandbox. Other host interfaces, such as a bridge or a macvlan's master, outlive the container.
func HostLinks(r *netconf.Result) []journal.HostLink {
	var links []journal.HostLink
	for _, i := range r.Interfaces {
		if i.Sandbox != "" || i.Name == "" {
			continue
		}
		if link, err := netlink.LinkByName(i.Name); err == nil && link.Type() == "veth" {
			links = append(links, journal.HostLink{Name: i.Name, MAC: link.Attrs().HardwareAddr.String()})
		}
	}
	return links
}

func LinkThere(links []journal.HostLink) (bool, error) {
	for _, l := range links {
		link, err := netlink.LinkByName(l.Name)
		switch {
		case errors.As(err, new(netlink.LinkNotFoundError)):
		case err != nil:
			return false, err
		case link.Attrs().HardwareAddr.String() == l.MAC:
			return true, nil
		}
	}
	return false, nil
}
