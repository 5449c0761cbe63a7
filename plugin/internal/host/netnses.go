package host

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
)

// viewAge is how long a view of the network namespaces counts as current.
const viewAge = time.Second

// View has the interfaces of all network namespaces, and which of these have processes, read on
// first use. The workers of a verb share it.
type View struct {
	mu         sync.Mutex
	looked     time.Time       // at the processes
	links      map[string]bool // the links to their network namespaces
	closed     map[uint64]bool // the inodes of net/dev of those that may not be inspected
	shownAll   bool            // there are no others
	taken      time.Time
	interfaces []Interface
	err        error
}

// All returns the interfaces. With an error there may be more.
func (s *View) All(log *slog.Logger) ([]Interface, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.taken) < viewAge {
		return s.interfaces, s.err
	}
	s.interfaces, s.err = interfacesEverywhere()
	if s.err != nil {
		log.Debug("looking through the network namespaces", "err", s.err) // the caller judges it
	}
	s.taken = time.Now()
	return s.interfaces, s.err
}

// interfacesEverywhere returns the interfaces of all network namespaces that a process is in or
// that are mounted somewhere. With an error there may be more. A namespace may go during the
// search, or its process may end and leave it to others, so the search is repeated for namespaces
// that it could not look into.
func interfacesEverywhere() (all []Interface, err error) {
	seen := map[string][]Interface{} // by the text of a link to the namespace
	for round := range 10 {
		time.Sleep(time.Duration(round) * 2 * time.Millisecond) // lets ending processes end
		var paths map[string]string
		var closed map[uint64]int
		if paths, closed, err = reachable(); err != nil {
			return nil, err
		}
		var errs []error
		all = nil
		for link, path := range paths {
			if seen[link] == nil {
				found, err := interfacesAt(path)
				if err != nil {
					errs = append(errs, fmt.Errorf("network namespace %s: %w", path, err))
					continue
				}
				seen[link] = found
			}
			for _, i := range seen[link] {
				delete(closed, i.Netns.NetDev)
			}
			all = append(all, seen[link]...)
		}
		for _, pid := range closed {
			errs = append(errs, fmt.Errorf("the network namespace of process %d cannot be reached", pid))
		}
		if err = errors.Join(append(errs, checkAllShown())...); err == nil {
			break
		}
	}
	return all, err
}

// interfacesAt returns the interfaces of a network namespace, with their addresses.
func interfacesAt(path string) (all []Interface, err error) {
	netns, err := ns.GetNS(path)
	if err != nil {
		return nil, err
	}
	defer netns.Close()
	id, err := identityAnd(netns, path, func() error {
		links, err := netlink.LinkList()
		if err != nil {
			return err
		}
		addresses, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
		for _, link := range links {
			var seen Interface
			seen.take(link, addresses)
			all = append(all, seen)
		}
		return err
	})
	for i := range all {
		all[i].Netns = id
	}
	return all, err
}

// AddressIn says whether an interface in the network namespace has the address.
func AddressIn(netns journal.NetNS, address netip.Addr) (bool, error) {
	path, err := PathTo(netns)
	if err != nil || path == "" {
		return false, err
	}
	all, err := interfacesAt(path)
	return slices.ContainsFunc(all, func(s Interface) bool {
		return s.Netns.Same(netns) && slices.Contains(s.Addresses, address.Unmap())
	}), err
}

// reachable returns a path to each network namespace that has one, by the text of a link to it. Of
// the processes that may not be inspected, it returns one in each network namespace, by the inode
// of its net/dev.
func reachable() (paths map[string]string, closed map[uint64]int, err error) {
	paths, closed = map[string]string{}, map[uint64]int{}
	err = EachProcess(func(pid int, proc string) (bool, error) {
		path, link, err := netnsLink(proc)
		if err == nil {
			if paths[link] == "" {
				paths[link] = path
			}
			return false, nil
		}
		dev, err := netDev(proc)
		if dev != 0 {
			closed[dev] = pid
		}
		return false, err
	})
	if err != nil {
		return nil, nil, err
	}
	return paths, closed, eachMount("/proc/self", " net:[", func(m mount) error {
		if !strings.HasPrefix(m.root, "net:[") {
			return nil
		}
		var st unix.Stat_t
		if unix.Stat(m.point, &st) == nil && LinkOf(journal.NetNS{Ino: st.Ino}) == m.root {
			paths[m.root] = m.point
		} else if paths[m.root] == "" {
			paths[m.root] = m.point // covered by another mount, or just gone: opening it will tell
		}
		return nil
	})
}

// PathTo returns a path to the network namespace: its path at the ADD, or one at which it is
// mounted now, or "". It does not look through mount namespaces other than this process's.
func PathTo(id journal.NetNS) (path string, err error) {
	there, identifyErr := Identify(id.Path)
	if identifyErr == nil && id.Same(there) {
		return id.Path, nil
	}
	if identifyErr != nil && !IsNoNetNS(identifyErr) {
		err = identifyErr
	}
	mountErr := eachMount("/proc/self", " "+LinkOf(id)+" ", func(m mount) error {
		switch there, identifyErr := Identify(m.point); {
		case identifyErr == nil && id.Same(there):
			path = m.point
		case identifyErr != nil || there.Ino != id.Ino:
			err = fmt.Errorf("nothing leads to the network namespace that is mounted at %s", m.point)
		}
		return nil
	})
	if path != "" {
		return path, nil
	}
	return "", errors.Join(err, mountErr)
}
