package plugin

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
)

// thisHost returns the machine, boot and namespaces in which this process looks at things. What cannot be read is "".
func thisHost() journal.Host {
	h := namespaces("/proc/self/ns/")
	h.BootID = firstLine("/proc/sys/kernel/random/boot_id")
	if id := strings.ToLower(firstLine("/sys/class/dmi/id/product_uuid")); strings.Trim(id, "0f-") != "" {
		h.Machine = "dmi:" + id
	} else if id := firstLine("/etc/machine-id"); id != "" {
		h.Machine = "machine-id:" + id
	}
	return h
}

// namespaces returns those of the process whose folder in /proc is given.
func namespaces(dir string) (h journal.Host) {
	h.MountNS, _ = os.Readlink(dir + "mnt")
	h.PIDNS, _ = os.Readlink(dir + "pid")
	h.NetNS, _ = os.Readlink(dir + "net")
	h.TimeNS, _ = os.Readlink(dir + "time")
	return h
}

func firstLine(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	line, _ := bufio.NewReader(f).ReadString('\n')
	return strings.TrimSpace(line)
}

// identify opens a network namespace and tells which one it is.
func identify(path string) (journal.NetNS, error) {
	netns, err := ns.GetNS(path)
	if err != nil {
		return journal.NetNS{Path: path}, err
	}
	defer netns.Close()
	return identity(netns, path)
}

func identity(netns ns.NetNS, path string) (journal.NetNS, error) {
	id := journal.NetNS{Path: path}
	var st unix.Stat_t
	if err := unix.Fstat(int(netns.Fd()), &st); err != nil {
		return id, err
	}
	// Kernels before 5.14 have no cookie to give to a socket; an error leaves it at zero.
	err := inNetNS(netns, func() error {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		id.Cookie, _ = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
		return nil
	})
	if err != nil {
		return journal.NetNS{Path: path}, err
	}
	id.Dev, id.Ino = st.Dev, st.Ino
	return id, nil
}

// inNetNS runs fn in a network namespace.
func inNetNS(netns ns.NetNS, fn func() error) (err error) {
	onThread(func() {
		if err = unix.Setns(int(netns.Fd()), unix.CLONE_NEWNET); err != nil {
			err = fmt.Errorf("entering network namespace %s: %w", netns.Path(), err)
			return
		}
		err = fn()
	})
	return err
}

// onThread runs fn on a thread that ends with it, so that nobody else gets one which is in another network namespace. It is
// never the first thread of the process: where that one is, /proc says that the process is, and we look for processes there.
func onThread(fn func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if unix.Gettid() == os.Getpid() {
			onThread(fn) // while this one waits
			runtime.UnlockOSThread()
			return
		}
		fn()
	}()
	<-done
}

// processIn returns a process that is in the network namespace, or 0 if none is. An error means that it is not known.
func processIn(id journal.NetNS) (pid int, err error) {
	pid, there, err := openByProcess(id)
	if there != nil {
		_ = there.Close()
	}
	return pid, err
}

// openByProcess is as processIn, and opens the network namespace: the process may end at any time, and its number be given
// to one that is elsewhere.
func openByProcess(id journal.NetNS) (pid int, there ns.NetNS, err error) {
	want := fmt.Sprintf("net:[%d]", id.Ino)
	err = eachProcess(func(pidThere int, proc string) (bool, error) {
		link, err := os.Readlink(proc + "/ns/net")
		if err != nil {
			return false, ignoreGone(err)
		}
		if link != want {
			return false, nil
		}
		netns, err := ns.GetNS(proc + "/ns/net")
		if err != nil {
			return false, ignoreGone(err)
		}
		if found, err := identity(netns, ""); err != nil || !id.Same(found) {
			_ = netns.Close()
			return false, err
		}
		pid, there = pidThere, netns
		return true, nil
	})
	return pid, there, err
}

// delegatesOf returns the processes that hold a lock as delegates do, as descriptor lockFD. An unwind that waits for the
// lock has the file open too, and is none of them.
func delegatesOf(lock *os.File) (pids []int, err error) {
	var want unix.Stat_t
	if err := unix.Fstat(int(lock.Fd()), &want); err != nil {
		return nil, err
	}
	err = eachProcess(func(pid int, proc string) (bool, error) {
		var st unix.Stat_t
		if unix.Stat(fmt.Sprintf("%s/fd/%d", proc, lockFD), &st) != nil || st.Dev != want.Dev || st.Ino != want.Ino {
			return false, nil //nolint:nilerr // it has no such descriptor
		}
		info, err := os.ReadFile(fmt.Sprintf("%s/fdinfo/%d", proc, lockFD))
		if pid != os.Getpid() && err == nil && bytes.Contains(info, []byte("FLOCK")) {
			pids = append(pids, pid)
		}
		return false, nil
	})
	return pids, err
}

// eachProcess calls fn for every process until it returns true or an error.
func eachProcess(fn func(pid int, proc string) (stop bool, err error)) error {
	dir, err := os.Open("/proc")
	if err != nil {
		return err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return err
	}
	found := false
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		found = true
		if stop, err := fn(pid, "/proc/"+name); stop || err != nil {
			return err
		}
	}
	if !found {
		return fmt.Errorf("/proc shows no process; it is not mounted")
	}
	return nil
}

// ignoreGone drops the errors of looking at a process that has just ended.
func ignoreGone(err error) error {
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) || errors.As(err, new(ns.NSPathNotExistErr)) {
		return nil
	}
	return err
}

// hostLinks returns the host's ends of the container's interfaces that a result names: the veths among the interfaces
// without a sandbox. The others (a bridge, a macvlan's master) outlive the container.
func hostLinks(r *result) []journal.HostLink {
	var links []journal.HostLink
	for _, i := range r.Interfaces {
		if i.Sandbox != "" || i.Name == "" {
			continue
		}
		if link, err := netlink.LinkByName(i.Name); err == nil && link.Type() == "veth" {
			links = append(links, journal.HostLink{Name: i.Name, MAC: link.Attrs().HardwareAddr.String()})
		}
	}
	return links
}

// hostLinkThere says whether one of the links is on this host. An error means that it is not known.
func hostLinkThere(links []journal.HostLink) (bool, error) {
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

// linkIn says whether an interface is in a network namespace.
func linkIn(path, name string) (there bool, err error) {
	netns, err := ns.GetNS(path)
	if err != nil {
		return false, err
	}
	defer netns.Close()
	err = inNetNS(netns, func() error {
		_, err := netlink.LinkByName(name)
		if errors.As(err, new(netlink.LinkNotFoundError)) {
			return nil
		}
		there = err == nil
		return err
	})
	return there, err
}

// hasAddress says whether an interface in the network namespace has the address.
func hasAddress(netns journal.NetNS, address netip.Addr) (found bool, err error) {
	there, err := ns.GetNS(netns.Path)
	if err != nil {
		return false, err
	}
	defer there.Close()
	if id, err := identity(there, netns.Path); err != nil || !id.Same(netns) {
		return false, err
	}
	all := map[netip.Addr]bool{}
	err = collectAddresses(there, all)
	return all[address.Unmap()], err
}

// scratchNetNS makes a network namespace with one interface that has the given name and addresses, for plugins that
// find what they have to clean up on the container's interface when the container's namespace is gone. It is kept by a
// thread of this process alone, so nothing is left of it when we die.
func scratchNetNS(ifname string, addresses []netip.Prefix) (path string, remove func(), err error) {
	ready, done := make(chan error), make(chan struct{})
	go onThread(func() {
		path, err = func() (string, error) {
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				return "", fmt.Errorf("scratch network namespace: %w", err)
			}
			return fmt.Sprintf("/proc/%d/task/%d/ns/net", os.Getpid(), unix.Gettid()), fillScratch(ifname, addresses)
		}()
		ready <- err
		<-done
	})
	if err := <-ready; err != nil {
		close(done)
		return "", nil, err
	}
	return path, func() { close(done) }, nil
}

// fillScratch makes the interface in the current network namespace.
func fillScratch(ifname string, addresses []netip.Prefix) error {
	link := &netlink.Veth{LinkAttrs: netlink.NewLinkAttrs(), PeerName: "unwind-peer"}
	link.Name = ifname
	if err := netlink.LinkAdd(link); err != nil {
		return fmt.Errorf("scratch interface %s: %w", ifname, err)
	}
	// Where IPv6 is off by default, the container's interface had it switched on. Without IPv6 there is no such file.
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
