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

// This file decides which CNI_NETNS a DEL gets if the container's network namespace is gone, or if
// the DEL must not get it.

// nowhere is a path that never exists, because no process has the ID 0.
const nowhere = "/proc/0/ns/net"

// getsEmpty reports whether the DEL of a step gets an empty network namespace in place of the
// container's: it fails, or frees nothing, unless CNI_NETNS is a namespace.
func getsEmpty(step *journal.Step) bool {
	facts := known.Of(step.Type)
	if facts.NetNS != known.Empty {
		return false
	}
	keys := netconf.ObjectOf(step.Config)
	return !slices.ContainsFunc(facts.ByInterface, func(key string) bool { return len(keys[key]) > 0 })
}

// delLeft runs a DEL that always fails once the namespace is gone, and counts it as done: see
// known.Plugin.LeftTo.
func (u *undoing) delLeft(
	ctx context.Context, step *journal.Step, c *delegate.Call, to string,
) *delegate.Failure {
	f := u.callDEL(ctx, step, c)
	if f == nil || f.Killed {
		return f
	}
	u.Log.Info("DEL left to "+to+": it cannot pass without its network namespace, which is gone",
		"code", f.Code, "err", netconf.Shorten(f.Said(), 500))
	return nil
}

// shown returns CNI_NETNS for a DEL that gets no scratch namespace.
//
// If there is no namespace for the DEL, and the runtime names one for this attachment, delegates
// get what the plain chain would pass: the path of the ADD, which no longer exists. Some free
// nothing without it (SkipsUnnamed), and ovs-cni finds its port by it. If the path exists again, or
// may exist later because it contains a process ID, they get nowhere.
//
// If the runtime names none, as in a sweep, they get none: otherwise an agent that identifies the
// container by its pod or a device could release what belongs to the next sandbox.
func (u *undoing) shown(step *journal.Step) string {
	path, gets := u.gen.NetNS.Path, known.Of(step.Type).NetNS
	switch {
	case u.place.Path != "", !u.asked(), u.Verb.Netns == "":
		return u.place.Path
	case gets == known.None, gets == known.Scratch:
		return ""
	case path == "" || strings.HasPrefix(path, "/proc/") || !isMissing(path):
		return nowhere
	default:
		return path
	}
}

// asked reports whether the pass is for the attachment of the verb itself.
func (u *undoing) asked() bool { return u.Entry.Key == u.Verb.Key }

func isMissing(path string) bool {
	_, err := os.Lstat(path)
	return errors.Is(err, fs.ErrNotExist)
}
