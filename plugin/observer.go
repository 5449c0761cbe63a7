package plugin

import (
	"slices"
	"strings"

	"cni-unwind/journal"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/internal/tristate"
)

func (o *op) sameBoot(g *journal.Generation) tristate.Value {
	if g.Host.BootID == "" || o.host.BootID == "" {
		return tristate.Unknown
	}
	return tristate.Of(g.Host.BootID == o.host.BootID, nil)
}

// otherHost compares machines whose names are of the same kind. If one is a DMI UUID and the other
// a machine-id, the answer is unknown.
func (o *op) otherHost(g *journal.Generation) tristate.Value {
	ours, _, _ := strings.Cut(o.host.Machine, ":")
	theirs, _, _ := strings.Cut(g.Host.Machine, ":")
	if ours == "" || ours != theirs {
		return tristate.Unknown
	}
	return tristate.Of(g.Host.Machine != o.host.Machine, nil)
}

// sameNamespaces says whether this process sees what the ADD saw, so that a thing missing for one
// is missing for the other. A runtime starts unwind where it started the ADD. Any other process has
// to be in the same namespaces: in a container with the state directory mounted, every network
// namespace looks gone and no process is in it. The numbers of namespaces mean nothing in another
// boot, except that of the first PID namespace, whose process 1 is in the other initial ones.
func (o *op) sameNamespaces(g *journal.Generation) tristate.Value {
	if o.invoked {
		return tristate.Yes
	}
	theirs := g.Host
	if o.sameBoot(g) == tristate.No {
		init := host.FirstNamespaces(o.host)
		theirs.MountNS, theirs.NetNS, theirs.TimeNS = init.MountNS, init.NetNS, init.TimeNS
	}
	for _, pair := range [][2]string{{o.host.MountNS, theirs.MountNS}, {o.host.PIDNS, theirs.PIDNS}} {
		if pair[0] == "" || pair[1] == "" {
			return tristate.Unknown
		}
		if pair[0] != pair[1] {
			return tristate.No
		}
	}
	for _, pair := range [][2]string{{o.host.NetNS, theirs.NetNS}, {o.host.TimeNS, theirs.TimeNS}} {
		if pair[1] != "" && pair[0] != pair[1] {
			return tristate.No
		}
	}
	return tristate.Yes
}

// seesAsRuntime says whether this process sees what the runtime sees, where no recorded ADD can be
// compared: it is in the namespaces of each runtime that gave the list, also where these are a
// container's (kind, k3d, LXC); or it is in the first PID namespace, and in the other namespaces of
// the first process. A container has its own first process, but not the first PID namespace.
func (o *op) seesAsRuntime() tristate.Value {
	if o.invoked || o.besideRuntimes() {
		return tristate.Yes
	}
	first := host.FirstNamespaces(o.host)
	first.PIDNS = firstPIDNS
	return o.inNamespaces(first)
}

func (o *op) besideRuntimes() bool {
	return o.list != nil && len(o.list.Runtimes) > 0 &&
		!slices.ContainsFunc(o.list.Runtimes, func(pid int) bool {
			return pid == 0 || o.inNamespaces(host.NamespacesOf(pid)) != tristate.Yes
		})
}

func (o *op) inNamespaces(of journal.Host) tristate.Value {
	of.BootID = o.host.BootID
	return o.sameNamespaces(&journal.Generation{Host: of})
}

// firstPIDNS is the number of the kernel's first PID namespace (PROC_PID_INIT_INO in
// include/linux/proc_ns.h).
const firstPIDNS = "pid:[4026531836]"
