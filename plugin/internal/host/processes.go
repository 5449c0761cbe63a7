package host

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/containernetworking/plugins/pkg/ns"

	"cni-unwind/journal"
)

// ProcessIn returns a process in the network namespace, or 0 if there is none. An error means
// unknown. rescan skips the cache, for an attachment without other evidence: the cached scan may
// have missed a process.
func (s *View) ProcessIn(id journal.NetNS, rescan bool) (pid int, err error) {
	for range 3 { // a process may end during the look
		var place Place
		pid, place, err = s.OpenByProcess(id, rescan)
		place.Close()
		if err == nil {
			break
		}
	}
	return pid, err
}

// OpenByProcess is like ProcessIn, and opens the network namespace, because the process may exit at
// any time and its ID be reused. The place is empty if no process in the namespace can be
// inspected.
//
//  1. The link /proc/PID/ns/net gives the namespace of a process that may be inspected.
//  2. For any other process, unwind compares the inode of /proc/PID/net/dev with the one that was
//     recorded at the ADD.
//  3. If they are equal, or the ADD recorded none, the process may still be elsewhere: if another
//     reachable namespace has this inode, the process is in that one.
func (s *View) OpenByProcess(id journal.NetNS, rescan bool) (pid int, place Place, err error) {
	if !rescan && s.noProcessIn(id) {
		return 0, Place{}, nil
	}
	want, closed := LinkOf(id), map[uint64]int{}
	var unseen error
	pids, err := Processes()
	for _, pid := range pids {
		m := memberOf(pid)
		if m.link == want {
			place, err := openIfSame(m.path, id)
			if place.Path != "" {
				return pid, place, nil
			}
			if err != nil { // it may have ended
				m.link = ""
				m.netDev, m.err = netDev(procOf(pid))
			}
		}
		if m.err != nil {
			unseen = m.err // a later process may still lead there
		}
		if m.link == "" && m.netDev != 0 && (id.NetDev == 0 || id.NetDev == m.netDev) {
			closed[m.netDev] = pid
		}
	}
	if err == nil && len(closed) > 0 {
		pid, err = insideOf(id, closed)
	}
	if err == nil && pid == 0 {
		err = unseen
	}
	if err == nil && pid == 0 {
		err = checkAllShown()
	}
	return pid, Place{}, err
}

// noProcessIn reports whether a scan of all processes, at most viewAge ago, found none in the
// network namespace. One scan serves a sweep of many dead attachments. It returns false if a
// process that cannot be inspected may be in the namespace, see OpenByProcess.
func (s *View) noProcessIn(id journal.NetNS) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.looked) >= viewAge {
		s.links, s.closed, s.shownAll = map[string]bool{}, map[uint64]bool{}, true
		pids, err := Processes()
		for _, pid := range pids {
			switch m := memberOf(pid); {
			case m.link != "":
				s.links[m.link] = true
			case m.err != nil:
				s.shownAll = false
			case m.netDev != 0:
				s.closed[m.netDev] = true
			}
		}
		s.shownAll = s.shownAll && err == nil && checkAllShown() == nil
		s.looked = time.Now()
	}
	closed := len(s.closed) > 0 && (id.NetDev == 0 || s.closed[id.NetDev])
	return s.shownAll && !s.links[LinkOf(id)] && !closed
}

// insideOf returns a process that is in the network namespace, or 0, from processes that cannot be
// inspected. closed has them by the inodes of their net/dev. insideOf removes those that are in a
// reachable network namespace.
func insideOf(id journal.NetNS, closed map[uint64]int) (pid int, err error) {
	pids, err := Processes()
	for _, pid := range pids {
		m := memberOf(pid)
		if m.link == "" || m.link == LinkOf(id) {
			continue // it says nothing of the others
		}
		dev, _ := netDevOf(procOf(pid))
		if again, err := os.Readlink(m.path); err == nil && again == m.link {
			delete(closed, dev)
		}
		if len(closed) == 0 {
			return 0, nil
		}
	}
	if err == nil {
		others := func(string) bool { return len(closed) > 0 }
		err = eachMounted(anyNetNS, others, func(_, path string, netns ns.NetNS, err error) {
			if err != nil {
				return // it says nothing of the others
			}
			if other, err := identity(netns, path); err == nil && !id.Same(other) {
				delete(closed, other.NetDev)
			}
			_ = netns.Close()
		})
	}
	for _, pid := range closed {
		if id.NetDev == 0 || err != nil {
			return 0, errors.Join(err, fmt.Errorf("cannot inspect process %d", pid))
		}
		return pid, nil
	}
	return 0, nil
}

// LinkOf returns the text of a link to the network namespace.
func LinkOf(id journal.NetNS) string { return fmt.Sprintf("net:[%d]", id.Ino) }

// openIfSame opens the network namespace at the path. The place is empty if it is another one.
func openIfSame(path string, id journal.NetNS) (Place, error) {
	netns, err := ns.GetNS(path)
	if err != nil {
		return Place{}, err
	}
	if found, err := identity(netns, ""); err != nil || !id.Same(found) {
		_ = netns.Close()
		return Place{}, err
	}
	return placeOf(netns), nil
}

// OpenByDescriptor opens the network namespace if a process that can be inspected has it open, or
// returns an empty place. A link to a file of a removed mount reads "/". OpenByDescriptor opens no
// other files, because their server may hang.
func OpenByDescriptor(id journal.NetNS) Place {
	want := LinkOf(id)
	pids, _ := Processes()
	for _, pid := range pids {
		files, _ := os.ReadDir(procOf(pid) + "/fd")
		for _, f := range files {
			path := procOf(pid) + "/fd/" + f.Name()
			if link, err := os.Readlink(path); err != nil || link != want && link != "/" {
				continue
			}
			if place, _ := openIfSame(path, id); place.Path != "" {
				return place
			}
		}
	}
	return Place{}
}
