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
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/record"
)

// Node is the node as one process sees it, with that process's input from the runtime. Its methods
// only read: from the kernel, libcni's cache, and the journal.
type Node struct {
	Journal     *record.Recorder
	Log         *slog.Logger
	Host        journal.Host
	Invoked     bool          // a runtime started this process (see SameNamespaces)
	List        *List         // the runtime's list of attachments, or nil
	Network     string        // the network whose configuration this process has read
	GracePeriod time.Duration // from that configuration
	ListGrace   time.Duration // if not 0, replaces every grace period
	CacheDir    string        // the directory of libcni's cache, or "" for the default
	View        *View         // shared by all workers of a process
}

// Fork returns a copy of the node for another goroutine, with a recorder of its own.
func (n *Node) Fork() *Node {
	fork := *n
	fork.Journal = n.Journal.Fork()
	return &fork
}

// This returns the host of this process. A field that cannot be read is "".
func This() journal.Host {
	h := namespacesOf("/proc/self")
	h.BootID = firstLine("/proc/sys/kernel/random/boot_id")
	h.Machine = machineOf(firstLine("/sys/class/dmi/id/product_uuid"), firstLine("/etc/machine-id"))
	return h
}

// wallClock returns the known facts about the wall clock. The kernel creates /dev/null at the
// beginning of a boot, so the file's time shows whether the clock was changed later. In a
// container, the runtime creates the file, so the clock seems to have been changed.
func wallClock() decide.Clock {
	const exact = time.Minute // tolerance for the firmware's clock and for the kernel's start
	c := decide.Clock{SinceBoot: time.Duration(journal.BootNanos())}
	made, err := os.Stat(firstDevice)
	c.Kept = err == nil && (time.Since(made.ModTime())-c.SinceBoot).Abs() < exact
	return c
}

// firstDevice is a file that the kernel creates when it starts.
const firstDevice = "/dev/null"

// machineOf names a machine by its DMI UUID or, if that is not valid, by its machine-id, which may
// change at each boot.
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

// SearchPaths returns the search paths of this process, as a record stores them.
func SearchPaths() map[string]string {
	env := map[string]string{}
	for _, name := range []string{"PATH", "LD_LIBRARY_PATH", "XTABLES_LIBDIR"} {
		env[name] = present(os.Getenv(name))
	}
	return env
}

// SearchPathsThere reports whether search paths are recorded, and all their directories exist.
func SearchPathsThere(env map[string]string) bool {
	for _, dirs := range env {
		if present(dirs) != dirs {
			return false
		}
	}
	return len(env) > 0
}

// present returns those directories of a path list that are absolute and exist.
func present(list string) string {
	dirs := slices.DeleteFunc(filepath.SplitList(list), func(dir string) bool {
		info, err := os.Stat(dir)
		return !filepath.IsAbs(dir) || err != nil || !info.IsDir()
	})
	return strings.Join(dirs, string(filepath.ListSeparator))
}

func (n *Node) SameBoot(e *journal.Record) decide.Truth {
	theirs, ours := e.Added.Host.BootID, n.Host.BootID
	return decide.TruthIf(theirs != "" && ours != "", theirs == ours)
}

// otherHost reports whether an ADD ran on another machine. That is unknown if one machine is
// identified by its DMI UUID, and the other by its machine-id.
func (n *Node) otherHost(e *journal.Record) decide.Truth {
	ours, _, _ := strings.Cut(n.Host.Machine, ":")
	theirs, _, _ := strings.Cut(e.Added.Host.Machine, ":")
	return decide.TruthIf(ours != "" && ours == theirs, e.Added.Host.Machine != n.Host.Machine)
}

// SameNamespaces reports whether this process runs in the namespaces of an ADD. Otherwise, what it
// cannot see may still exist: in a container that mounts the state directory, every network
// namespace of the host seems to be gone. After a reboot, the recorded namespace numbers mean
// nothing, except the number of the initial PID namespace. So for an ADD of an earlier boot, this
// process's PID namespace must have the recorded number, and its other namespaces must be those of
// process 1.
func (n *Node) SameNamespaces(e *journal.Record) decide.Truth {
	theirs := e.Added.Host
	if n.SameBoot(e) == decide.False {
		theirs = namespacesOf("/proc/1")
		theirs.PIDNS = e.Added.Host.PIDNS
	}
	return n.inNamespaces(theirs)
}

// inNamespaces reports whether this process runs in the given namespaces. A process that a runtime
// started always does, because a runtime starts every verb in the same namespaces.
func (n *Node) inNamespaces(theirs journal.Host) decide.Truth {
	differ := func(theirs, ours string) bool { return theirs != "" && theirs != ours }
	switch ours := n.Host; {
	case n.Invoked:
		return decide.True
	case ours.MountNS == "" || ours.PIDNS == "" || theirs.MountNS == "" || theirs.PIDNS == "":
		return decide.Unclear
	case differ(theirs.MountNS, ours.MountNS), differ(theirs.PIDNS, ours.PIDNS),
		differ(theirs.NetNS, ours.NetNS), differ(theirs.TimeNS, ours.TimeNS):
		return decide.False
	}
	return decide.True
}

// firstPIDNS is the initial PID namespace (PROC_PID_INIT_INO in include/linux/proc_ns.h).
const firstPIDNS = "pid:[4026531836]"

// seesAsRuntime is like SameNamespaces, but needs no recorded ADD. One proof is that this process
// shares the namespaces of each runtime that returned the list, even if they are a container's
// (kind, k3d, LXC). The other proof is that it is in the initial PID namespace, which is never a
// container's own, and in process 1's other namespaces.
func (n *Node) seesAsRuntime() (bool, error) {
	elsewhere := func(pid int) bool {
		return pid == 0 || n.inNamespaces(namespacesOf(procOf(pid))) != decide.True
	}
	if n.List != nil && len(n.List.Runtimes) > 0 &&
		!slices.ContainsFunc(n.List.Runtimes, elsewhere) {
		return true, nil
	}
	first := namespacesOf("/proc/1")
	first.PIDNS = firstPIDNS
	if n.inNamespaces(first) == decide.True {
		return true, nil
	}
	_, err := os.Readlink("/proc/1/ns/mnt")
	return false, err
}

// IsHost reports whether a network namespace is this process's own, which is the host's.
func (n *Node) IsHost(netns journal.NetNS) bool {
	return n.Host.NetNS != "" && linkOf(netns) == n.Host.NetNS
}

// IsAt reports whether a network namespace is that of a record's ADD. Without cookies, the paths
// must also be the same, because an inode may have been reused.
func (n *Node) IsAt(e *journal.Record, at journal.NetNS) bool {
	hasCookies := e.Added.NetNS.Cookie != 0 && at.Cookie != 0
	return n.SameBoot(e) != decide.False && e.Added.NetNS.Same(at) &&
		(hasCookies || SamePath(e.Added.NetNS.Path, at.Path))
}

// SamePath reports whether two paths are the same. /var/run is a link to /run.
func SamePath(a, b string) bool { return a != "" && cleaned(a) == cleaned(b) }

func cleaned(path string) string {
	path = filepath.Clean(path)
	if rest, is := strings.CutPrefix(path, "/var/run/"); is {
		return "/run/" + rest
	}
	return path
}

// Anothers reports whether a network namespace belongs to another attachment in the journal, with
// the same interface name as a record. An earlier attachment of the record's own container doesn't
// count: if a provider is replaced, containerd sends the DELs of older pods under the new network's
// name. A damaged record does not count either.
func (n *Node) Anothers(ctx context.Context, e *journal.Record, netns journal.NetNS) bool {
	there, _ := n.Journal.Snapshot(ctx).ByNetNS(netns) // a snapshot's lookup never fails
	return slices.ContainsFunc(there, func(o *journal.Record) bool {
		later := e.Number > 0 && o.Number > e.Number
		return decide.KeepsContainer(o.State) && o.Key != e.Key && o.IfName == e.IfName &&
			(o.ContainerID != e.ContainerID || later) && n.SameBoot(o) == decide.True
	})
}
