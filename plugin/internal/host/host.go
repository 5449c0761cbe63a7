// Package host inspects the node: network namespaces and the processes in them, mounts, interfaces,
// and the rules of iptables and nftables. It draws no conclusions.
package host

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
)

// This returns the machine, the boot and the namespaces of this process. A part that cannot be read
// is "".
func This() journal.Host {
	h := namespaces("/proc/self/ns/")
	h.BootID = firstLine("/proc/sys/kernel/random/boot_id")
	id := strings.ToLower(firstLine("/sys/class/dmi/id/product_uuid"))
	if strings.Trim(id, "0f-") != "" {
		h.Machine = "dmi:" + id
	} else if id := firstLine("/etc/machine-id"); id != "" {
		h.Machine = "machine-id:" + id
	}
	return h
}

// NamespacesOf returns the namespaces of a process. A part that cannot be read is "".
func NamespacesOf(pid int) journal.Host { return namespaces(procOf(pid) + "/ns/") }

func namespaces(dir string) (h journal.Host) {
	h.MountNS, _ = os.Readlink(dir + "mnt")
	h.PIDNS, _ = os.Readlink(dir + "pid")
	h.NetNS, _ = os.Readlink(dir + "net")
	h.TimeNS, _ = os.Readlink(dir + "time")
	return h
}

func firstLine(path string) string {
	text, _ := os.ReadFile(path)
	line, _, _ := strings.Cut(string(text), "\n")
	return strings.TrimSpace(line)
}

// Identify opens a network namespace and returns its identity.
func Identify(path string) (journal.NetNS, error) {
	netns, err := ns.GetNS(path)
	if err != nil {
		return journal.NetNS{Path: path}, err
	}
	defer netns.Close()
	return identity(netns, path)
}

func identity(netns ns.NetNS, path string) (journal.NetNS, error) {
	return identityAnd(netns, path, func() error { return nil })
}

// identityAnd is identity, and also runs fn in the network namespace.
func identityAnd(netns ns.NetNS, path string, fn func() error) (journal.NetNS, error) {
	id := journal.NetNS{Path: path}
	var st unix.Stat_t
	if err := unix.Fstat(int(netns.Fd()), &st); err != nil {
		return id, err
	}
	// Kernels before 5.14 give a socket no cookie; an error leaves it at zero.
	err := In(netns, func() error {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		id.Cookie, _ = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
		id.NetDev, _ = netDevOf("/proc/thread-self")
		return fn()
	})
	if err != nil {
		return journal.NetNS{Path: path}, err
	}
	id.Dev, id.Ino = st.Dev, st.Ino
	return id, nil
}

// In runs fn in a network namespace.
func In(netns ns.NetNS, fn func() error) (err error) {
	OnThread(func() {
		if err = unix.Setns(int(netns.Fd()), unix.CLONE_NEWNET); err != nil {
			err = fmt.Errorf("cannot enter network namespace %s: %w", netns.Path(), err)
			return
		}
		err = fn()
	})
	return err
}

// OnThread runs fn on a thread that ends with it, so that no other goroutine gets a thread in
// another network namespace. It never uses the main thread of the process: /proc shows the
// namespace of that thread as the process's.
func OnThread(fn func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if unix.Gettid() == os.Getpid() {
			OnThread(fn) // while this thread waits
			runtime.UnlockOSThread()
			return
		}
		fn()
	}()
	<-done
}

// HoldersOf returns the processes that hold a lock as delegates do, at the given descriptor. It
// omits an unwind that waits for the lock and also has the file open.
func HoldersOf(lock *os.File, descriptor int) (pids []int, err error) {
	var want unix.Stat_t
	if err := unix.Fstat(int(lock.Fd()), &want); err != nil {
		return nil, err
	}
	all, err := Processes()
	for _, pid := range all {
		var st unix.Stat_t
		if unix.Stat(fmt.Sprintf("/proc/%d/fd/%d", pid, descriptor), &st) != nil || st.Dev != want.Dev ||
			st.Ino != want.Ino {
			continue
		}
		info, _ := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%d", pid, descriptor))
		if pid != os.Getpid() && bytes.Contains(info, []byte("FLOCK")) {
			pids = append(pids, pid)
		}
	}
	return pids, err
}

// LinkThere reports whether one of the links exists on this host. An error means unknown.
func LinkThere(links []journal.HostLink) (bool, error) {
	for _, l := range links {
		link, err := netlink.LinkByName(l.Name)
		if errors.As(err, new(netlink.LinkNotFoundError)) {
			continue
		}
		if err != nil {
			return false, err
		}
		if link.Attrs().HardwareAddr.String() == l.MAC {
			return true, nil
		}
	}
	return false, nil
}

// ScratchNetNS creates a network namespace with one interface that has the given name and
// addresses, or without one if ifname is "". It is for plugins that find what to remove by the
// container's interface, when the container's namespace is gone. Only a thread of this process
// keeps the namespace, so a crash leaves nothing behind.
func ScratchNetNS(ifname string, addresses []netip.Prefix) (path string, remove func(), err error) {
	ready, done := make(chan error), make(chan struct{})
	go OnThread(func() {
		path = fmt.Sprintf("/proc/%d/task/%d/ns/net", os.Getpid(), unix.Gettid())
		err := unix.Unshare(unix.CLONE_NEWNET)
		switch {
		case err != nil:
			err = fmt.Errorf("scratch network namespace: %w", err)
		case ifname != "":
			err = fillScratch(ifname, addresses, nil)
		}
		ready <- err
		<-done
	})
	if err := <-ready; err != nil {
		close(done)
		return "", nil, err
	}
	return path, func() { close(done) }, nil
}

// LendInterface is like ScratchNetNS, but creates the interface in the network namespace at a path.
// The interface is down, so its addresses have no effect. Its other end is in a scratch namespace,
// so a crash leaves neither end behind.
func LendInterface(path, ifname string, addresses []netip.Prefix) (remove func(), err error) {
	netns, err := ns.GetNS(path)
	if err != nil {
		return nil, err
	}
	defer netns.Close()
	scratch, drop, err := ScratchNetNS("", nil)
	if err != nil {
		return nil, err
	}
	peer, err := ns.GetNS(scratch)
	if err != nil {
		drop()
		return nil, err
	}
	remove = func() {
		_ = In(peer, func() error { // at once: the kernel takes its time with a namespace
			link, err := netlink.LinkByName(peerName)
			if err == nil {
				err = netlink.LinkDel(link)
			}
			return err
		})
		_ = peer.Close()
		drop()
	}
	if err := In(netns, func() error { return fillScratch(ifname, addresses, peer) }); err != nil {
		remove()
		return nil, err
	}
	return remove, nil
}

// peerName is the other end of an interface in a scratch namespace.
const peerName = "unwind-peer"

// fillScratch creates the interface in the current network namespace, and its other end there or in
// another namespace.
func fillScratch(ifname string, addresses []netip.Prefix, peer ns.NetNS) error {
	link := &netlink.Veth{LinkAttrs: netlink.NewLinkAttrs(), PeerName: peerName}
	link.Name = ifname
	if peer != nil {
		link.PeerNamespace = netlink.NsFd(peer.Fd())
	}
	if err := netlink.LinkAdd(link); err != nil {
		return fmt.Errorf("scratch interface %s: %w", ifname, err)
	}
	// The container's interface had IPv6 on even where it is off by default. Without IPv6 there is
	// no such file.
	_ = os.WriteFile("/proc/sys/net/ipv6/conf/"+ifname+"/disable_ipv6", []byte("0"), 0)
	for _, prefix := range addresses {
		addr, err := netlink.ParseAddr(prefix.String())
		if err != nil {
			return err
		}
		addr.Flags = unix.IFA_F_NODAD
		if err := netlink.AddrAdd(link, addr); err != nil && !errors.Is(err, syscall.EEXIST) {
			return fmt.Errorf("scratch address %s: %w", prefix, err)
		}
	}
	return nil
}

// IsNoNetNS reports whether an error of Identify means that no network namespace is at the path.
func IsNoNetNS(err error) bool {
	return errors.As(err, new(ns.NSPathNotExistErr)) || errors.As(err, new(ns.NSPathNotNSErr))
}

// FirstNamespaces returns the namespaces of process 1; own has those of this process. If process 1
// may not be inspected, FirstNamespaces returns own's if they prove to be the same: a mount is in
// one mount namespace only, net/dev tells network namespaces apart, and clocks have offsets.
func FirstNamespaces(own journal.Host) journal.Host {
	first := namespaces("/proc/1/ns/")
	if first.MountNS != "" {
		return first
	}
	dev, err := netDevOf("/proc/1")
	ours, ownErr := netDevOf("/proc/self")
	theirs, _ := os.ReadFile("/proc/1/timens_offsets") // neither has it before 5.6
	offsets, _ := os.ReadFile("/proc/self/timens_offsets")
	if err != nil || ownErr != nil || dev != ours || !bytes.Equal(theirs, offsets) {
		return first
	}
	mounts, _ := mountsOf("/proc/self", "")
	itsMounts, _ := mountsOf("/proc/1", "")
	if slices.ContainsFunc(mounts, func(m mount) bool {
		return slices.ContainsFunc(itsMounts, func(its mount) bool { return its.id == m.id })
	}) {
		first.MountNS, first.NetNS, first.TimeNS = own.MountNS, own.NetNS, own.TimeNS
	}
	return first
}
