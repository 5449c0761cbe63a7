// Package facts inspects the node: network namespaces with their processes, mounts and interfaces,
// libcni's cache, and the runtime's list. It changes nothing. Package decide turns the facts into
// verdicts.
package facts

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/record"
	"cni-unwind/plugin/tristate"
)

// Node is the node as one process sees it, with that process's input from the runtime. Its methods
// only read: from the kernel, libcni's cache, and the journal.
type Node struct {
	Journal *record.Recorder
	Log     *slog.Logger
	Host    journal.Host
	// Invoked is set if a runtime started this process (see SameNamespaces).
	Invoked bool
	// List is the runtime's list of attachments, or nil.
	List *List
	// Network is the network whose configuration this process has read. GracePeriod comes from it.
	Network     string
	GracePeriod time.Duration
	// ListGrace, if not 0, replaces every grace period that a list needs before it proves something
	// dead.
	ListGrace time.Duration
	// CacheDir is the directory of libcni's cache of results; "" means the one that all runtimes
	// use.
	CacheDir string
	View     *View // shared by all workers of a process
}

// Fork returns a copy of the node for another goroutine, with a recorder of its own.
func (n *Node) Fork() *Node {
	fork := *n
	fork.Journal = n.Journal.Fork()
	return &fork
}

// This returns the machine, the boot and the namespaces of this process. A field that cannot be
// read is "".
func This() journal.Host {
	h := namespacesOf("/proc/self")
	h.BootID = firstLine("/proc/sys/kernel/random/boot_id")
	h.Machine = machineOf(firstLine("/sys/class/dmi/id/product_uuid"), firstLine("/etc/machine-id"))
	return h
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

// SearchPaths returns the variables of this process in which plugins look for iptables and its
// extensions, as a record stores them.
func SearchPaths() map[string]string {
	env := map[string]string{}
	for _, name := range []string{"PATH", "LD_LIBRARY_PATH", "XTABLES_LIBDIR"} {
		env[name] = present(os.Getenv(name))
	}
	return env
}

// SearchPathsThere reports whether all directories of recorded search paths exist. It is false if
// none are recorded.
func SearchPathsThere(env map[string]string) bool {
	for _, dirs := range env {
		if present(dirs) != dirs {
			return false
		}
	}
	return len(env) > 0
}

// present returns the absolute directories of a path list that exist.
func present(list string) string {
	dirs := slices.DeleteFunc(filepath.SplitList(list), func(dir string) bool {
		info, err := os.Stat(dir)
		return !filepath.IsAbs(dir) || err != nil || !info.IsDir()
	})
	return strings.Join(dirs, string(filepath.ListSeparator))
}

// SameBoot reports whether an ADD ran in the current boot.
func (n *Node) SameBoot(e *journal.Entry) tristate.Value {
	theirs, ours := e.Added.Host.BootID, n.Host.BootID
	return tristate.Equal(theirs != "" && ours != "", theirs == ours)
}

// otherHost reports whether an ADD ran on another machine. The result is unknown if one machine is
// identified by its DMI UUID and the other by its machine-id.
func (n *Node) otherHost(e *journal.Entry) tristate.Value {
	ours, _, _ := strings.Cut(n.Host.Machine, ":")
	theirs, _, _ := strings.Cut(e.Added.Host.Machine, ":")
	return tristate.Equal(ours != "" && ours == theirs, e.Added.Host.Machine != n.Host.Machine)
}

// SameNamespaces reports whether this process runs in the namespaces of an ADD. Only then is a
// namespace or process that it cannot see really gone. In a container with the state directory
// mounted, every network namespace looks gone and empty. The number of a namespace means nothing in
// another boot. The only exception is the initial PID namespace; its process 1 runs in the other
// initial namespaces.
func (n *Node) SameNamespaces(e *journal.Entry) tristate.Value {
	theirs := e.Added.Host
	if n.SameBoot(e) == tristate.No {
		theirs = namespacesOf("/proc/1")
		theirs.PIDNS = e.Added.Host.PIDNS
	}
	return n.inNamespaces(theirs)
}

// inNamespaces reports whether this process runs in the given namespaces. A runtime starts every
// verb in the same namespaces, so a process that a runtime started needs no check.
func (n *Node) inNamespaces(theirs journal.Host) tristate.Value {
	differ := func(theirs, ours string) bool { return theirs != "" && theirs != ours }
	switch ours := n.Host; {
	case n.Invoked:
		return tristate.Yes
	case ours.MountNS == "" || ours.PIDNS == "" || theirs.MountNS == "" || theirs.PIDNS == "":
		return tristate.Unknown
	case differ(theirs.MountNS, ours.MountNS), differ(theirs.PIDNS, ours.PIDNS),
		differ(theirs.NetNS, ours.NetNS), differ(theirs.TimeNS, ours.TimeNS):
		return tristate.No
	}
	return tristate.Yes
}

// firstPIDNS is the number of the kernel's first PID namespace (PROC_PID_INIT_INO in
// include/linux/proc_ns.h).
const firstPIDNS = "pid:[4026531836]"

// seesAsRuntime reports whether this process runs in the runtime's namespaces, if there is no
// recorded ADD to compare with. Either of two facts proves it. This process is in the namespaces of
// each runtime that returned the list, even if these are a container's (kind, k3d, LXC). Or this
// process is in the initial PID namespace and in the other namespaces of process 1. (A container
// has its own process 1, but not the initial PID namespace.)
func (n *Node) seesAsRuntime() (bool, error) {
	if n.List != nil && len(n.List.Runtimes) > 0 &&
		!slices.ContainsFunc(n.List.Runtimes, func(pid int) bool {
			return pid == 0 || n.inNamespaces(namespacesOf(procOf(pid))) != tristate.Yes
		}) {
		return true, nil
	}
	first := namespacesOf("/proc/1")
	first.PIDNS = firstPIDNS
	if n.inNamespaces(first) == tristate.Yes {
		return true, nil
	}
	_, err := os.Readlink("/proc/1/ns/mnt")
	return false, err
}

// IsHost reports whether a network namespace is the one of this process.
func (n *Node) IsHost(netns journal.NetNS) bool {
	return n.Host.NetNS != "" && LinkOf(netns) == n.Host.NetNS
}

// Names reports whether a path names the network namespace of a record's ADD, by which alone an ADD
// is known: the path leads to that namespace, or is the ADD's path. The ADD's path doesn't count if
// it leads to another namespace, unless the ADD's own one is gone and no ADD that the journal
// doesn't have uses the other one. Any path names the namespace of a record that has no path.
//
// at is what the path leads to. It has only the path if that leads nowhere, to another attachment
// in the journal, or to the runtime's own namespace.
func (n *Node) Names(e *journal.Entry, at Interface) bool {
	switch same := SamePath(e.Added.NetNS.Path, at.Netns.Path); {
	case e.Added.NetNS.Path == "":
		return true
	case !at.Netns.Known():
		return same
	case n.IsAt(e, at.Netns):
		return true
	default:
		return same && !at.Again && n.isGone(e)
	}
}

// IsAt reports whether a path leads to the network namespace of a record's ADD. Without cookies, an
// inode may have been reused, so the paths must be the same, too.
func (n *Node) IsAt(e *journal.Entry, at journal.NetNS) bool {
	hasCookies := e.Added.NetNS.Cookie != 0 && at.Cookie != 0
	return n.SameBoot(e) != tristate.No && e.Added.NetNS.Same(at) &&
		(hasCookies || SamePath(e.Added.NetNS.Path, at.Path))
}

// isGone reports whether the network namespace of a record's ADD is gone, or was not identified.
func (n *Node) isGone(e *journal.Entry) bool {
	if !e.Added.NetNS.Known() || n.SameBoot(e) == tristate.No {
		return true
	}
	place, err := Find(e.Added.NetNS, "")
	place.Close()
	if place.There() || err != nil {
		return false
	}
	inside, err := n.View.ProcessIn(e.Added.NetNS, true)
	return !inside && err == nil
}

// SamePath reports whether two paths are the same, after the links in their directories, such as
// /var/run, have been resolved.
func SamePath(a, b string) bool { return a != "" && resolved(a) == resolved(b) }

func resolved(path string) string {
	dir, name := filepath.Split(path)
	if real, err := filepath.EvalSymlinks(dir); err == nil {
		dir = real
	}
	return filepath.Join(dir, name)
}

// Anothers reports whether another attachment in the journal, with the same interface name, uses a
// network namespace. A damaged record does not count.
func (n *Node) Anothers(ctx context.Context, key journal.Key, netns journal.NetNS) bool {
	living, _ := n.Journal.Snapshot(ctx).Living()
	return slices.ContainsFunc(living, func(o *journal.Entry) bool {
		return o.Key != key && o.IfName == key.IfName && n.SameBoot(o) == tristate.Yes &&
			o.Added.NetNS.Same(netns)
	})
}
