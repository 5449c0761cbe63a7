package host

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"

	"cni-unwind/journal"
)

// viewAge is how long a view of the network namespaces stays current.
const viewAge = time.Second

// View caches the interfaces of all network namespaces (see interfacesEverywhere), and which of the
// namespaces have processes. It is read on first use. The workers of a verb share it.
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

// All returns the interfaces. With an error the list may be incomplete.
func (s *View) All(log *slog.Logger) ([]Interface, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.taken) < viewAge {
		return s.interfaces, s.err
	}
	s.interfaces, s.err = interfacesEverywhere()
	if s.err != nil {
		log.Debug("cannot inspect all network namespaces", "err", s.err) // the caller judges it
	}
	s.taken = time.Now()
	return s.interfaces, s.err
}

// interfacesEverywhere returns the interfaces of all network namespaces that have a process or are
// mounted, except those that any local user can create, see anybodys. With an error the list may be
// incomplete. A namespace may disappear during the search, or its process may exit and leave it to
// others, so the search is repeated for namespaces that it could not inspect.
func interfacesEverywhere() (all []Interface, err error) {
	s := search{seen: map[string]found{}}
	for round := range 10 {
		time.Sleep(time.Duration(round) * 2 * time.Millisecond) // lets ending processes end
		if all, err = s.look(); err == nil {
			break
		}
	}
	return all, err
}

// search is a search through the network namespaces.
type search struct {
	seen map[string]found // by the text of a link to the namespace
	peers
}

type found struct {
	interfaces []Interface
	netDev     uint64
	err        error // why it could not be inspected
}

// look inspects each network namespace that the search has not seen, and returns the interfaces of
// all that exist now. Mounts come first, because a mounted namespace counts regardless of its
// creator.
func (s *search) look() (all []Interface, err error) {
	here := map[string]bool{}
	closed := map[uint64]int{} // processes that may not be inspected, by the inode of their net/dev
	unseen := func(link string) bool {
		f, is := s.seen[link]
		here[link] = true
		return !is || f.err != nil
	}
	mountErr := eachMounted(anyNetNS, unseen, func(link, path string, netns ns.NetNS, err error) {
		var f found
		if err == nil {
			f, err = interfacesIn(netns, path)
			_ = netns.Close()
		}
		s.note(link, path, f, err)
	})
	mounted := maps.Clone(here)
	pids, processErr := Processes()
	errs := []error{mountErr, processErr, checkAllShown()}
	for _, pid := range pids {
		switch m := memberOf(pid); {
		case m.link == "":
			closed[m.netDev], errs = pid, append(errs, m.err)
		case unseen(m.link):
			f, err := s.lookAt(m, mounted[m.link])
			s.note(m.link, m.path, f, err)
		}
	}
	delete(closed, 0) // processes that have ended
	for _, link := range slices.Sorted(maps.Keys(here)) {
		f := s.seen[link]
		all, errs = append(all, f.interfaces...), append(errs, f.err)
		delete(closed, f.netDev)
	}
	for _, pid := range closed {
		errs = append(errs, fmt.Errorf("cannot open the network namespace of process %d", pid))
	}
	return all, errors.Join(errs...)
}

// note records what is in a network namespace, or why it could not be inspected.
func (s *search) note(link, path string, f found, err error) {
	if err != nil && path != "" {
		err = fmt.Errorf("network namespace %s: %w", path, err)
	}
	if err != nil {
		f = found{err: err}
	}
	s.seen[link] = f
}

func (s *search) lookAt(m member, mounted bool) (found, error) {
	netns, err := openLink(m.path, m.link)
	if err != nil {
		return found{}, err
	}
	defer netns.Close()
	if !mounted && s.anybodys(netns) {
		dev, err := netDevOf(procOf(m.pid))
		return found{netDev: dev}, err
	}
	return interfacesIn(netns, m.path)
}

// interfacesIn returns the interfaces of a network namespace, with their addresses.
func interfacesIn(netns ns.NetNS, path string) (all found, err error) {
	id, err := identityAnd(netns, path, func() error {
		links, err := netlink.LinkList()
		if err != nil {
			return err
		}
		addresses, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
		for _, link := range links {
			var seen Interface
			seen.take(link, addresses)
			all.interfaces = append(all.interfaces, seen)
		}
		return err
	})
	for i := range all.interfaces {
		all.interfaces[i].Netns = id
	}
	all.netDev = id.NetDev
	return all, err
}

// AddressIn reports whether an interface in the network namespace has the address.
func AddressIn(netns journal.NetNS, address netip.Addr) (bool, error) {
	place, err := Find(netns)
	if err != nil || place.Path == "" {
		return false, err
	}
	defer place.Close()
	there, err := ns.GetNS(place.Path)
	if err != nil {
		return false, err
	}
	defer there.Close()
	all, err := interfacesIn(there, place.Path)
	return slices.ContainsFunc(all.interfaces, func(s Interface) bool {
		return s.Netns.Same(netns) && slices.Contains(s.Addresses, address.Unmap())
	}), err
}
