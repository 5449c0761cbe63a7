package host

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
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
	var hidden []mount
	mounts, err := mountsOf("/proc/self", " "+with)
	for _, m := range mounts {
		if !strings.HasPrefix(m.root, anyNetNS) || !wanted(m.root) {
			continue
		}
		if netns, err := openLink(m.point, m.root); err == nil {
			fn(m.root, m.point, netns, nil)
		} else if !slices.ContainsFunc(hidden, func(o mount) bool { return o.root == m.root }) {
			hidden = append(hidden, m)
		}
	}
	hidden = slices.DeleteFunc(hidden, func(m mount) bool { return !wanted(m.root) })
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
	hidden []mount, fn func(link, path string, netns ns.NetNS, err error),
) (rest []mount) {
	OnThread(func() {
		if err := copyMounts(); err != nil {
			for _, m := range hidden {
				fn(m.root, "", nil, fmt.Errorf("the mount at %s hides the network namespace at %s: %w",
					leadsTo(m.point), m.point, err))
			}
			return
		}
		removed := false
		for _, m := range hidden {
			netns, removes, err := uncover(m)
			switch {
			case err == nil:
				fn(m.root, "", netns, nil)
			case removed:
				rest = append(rest, m)
			case isMounted(m.root):
				fn(m.root, "", nil, fmt.Errorf("no path reaches the network namespace mounted at %s: %w",
					m.point, err))
			}
			removed = removed || removes
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

// uncover unmounts what is in the way to a mount, and opens the network namespace there. As long as
// the path does not lead to the mount, whatever is mounted furthest down the path is in the way.
func uncover(m mount) (netns ns.NetNS, removes bool, err error) {
	for {
		if netns, err = openLink(m.point, m.root); err == nil {
			return netns, removes, nil
		}
		path := m.point
		for path != "/" && unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW) != nil {
			path = filepath.Dir(path)
		}
		if path == "/" {
			return nil, removes, err
		}
		removes = true
	}
}

// isMounted reports whether a network namespace is still mounted in this process's mount namespace.
func isMounted(link string) bool {
	mounts, err := mountsOf("/proc/self", " "+link+" ")
	return len(mounts) > 0 || err != nil
}

// leadsTo returns the mount point of the mount to which a path leads, as far as it exists.
func leadsTo(path string) string {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil && path != "/" {
		return leadsTo(filepath.Dir(path))
	}
	defer unix.Close(fd)
	info, _ := os.ReadFile(fmt.Sprintf("/proc/thread-self/fdinfo/%d", fd))
	mounts, _ := mountsOf("/proc/thread-self", "")
	for _, m := range mounts {
		if bytes.Contains(info, []byte("mnt_id:\t"+m.id+"\n")) {
			return m.point
		}
	}
	return path
}
