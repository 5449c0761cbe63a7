package host

import (
	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// peers are the IDs of the network namespaces in which interfaces of the host have their other end.
type peers struct {
	ids map[int]bool // nil: nobody has looked, or the look failed
}

// anybodys reports whether any local user may have created a network namespace that is mounted
// nowhere: a user can create a user namespace without rights, and is root in it. An interface
// there, with a pod's name and address, proves nothing.
//
//   - A namespace that belongs to this process's user namespace, or to an ancestor of it, required
//     rights there. This is the initial user namespace, or that of a node which is a container.
//   - A namespace of a descendant may belong to a pod with a user namespace. Runtimes mount it
//     (containerd, pkg/netns/netns_linux.go: NewNetNSFromPID; CRI-O, pinns/src/pinns.c). If a
//     runtime does not (nerdctl, pkg/ocihook/ocihook.go: getNetNSPath), the interface has its other
//     end on the host, which required rights there.
//
// In doubt it returns false.
func (p *peers) anybodys(netns ns.NetNS) bool {
	owner, err := unix.IoctlRetInt(int(netns.Fd()), unix.NS_GET_USERNS)
	if err != nil { // EPERM: of one above; ENOTTY: a kernel before 4.9
		return false
	}
	defer unix.Close(owner)
	var theirs, own unix.Stat_t
	if unix.Fstat(owner, &theirs) != nil || unix.Stat("/proc/thread-self/ns/user", &own) != nil ||
		theirs.Dev == own.Dev && theirs.Ino == own.Ino {
		return false
	}
	return !p.has(netns)
}

// has reports whether an interface of the host has its other end in a network namespace. In doubt
// it returns true. The kernel assigns the namespace an ID on the host when it lists that interface.
func (p *peers) has(netns ns.NetNS) bool {
	for try := 0; p.ids == nil && try < 3; try++ { // a change meanwhile cuts a list off
		links, err := netlink.LinkList()
		if err != nil {
			continue
		}
		p.ids = map[int]bool{}
		for _, link := range links {
			p.ids[link.Attrs().NetNsID] = true
		}
	}
	id, err := netlink.GetNetNsIdByFd(int(netns.Fd()))
	return p.ids == nil || err != nil || id >= 0 && p.ids[id]
}
