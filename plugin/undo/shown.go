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
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/netconf"
)

// This file decides what a DEL is shown where the container's network namespace is gone, or must not
// be shown.

// nowhere is a path at which no network namespace can ever be: no process has the ID 0.
const nowhere = "/proc/0/ns/net"

// getsEmpty says whether the DEL of a step gets an empty network namespace where the container's must
// not be shown: it fails, or frees nothing, unless CNI_NETNS names some namespace.
func getsEmpty(step *journal.Step) bool {
	facts := known.Of(step.Type)
	if facts.NetNS != known.Empty {
		return false
	}
	keys := netconf.ObjectOf(step.Config)
	return !slices.ContainsFunc(facts.ByInterface, func(key string) bool { return len(keys[key]) > 0 })
}

// delLeft runs a DEL that always fails once the namespace is gone, and is over all the same: see
// known.Plugin.LeftTo.
func (u *undoing) delLeft(
	ctx context.Context, step *journal.Step, c *delegate.Call, to string,
) *delegate.Failure {
	f := u.callDEL(ctx, step, c)
	if f == nil || f.Killed {
		return f
	}
	u.Log.Info("DEL left to "+to+": it cannot pass without its network namespace, which is gone",
		"attachment", u.entry.Key.String(), "code", f.Code, "err", netconf.Shorten(f.Said(), 500))
	return nil
}

// shown returns CNI_NETNS of a DEL that gets no scratch namespace. Where no namespace may be shown
// and the runtime names one for this attachment, delegates are shown what the plain chain would
// show: the path of the ADD, at which nothing is. Some free nothing without it (SkipsUnnamed), and
// ovs-cni finds its port by it. If something is at that path, or may come to be there since it
// names a process, they are shown nowhere. If the runtime names none, they are shown none: so it is
// in a sweep, since an agent that goes by the pod, or by a device, could take from the next sandbox
// then.
func (u *undoing) shown(step *journal.Step) string {
	path, gets := u.gen.NetNS.Path, known.Of(step.Type).NetNS
	switch {
	case u.netns.path != "", !u.asked(), u.Verb.Netns == "":
		return u.netns.path
	case gets == known.None, gets == known.Scratch:
		return ""
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
