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

// Place is a path to a network namespace. Its zero value has none.
type Place struct {
	Path string
	held ns.NetNS // the namespace at Path, if this process holds it open
}

// Close closes the namespace. Afterwards the path may not exist, or be another namespace.
func (p Place) Close() {
	if p.held != nil {
		_ = p.held.Close()
	}
}

// placeOf returns a path to a network namespace that this process holds open.
func placeOf(held ns.NetNS) Place {
	return Place{fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), held.Fd()), held}
}

// Find returns a path to the network namespace: the path of its ADD, or a mount of it, even a
// hidden one. If there is none, the place is empty. Find searches only this process's mount
// namespace.
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
// namespace and for which wanted returns true, given the text of a link to them; fn closes them.
// The path is "" for one whose mounts are all hidden by others. with is a part of each link that
// may be wanted. eachMounted calls wanted for each mount of a network namespace, and again before
// it uncovers hidden mounts.
//
// An error instead of a namespace means that it is mounted but cannot be inspected.
func eachMounted(with string, wanted func(link string) bool,
	fn func(link, path string, netns ns.NetNS, err error),
) error {
	var hidden []string
	mounts, err := mountsOf("/proc/self", " "+with)
	for _, m := range mounts {
		if !strings.HasPrefix(m.root, anyNetNS) || !wanted(m.root) {
			continue
		}
		if netns, err := openLink(m.point, m.root); err == nil {
			fn(m.root, m.point, netns, nil)
		} else if !slices.Contains(hidden, m.root) {
			hidden = append(hidden, m.root)
		}
	}
	hidden = slices.DeleteFunc(hidden, func(link string) bool { return !wanted(link) })
	for len(hidden) > 0 {
		hidden = uncoverEach(hidden, fn)
	}
	return err
}

// anyNetNS is the beginning of the text of a link to any network namespace.
const anyNetNS = "net:["

// openLink opens the network namespace at a path, if it is the one that the text of a link names.
func openLink(path, link string) (ns.NetNS, error) {
	netns, err := ns.GetNS(path)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err = unix.Fstat(int(netns.Fd()), &st); err == nil &&
		LinkOf(journal.NetNS{Ino: st.Ino}) == link {
		return netns, nil
	}
	_ = netns.Close()
	return nil, errors.Join(err, fmt.Errorf("%s is another network namespace", path))
}

// uncoverEach opens network namespaces whose mounts are all hidden by other mounts, so that no path
// reaches them: a runtime mounts /run/netns/cni-x, and the node's first `ip netns add` then binds
// /run/netns over itself (iproute2 6.12, ip/ipnetns.c: netns_add). A thread with a copy of the
// mount namespace unmounts the covers in that copy. The node's own mounts stay as they are.
//
// uncoverEach calls fn for at least one of the namespaces, and returns the others, because
// unmounting a cover also removes the mounts on it. It omits namespaces that are no longer mounted.
func uncoverEach(
	links []string, fn func(link, path string, netns ns.NetNS, err error),
) (rest []string) {
	OnThread(func() {
		err := copyMounts()
		mounts, readErr := mountsOf("/proc/thread-self", "")
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
				left, readErr = mountsOf("/proc/thread-self", "")
			}
		}
	})
	return rest
}

// copyMounts gives the thread a copy of the mount namespace. Changes of the copy do not affect the
// original. Shared mounts that are unmounted in the original are also unmounted in the copy, so the
// copy keeps no file system busy.
func copyMounts() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("cannot create a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("cannot separate a mount namespace from the host's: %w", err)
	}
	return nil
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

// coversOf returns the mount points of the mounts that hide another one, the topmost first, or
// false if something else hides it.
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

// leadsTo returns the mount at a path, from the root of a mount namespace.
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

// hiddenErr returns the error for a network namespace that cannot be inspected, with the mount that
// hides it.
func hiddenErr(all []mount, link string, err error) error {
	i := slices.IndexFunc(all, func(m mount) bool { return m.root == link })
	if i < 0 {
		return fmt.Errorf("another mount hides network namespace %s: %w", link, err)
	}
	if covers, ok := coversOf(all, all[i]); ok && len(covers) > 0 {
		return fmt.Errorf("the mount at %s hides the network namespace at %s: %w", covers[0],
			all[i].point, err)
	}
	return fmt.Errorf("no path reaches the network namespace mounted at %s: %w", all[i].point, err)
}
