// Package facts inspects the node: network namespaces and their processes, mounts, interfaces,
// firewall rules, libcni's cache, host-local's files and the runtime's list. It does not change
// anything. Package decide turns the facts into verdicts.
package facts

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
)

// This returns the machine, the boot and the namespaces of this process. A field that cannot be
// read is "".
func This() journal.Host {
	h := namespacesOf("/proc/self")
	h.BootID = firstLine("/proc/sys/kernel/random/boot_id")
	h.Machine = machineOf(firstLine("/sys/class/dmi/id/product_uuid"), firstLine("/etc/machine-id"))
	return h
}

// searchPaths are the variables in which plugins look for programs and libraries: iptables, and its
// extensions.
var searchPaths = []string{"PATH", "LD_LIBRARY_PATH", "XTABLES_LIBDIR"}

// SearchPaths returns the search paths of this process, as a record stores them.
func SearchPaths() map[string]string {
	env := map[string]string{}
	for _, name := range searchPaths {
		dirs := slices.DeleteFunc(filepath.SplitList(os.Getenv(name)), func(dir string) bool {
			return !filepath.IsAbs(dir) || !isDirectory(dir)
		})
		env[name] = strings.Join(dirs, string(filepath.ListSeparator))
	}
	return env
}

// SearchPathsThere reports whether all directories of recorded search paths exist. It is false if
// none are recorded.
func SearchPathsThere(env map[string]string) bool {
	for _, dirs := range env {
		for _, dir := range filepath.SplitList(dirs) {
			if !isDirectory(dir) {
				return false
			}
		}
	}
	return len(env) > 0
}

func isDirectory(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// machineOf returns the name of a machine: its DMI UUID, or its machine-id if the UUID is not
// valid. The UUID comes first because a machine-id may change at each boot.
func machineOf(uuid, id string) string {
	uuid = strings.ToLower(uuid)
	switch {
	case strings.Trim(uuid, "0f-") != "":
		return "dmi:" + uuid
	case id != "":
		return "machine-id:" + id
	}
	return ""
}

// namespacesOf returns the namespaces of a process, given its directory in /proc.
func namespacesOf(proc string) (h journal.Host) {
	h.MountNS, _ = os.Readlink(proc + "/ns/mnt")
	h.PIDNS, _ = os.Readlink(proc + "/ns/pid")
	h.NetNS, _ = os.Readlink(proc + "/ns/net")
	h.TimeNS, _ = os.Readlink(proc + "/ns/time")
	return h
}

func firstLine(path string) string {
	text, _ := os.ReadFile(path)
	line, _, _ := strings.Cut(string(text), "\n")
	return strings.TrimSpace(line)
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

// OnThread runs fn on a thread that ends after fn, so that no other goroutine gets a thread in
// another network namespace. It never uses the main thread, because /proc shows that thread's
// namespace as the namespace of the process.
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

// HoldersOf returns the processes that hold the lock of a file through the given descriptor, as
// delegates do. It omits an unwind process that has the file open but only waits
// for the lock.
func HoldersOf(path string, descriptor int) (pids []int, err error) {
	var want, st unix.Stat_t
	if err := unix.Stat(path, &want); err != nil {
		return nil, err
	}
	all, err := Processes()
	for _, pid := range all {
		if unix.Stat(fmt.Sprintf("/proc/%d/fd/%d", pid, descriptor), &st) != nil ||
			st.Dev != want.Dev || st.Ino != want.Ino {
			continue
		}
		info, _ := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%d", pid, descriptor))
		if pid != os.Getpid() && bytes.Contains(info, []byte("OFDLCK")) {
			pids = append(pids, pid)
		}
	}
	return pids, err
}

// HostLinks returns the host ends of the container's interfaces in a result: those interfaces
// without a sandbox that are veths. The others, such as a bridge or a macvlan's master, outlive the
// container.
func HostLinks(r *netconf.Result) []journal.HostLink {
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

// LinkThere reports whether one of the links exists on this host. An error means that this is
// unknown.
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
