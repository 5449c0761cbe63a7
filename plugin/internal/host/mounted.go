package host

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/containernetworking/plugins/pkg/ns"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
)

// Place leads to a network namespace. Its zero value leads nowhere.
type Place struct {
	Path string
	held ns.NetNS // the namespace at Path, if this process holds it open
}

// Close closes the namespace. After it, the path may name nothing, or another namespace.
func (p Place) Close() {
	if p.held != nil {
		_ = p.held.Close()
	}
}

// placeOf returns a path to a network namespace that this process holds open.
func placeOf(held ns.NetNS) Place {
	return Place{fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), held.Fd()), held}
}

// Find returns a place that leads to the network namespace: its path at the ADD, or a mount of it,
// also one below other mounts. If there is neither, the place is empty. Find does not look through
// mount namespaces other than this process's.
func Find(id journal.NetNS) (place Place, err error) {
	there, identifyErr := Identify(id.Path)
	if identifyErr == nil && id.Same(there) {
		return Place{Path: id.Path}, nil
	}
	if identifyErr != nil && !IsNoNetNS(identifyErr) {
		err = identifyErr
	}
	link := LinkOf(id)
	wanted := func(of string) bool { return of == link && place.Path == "" }
	mountErr := eachMounted(link, wanted, func(_, point string, netns ns.NetNS, openErr error) {
		if openErr != nil {
			err = openErr
			return
		}
		switch there, identifyErr := identity(netns, point); {
		case identifyErr != nil:
			err = identifyErr
		case !id.Same(there): // an inode that came again
		case point != "":
			place = Place{Path: point}
		default:
			place = placeOf(netns)
			return
		}
		_ = netns.Close()
	})
	if place.Path != "" {
		return place, nil
	}
	return Place{}, errors.Join(err, mountErr)
}

// eachMounted calls fn with the network namespaces that are mounted in this process's mount
// namespace and wanted by the text of a link to them; fn closes them. The path is "" for one whose
// mounts are all below others. with is in the text of each link that may be wanted. eachMounted
// calls wanted for each mount of a network namespace, and once more before it looks below others.
//
// An error instead of a namespace means that it is mounted, and cannot be looked at.
func eachMounted(with string, wanted func(link string) bool,
	fn func(link, path string, netns ns.NetNS, err error),
) error {
	var hidden []string
	err := eachMount("/proc/self", " "+with, func(m mount) error {
		if !strings.HasPrefix(m.root, anyNetNS) || !wanted(m.root) {
			return nil
		}
		if netns, err := openLink(m.point, m.root); err == nil {
			fn(m.root, m.point, netns, nil)
		} else if !slices.Contains(hidden, m.root) {
			hidden = append(hidden, m.root)
		}
		return nil
	})
	hidden = slices.DeleteFunc(hidden, func(link string) bool { return !wanted(link) })
	for len(hidden) > 0 {
		hidden = uncoverEach(hidden, fn)
	}
	return err
}

// anyNetNS is the beginning of the text of a link to any network namespace.
const anyNetNS = "net:["

// openLink opens the network namespace at a path if a link to it has the text.
func openLink(path, link string) (ns.NetNS, error) {
	netns, err := ns.GetNS(path)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err = unix.Fstat(int(netns.Fd()), &st); err == nil && LinkOf(journal.NetNS{Ino: st.Ino}) == link {
		return netns, nil
	}
	_ = netns.Close()
	return nil, errors.Join(err, fmt.Errorf("%s is another network namespace", path))
}

// uncoverEach opens network namespaces whose mounts are all below other mounts. No path leads there:
// a runtime mounts /run/netns/cni-x, and the node's first `ip netns add` then binds /run/netns over
// itself (iproute2 6.12, ip/ipnetns.c: netns_add). So a thread with a copy of the mount namespace
// unmounts the covers in the copy. The node's own mounts stay as they are.
//
// uncoverEach calls fn for at least one of the namespaces, and returns the others: what is mounted
// on a cover goes with it. It leaves out those that are not mounted any more.
func uncoverEach(links []string, fn func(link, path string, netns ns.NetNS, err error)) (rest []string) {
	OnThread(func() {
		err := copyMounts()
		mounts, readErr := allMounts()
		left, removed := mounts, false
		for _, link := range links {
			is := func(m mount) bool { return m.root == link }
			if !slices.ContainsFunc(mounts, is) && readErr == nil {
				continue
			}
			if err = errors.Join(err, readErr); err != nil {
				fn(link, "", nil, hiddenErr(mounts, link, err))
				continue
			}
			i := slices.IndexFunc(left, is)
			if i < 0 {
				rest = append(rest, link)
				continue
			}
			covers, ok := coversOf(left, left[i])
			switch netns, err := uncover(left[i], covers, ok); {
			case err == nil:
				fn(link, "", netns, nil)
			case removed:
				rest = append(rest, link)
			default:
				fn(link, "", nil, hiddenErr(mounts, link, err))
			}
			if len(covers) > 0 {
				removed = true
				left, readErr = allMounts()
			}
		}
	})
	return rest
}

// copyMounts gives the thread a copy of the mount namespace. Nothing that happens to the copy
// happens to the original. What is unmounted in the original, if it is shared, is unmounted in the
// copy too, which so keeps no file system busy.
func copyMounts() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("cannot create a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("cannot separate a mount namespace from the host's: %w", err)
	}
	return nil
}

// allMounts returns the mounts in this thread's mount namespace.
func allMounts() (all []mount, err error) {
	err = eachMount("/proc/thread-self", "", func(m mount) error {
		all = append(all, m)
		return nil
	})
	return all, err
}

// uncover removes the covers of a mount, and opens the network namespace there.
func uncover(m mount, covers []string, ok bool) (ns.NetNS, error) {
	if !ok {
		return nil, errors.New("no path reaches it")
	}
	for _, point := range covers {
		if err := unix.Unmount(point, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return nil, fmt.Errorf("cannot unmount %s in a copy of the mount namespace: %w", point, err)
		}
	}
	return openLink(m.point, m.root)
}

// coversOf returns the mount points of those mounts that hide one, the topmost first, or false if
// something else does.
func coversOf(all []mount, hidden mount) (points []string, ok bool) {
	ids, at := map[string]bool{}, map[[2]string]mount{} // by parent and mount point
	for _, m := range all {
		ids[m.id], at[[2]string{m.parent, m.point}] = true, m
	}
	root := slices.IndexFunc(all, func(m mount) bool {
		return m.point == "/" && (!ids[m.parent] || m.parent == m.id)
	})
	for root >= 0 {
		top := leadsTo(at, all[root], hidden.point)
		if top.id == hidden.id {
			return points, true
		}
		if top.point == "/" {
			break
		}
		delete(at, [2]string{top.parent, top.point})
		points = append(points, top.point)
	}
	return nil, false
}

// leadsTo returns the mount that a path leads to from the root of a mount namespace.
func leadsTo(at map[[2]string]mount, root mount, path string) mount {
	for end := 1; end <= len(path); end++ {
		if end > 1 && end < len(path) && path[end] != '/' {
			continue
		}
		next, is := at[[2]string{root.id, path[:end]}]
		for is && next.id != root.id {
			root = next
			next, is = at[[2]string{root.id, path[:end]}]
		}
	}
	return root
}

// hiddenErr says that the network namespace cannot be looked at, and which mount hides it.
func hiddenErr(all []mount, link string, err error) error {
	i := slices.IndexFunc(all, func(m mount) bool { return m.root == link })
	if i < 0 {
		return fmt.Errorf("another mount hides network namespace %s: %w", link, err)
	}
	if covers, ok := coversOf(all, all[i]); ok && len(covers) > 0 {
		return fmt.Errorf("the mount at %s hides the network namespace at %s: %w", covers[0], all[i].point, err)
	}
	return fmt.Errorf("no path reaches the network namespace mounted at %s: %w", all[i].point, err)
}
