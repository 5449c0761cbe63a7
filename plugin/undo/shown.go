package undo

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"slices"
	"strings"

	"cni-unwind/journal"
	"cni-unwind/plugin/internal/delegate"
	"cni-unwind/plugin/netconf"
)

// This file decides what a DEL is shown where the container's network namespace is gone, or must not
// be shown.

// needSome are plugins whose DEL frees by the container's ID, and fails, or frees nothing, unless
// CNI_NETNS names some network namespace. Where the container's must not be shown, they get an
// empty one:
//   - terway 1.17.5 (plugin/terway/cni.go, cmdDel; cni_linux.go, getCmdArgs);
//   - ovn-k8s-cni-overlay of ovn-kubernetes 1.3.0 (go-controller/pkg/cni/helper_linux.go,
//     UnconfigureInterface), unless its configuration has one of needOwn: then it goes by the
//     container's own interface, or by a device that another container may have by now.
var needSome = []string{"terway", ovnkType}

const ovnkType = "ovn-k8s-cni-overlay"

// needOwn are the keys of ovn-kubernetes for a device and for a secondary network.
var needOwn = []string{"deviceID", "netAttachDefName"}

// skipUnnamed are plugins whose DEL exits with 0 and does nothing on the node without CNI_NETNS:
//   - kube-ovn 1.16.2 (pkg/daemon/handler.go, handleDel);
//   - sriov 2.10.0 (pkg/cnicommands/cni.go, CmdDel), except for its IPAM plugin and its cache.
var skipUnnamed = []string{"kube-ovn", "sriov"}

// nowhere is a path at which no network namespace can ever be: no process has the ID 0.
const nowhere = "/proc/0/ns/net"

// needsSome says whether the DEL of a step gets an empty network namespace where the container's
// must not be shown.
func needsSome(step *journal.Step) bool {
	keys := netconf.ObjectOf(step.Config)
	return slices.Contains(needSome, step.Type) && (step.Type != ovnkType ||
		!slices.ContainsFunc(needOwn, func(key string) bool { return len(keys[key]) > 0 }))
}

// delLeftToOVN runs a DEL of ovn-kubernetes with one of needOwn, whose namespace is gone. It always
// fails, and is over all the same: before that it has taken the device out of the pod's annotation
// (cni.go, cmdDel). ovnkube-node itself removes, each minute, ports without an interface, and ports
// of devices whose pod is gone (controllermanager/node_controller_manager.go, checkForStaleOVS…).
func (u *undoing) delLeftToOVN(
	ctx context.Context, step *journal.Step, c *delegate.Call,
) *delegate.Failure {
	f := u.callDEL(ctx, step, c)
	if f == nil || f.Killed {
		return f
	}
	u.Log.Info("DEL left to ovnkube-node: its network namespace is gone, without which it cannot pass",
		"attachment", u.entry.Key.String(), "code", f.Code, "err", netconf.Shorten(f.Said(), 500))
	return nil
}

// shown returns CNI_NETNS of a DEL that gets no scratch namespace. Where no namespace may be shown
// and the runtime names one for this attachment, delegates are shown what the plain chain would
// show: the path of the ADD, at which nothing is. Some free nothing without it (skipUnnamed), and
// ovs-cni finds its port by it. If something is at that path, or may come to be there since it
// names a process, they are shown nowhere. If the runtime names none, they are shown none: so it is
// in a sweep, since an agent that goes by the pod, or by a device, could take from the next sandbox
// then.
func (u *undoing) shown(step *journal.Step) string {
	switch path := u.gen.NetNS.Path; {
	case u.netns.path != "", !u.asked(), u.Verb.Netns == "":
		return u.netns.path
	case step.Type == "host-device", slices.Contains(scratchAllowed, step.Type):
		return "" // host-device fails at any other path, and sbr makes a file there
	case path == "" || strings.HasPrefix(path, "/proc/") || !isMissing(path):
		return nowhere
	default:
		return path
	}
}

// asked says whether the pass is over the attachment of the verb itself.
func (u *undoing) asked() bool { return u.entry.Key == u.Verb.Key }

// waitsForRuntime says whether the pass must leave the DEL of a step to the runtime.
func (u *undoing) waitsForRuntime(ctx context.Context, step *journal.Step) bool {
	by := u.asker(ctx, u.entry, u.gen, false)
	by.NoNetNS = u.netns.path == "" && !u.asked()
	return forRuntimeIn(step, by) > 0
}

func isMissing(path string) bool {
	_, err := os.Lstat(path)
	return errors.Is(err, fs.ErrNotExist)
}
