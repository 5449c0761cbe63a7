package facts

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
)

// Place is a network namespace that this process holds open: whatever comes to its path meanwhile,
// it stays the same until it is closed. The zero value has none.
type Place struct {
	Path string // where it was found; "" if there is none
	Seen Interface
	held ns.NetNS
}

// There reports whether there is a namespace.
func (p Place) There() bool { return p.held != nil }

// Pinned returns a path that leads to the namespace, and nowhere else, until it is closed.
func (p Place) Pinned() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), p.held.Fd()) }

// IsAt reports whether the namespace is at a path. It is held open, so no other one has its inode.
func (p Place) IsAt(path string) bool {
	var own, its unix.Stat_t
	return p.There() && unix.Fstat(int(p.held.Fd()), &own) == nil &&
		unix.Stat(path, &its) == nil &&
		own.Dev == its.Dev && own.Ino == its.Ino
}

// Close closes the namespace.
func (p Place) Close() {
	if p.There() {
		_ = p.held.Close()
	}
}

// Open opens the network namespace at a path, identifies it, and inspects an interface in it,
// unless ifname is "". A missing interface is not an error. With an error only the path is known.
func Open(path, ifname string) (Place, error) {
	return openAnd(path, func(p *Place) error {
		if ifname == "" {
			return nil
		}
		return p.Seen.inspect(ifname)
	})
}

// openAnd opens and identifies the network namespace at a path, and runs fn in it.
func openAnd(path string, fn func(*Place) error) (Place, error) {
	none := Place{Seen: Interface{Netns: journal.NetNS{Path: path}}}
	held, err := ns.GetNS(path)
	if err != nil {
		return none, err
	}
	p := Place{Path: path, Seen: none.Seen, held: held}
	var st unix.Stat_t
	if err = unix.Fstat(int(held.Fd()), &st); err == nil {
		p.Seen.Netns.Dev, p.Seen.Netns.Ino = st.Dev, st.Ino
		err = In(held, func() error {
			fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			// Kernels before 5.14 give a socket no cookie; an error leaves it at zero.
			p.Seen.Netns.Cookie, _ = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
			return fn(&p)
		})
	}
	if err != nil {
		p.Close()
		return none, err
	}
	return p, nil
}

// Look is Open for those who need no place.
func Look(path, ifname string) (Interface, error) {
	place, err := Open(path, ifname)
	place.Close()
	return place.Seen, err
}

// Identify returns the identity of the network namespace at a path.
func Identify(path string) (journal.NetNS, error) {
	seen, err := Look(path, "")
	return seen.Netns, err
}

// IsNoNetNS reports whether an error means that no network namespace is at the path.
func IsNoNetNS(err error) bool {
	return errors.As(err, new(ns.NSPathNotExistErr)) || errors.As(err, new(ns.NSPathNotNSErr))
}

// errElsewhere says that a path leads to another network namespace.
var errElsewhere = errors.New("it is another network namespace")

// openSame is Open for one network namespace. If another one is at the path, the error is
// errElsewhere, or nil if that one has the inode, which came again: then it is gone.
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

// Find opens a network namespace at one of some paths, at that of its ADD, or at a mount of it in
// this process's mount namespace, in this order, and inspects an interface in it. If there is none,
// the place is empty. An error means unknown: a mount of it may be covered by another.
func Find(id journal.NetNS, ifname string, paths ...string) (Place, error) {
	var unread error
	for _, path := range append(paths, id.Path) {
		place, err := openSame(path, id, ifname)
		if place.There() {
			return place, nil
		}
		if err != nil && !errors.Is(err, errElsewhere) && !IsNoNetNS(err) {
			unread = err
		}
	}
	place, err := search(id, ifname, func(bool) (points []string, err error) {
		mounts, err := mountsOf(LinkOf(id))
		for _, m := range mounts {
			points = append(points, m.point)
		}
		return points, err
	})
	if place.There() {
		return place, nil
	}
	return place, errors.Join(unread, err)
}

// search opens a network namespace at one of the paths that look returns. A path may become
// another's meanwhile, so search looks again. An error means unknown.
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

// LinkOf returns the text of a link to a network namespace.
func LinkOf(id journal.NetNS) string { return fmt.Sprintf("net:[%d]", id.Ino) }

// mount is a mount of a network namespace, by the text of a link to it.
type mount struct{ link, point string }

// mountsOf returns the mounts of network namespaces in this process's mount namespace whose links
// begin with a text.
func mountsOf(link string) (all []mount, err error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if !bytes.Contains(lines.Bytes(), []byte(" "+link)) {
			continue
		}
		// 36 35 98:0 ROOT MOUNTPOINT …, see proc_pid_mountinfo(5); \040 is a blank
		fields := strings.Fields(lines.Text())
		if len(fields) < 5 || !strings.HasPrefix(fields[3], link) {
			continue
		}
		point, err := strconv.Unquote(`"` + strings.ReplaceAll(fields[4], `"`, `\"`) + `"`)
		if err != nil {
			return all, fmt.Errorf("mount point %q: %w", fields[4], err)
		}
		all = append(all, mount{fields[3], point})
	}
	return all, lines.Err()
}

// addressesAt adds the addresses of all interfaces in the network namespace at a path, if it is the
// one that the text of a link names.
func addressesAt(path, link string, all map[netip.Addr]bool) error {
	var found []netlink.Addr
	place, err := openAnd(path, func(*Place) (err error) {
		found, err = netlink.AddrList(nil, netlink.FAMILY_ALL)
		return err
	})
	place.Close()
	switch {
	case err != nil:
		return fmt.Errorf("network namespace %s: %w", path, err)
	case LinkOf(place.Seen.Netns) != link:
		return errElsewhere
	}
	for _, a := range found {
		if address, ok := netip.AddrFromSlice(a.IP); ok {
			all[address.Unmap()] = true
		}
	}
	return nil
}
