package facts

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"github.com/containernetworking/plugins/pkg/ns"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
)

// Place is a network namespace that this process holds open. It stays the same until it is closed,
// even if another namespace is mounted at its path. The zero value contains no namespace.
type Place struct {
	Path string // where it was found; "" for the zero value
	Seen Interface
	held ns.NetNS
}

// There reports whether the place contains a namespace.
func (p Place) There() bool { return p.held != nil }

// Pinned returns a path that always leads to this namespace, until the place is closed.
func (p Place) Pinned() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), p.held.Fd()) }

// IsAt reports whether the namespace is at a path. It is held open, so no other namespace can have
// its inode.
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
// unless ifname is "". A missing interface is not an error. After an error, the place contains only
// the path.
func Open(path, ifname string) (Place, error) {
	none := Place{Seen: Interface{Netns: journal.NetNS{Path: path}}}
	held, err := ns.GetNS(path)
	if err != nil {
		return none, err
	}
	p := Place{Path: path, Seen: none.Seen, held: held}
	var st unix.Stat_t
	if err = unix.Fstat(int(held.Fd()), &st); err == nil {
		p.Seen.Netns.Dev, p.Seen.Netns.Ino = st.Dev, st.Ino
		err = In(held, func() error { return p.Seen.inspect(ifname) })
	}
	if err != nil {
		p.Close()
		return none, err
	}
	return p, nil
}

// Look inspects an interface in the network namespace at a path (see Open). It does not keep the
// namespace open.
func Look(path, ifname string) (Interface, error) {
	place, err := Open(path, ifname)
	place.Close()
	return place.Seen, err
}

// IsNoNetNS reports whether an error means that no network namespace is at the path.
func IsNoNetNS(err error) bool {
	return errors.As(err, new(ns.NSPathNotExistErr)) || errors.As(err, new(ns.NSPathNotNSErr))
}

// errElsewhere means that a path leads to another network namespace.
var errElsewhere = errors.New("another network namespace is at this path")

// openSame opens one particular network namespace (see Open). If another namespace is at the path,
// the error is errElsewhere. But if that namespace has reused the inode, the wanted one is gone,
// and openSame returns no error and an empty place.
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

// Find opens a network namespace and inspects an interface in it. It tries the given paths, the
// path that the ADD recorded, and the namespace's mounts in this process's mount namespace. If it
// finds none, the place is empty. An error means that the namespace may still exist, for example
// under another mount.
func Find(id journal.NetNS, ifname string, paths ...string) (Place, error) {
	for _, path := range append(paths, id.Path) {
		// an error is ignored here, because search reports it for a mount
		if place, _ := openSame(path, id, ifname); place.There() {
			return place, nil
		}
	}
	return search(id, ifname, func(bool) ([]string, error) {
		mounts, err := lookAtMounts()
		return mounts[LinkOf(id)], err
	})
}

// search opens a network namespace at one of the paths that look returns. A path may lead to
// another namespace by the time it is opened, so search calls look up to three times. An error
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

// LinkOf returns the link text of a network namespace, as in /proc/PID/ns/net.
func LinkOf(id journal.NetNS) string { return fmt.Sprintf("net:[%d]", id.Ino) }

// lookAtMounts returns the paths at which each network namespace is mounted in this process's mount
// namespace. The keys are the namespaces' link texts (see LinkOf).
func lookAtMounts() (map[string][]string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	all, lines := map[string][]string{}, bufio.NewScanner(f)
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

// addAddresses adds the addresses of all interfaces in the network namespace at a path, if that
// namespace still has the given link text.
func addAddresses(path, link string, all map[netip.Addr]bool) error {
	place, err := Open(path, "")
	if err != nil {
		return fmt.Errorf("network namespace %s: %w", path, err)
	}
	defer place.Close()
	if LinkOf(place.Seen.Netns) != link {
		return errElsewhere
	}
	return In(place.held, func() error {
		found, err := net.InterfaceAddrs()
		for _, address := range addressesOf(found) {
			all[address] = true
		}
		return err
	})
}
