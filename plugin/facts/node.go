package facts

import (
	"log/slog"
	"slices"
	"strings"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/record"
	"cni-unwind/plugin/tristate"
)

// Node is the node as one process sees it, with that process's input from the runtime. Its methods
// only read: from the kernel, libcni's cache, host-local's files, and the journal.
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

// SameBoot reports whether an ADD ran in the current boot.
func (n *Node) SameBoot(g *journal.Entry) tristate.Value {
	theirs, ours := g.Added.Host.BootID, n.Host.BootID
	return tristate.Equal(theirs != "" && ours != "", theirs == ours)
}

// otherHost reports whether an ADD ran on another machine. The result is unknown if one machine is
// identified by its DMI UUID and the other by its machine-id.
func (n *Node) otherHost(g *journal.Entry) tristate.Value {
	ours, _, _ := strings.Cut(n.Host.Machine, ":")
	theirs, _, _ := strings.Cut(g.Added.Host.Machine, ":")
	if ours == "" || ours != theirs {
		return tristate.Unknown
	}
	return tristate.Of(g.Added.Host.Machine != n.Host.Machine, nil)
}

// SameNamespaces reports whether this process runs in the namespaces of an ADD. Only then is a
// namespace or process that it cannot see really gone. In a container with the state directory
// mounted, every network namespace looks gone and empty. A runtime starts every verb in the same
// namespaces, so a process that a runtime started needs no check. The number of a namespace means
// nothing in another boot. The only exception is the initial PID namespace; its process 1 runs in
// the other initial namespaces.
func (n *Node) SameNamespaces(g *journal.Entry) tristate.Value {
	if n.Invoked {
		return tristate.Yes
	}
	theirs := g.Added.Host
	if n.SameBoot(g) == tristate.No {
		init := namespacesOf(procOf(1))
		theirs.MountNS, theirs.NetNS, theirs.TimeNS = init.MountNS, init.NetNS, init.TimeNS
	}
	for _, of := range []struct {
		ours, theirs string
		needed       bool
	}{
		{n.Host.MountNS, theirs.MountNS, true}, {n.Host.PIDNS, theirs.PIDNS, true},
		{n.Host.NetNS, theirs.NetNS, false}, {n.Host.TimeNS, theirs.TimeNS, false},
	} {
		switch {
		case of.needed && (of.ours == "" || of.theirs == ""):
			return tristate.Unknown
		case of.theirs != "" && of.ours != of.theirs:
			return tristate.No
		}
	}
	return tristate.Yes
}

// seesAsRuntime reports whether this process runs in the runtime's namespaces, if there is no
// recorded ADD to compare with. Either of two facts proves it. This process is in the namespaces of
// each runtime that returned the list, even if these are a container's (kind, k3d, LXC). Or this
// process is in the initial PID namespace and in the other namespaces of process 1. (A container
// has its own process 1, but not the initial PID namespace.)
func (n *Node) seesAsRuntime() tristate.Value {
	if n.List != nil && len(n.List.Runtimes) > 0 &&
		!slices.ContainsFunc(n.List.Runtimes, func(pid int) bool {
			return pid == 0 || n.inNamespaces(namespacesOf(procOf(pid))) != tristate.Yes
		}) {
		return tristate.Yes
	}
	first := namespacesOf(procOf(1))
	first.PIDNS = firstPIDNS
	return n.inNamespaces(first)
}

func (n *Node) inNamespaces(of journal.Host) tristate.Value {
	of.BootID = n.Host.BootID
	return n.SameNamespaces(&journal.Entry{Added: journal.Added{Host: of}})
}

// firstPIDNS is the number of the kernel's first PID namespace (PROC_PID_INIT_INO in
// include/linux/proc_ns.h).
const firstPIDNS = "pid:[4026531836]"

// IsHost reports whether a network namespace is the one of this process.
func (n *Node) IsHost(netns journal.NetNS) bool {
	return n.Host.NetNS != "" && LinkOf(netns) == n.Host.NetNS
}
