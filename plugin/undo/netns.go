package undo

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/internal/delegate"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/tristate"
)

// find searches for the generation's network namespace: at the runtime's path, at its recorded
// path, at its other mounts (including hidden ones), and in the processes. If the host end of its
// interface shows that something keeps the namespace, find also searches the open files of all
// processes. It never returns another namespace at one of these paths, or one with another
// attachment's interface. If the namespace is not on record, the interface at a path has to prove
// to be the ADD's.
func (u *undoing) find(ctx context.Context) delNetNS {
	g := u.gen
	if u.Node.SameBoot(g) == tristate.No {
		return delNetNS{gone: true} // identities of an earlier boot mean nothing in this one
	}
	some := false // a path names a namespace
	for _, path := range []string{u.Netns, g.NetNS.Path} {
		seen, err := host.Look(path, u.Entry.IfName)
		switch place := (host.Place{Path: path}); {
		case err != nil:
			continue
		case g.NetNS.Same(seen.Netns):
			return u.own(ctx, place, seen)
		case !g.NetNS.Known() && u.shows(ctx, seen):
			return delNetNS{Place: place}
		}
		some = true
	}
	if !g.NetNS.Known() {
		return delNetNS{gone: !some && u.awaitHostLinkGone()}
	}
	place, pathErr := host.Find(g.NetNS)
	if place.Path != "" {
		return u.lookAndOwn(ctx, place)
	}
	pid, place, err := u.Node.View.OpenByProcess(g.NetNS, len(g.HostLinks) == 0)
	if place.Path != "" {
		return u.lookAndOwn(ctx, place)
	}
	// The kernel destroys a namespace some time after its last user is gone. A host link that
	// existed and is gone proves as much as a look at every process.
	linkGone := u.awaitHostLinkGone()
	if !linkGone {
		if place = host.OpenByDescriptor(g.NetNS); place.Path != "" {
			return u.lookAndOwn(ctx, place)
		}
	}
	looked := pathErr == nil && err == nil || len(g.HostLinks) > 0
	return delNetNS{gone: linkGone && looked && pid == 0}
}

// lookAndOwn inspects the interface and calls own.
func (u *undoing) lookAndOwn(ctx context.Context, p host.Place) delNetNS {
	seen, err := host.Look(p.Path, u.Entry.IfName)
	if err != nil {
		return delNetNS{Place: p} // the namespace is gone by now
	}
	return u.own(ctx, p, seen)
}

// own returns the namespace at p, or none if the interface there belongs to another attachment.
func (u *undoing) own(ctx context.Context, p host.Place, seen host.Interface) delNetNS {
	if u.shows(ctx, seen) {
		return delNetNS{Place: p}
	}
	p.Close()
	u.Log.Warn("the interface belongs to another attachment; running the DEL without the namespace",
		"netns", p.Path)
	return delNetNS{}
}

// awaitHostLinkGone reports whether the host end of the container's interface is gone, or
// disappears within Budgets.HostLink.
func (u *undoing) awaitHostLinkGone() bool {
	for end := time.Now().Add(u.Budgets.HostLink); ; time.Sleep(5 * time.Millisecond) {
		there, err := host.LinkThere(u.gen.HostLinks)
		if err != nil || there && time.Now().After(end) {
			return false
		}
		if !there {
			return true
		}
	}
}

// shows decides whether the DELs of a generation may run in the namespace of an inspected
// interface. It must be the namespace of the ADD, and the interface there, if any, the ADD's. If
// the journal does not have the namespace, the interface must prove to be the ADD's.
func (u *undoing) shows(ctx context.Context, seen host.Interface) bool {
	if !u.gen.NetNS.Known() {
		return !u.Node.IsHost(seen.Netns) && u.provesOwn(ctx, seen)
	}
	if !u.gen.NetNS.Same(seen.Netns) {
		return false
	}
	if !seen.There() {
		return true
	}
	own := netconf.InterfaceOf(u.gen.Result, u.Entry.IfName)
	switch mac, address := seen.HasMAC(own), seen.HasAny(own); {
	case mac == tristate.Yes || mac == tristate.Unknown && address == tristate.Yes:
		return true
	case mac == tristate.No && address != tristate.Yes:
		return false
	case u.gen.Occupant != "" && seen.Occupant() == u.gen.Occupant:
		return false
	}
	return !u.Node.Anothers(ctx, u.Entry.Key, seen)
}

// provesOwn reports whether an interface is the ADD's, according to the result of the runtime or of
// libcni's cache, or to an address that host-local has for the attachment.
func (u *undoing) provesOwn(ctx context.Context, seen host.Interface) bool {
	if !seen.There() {
		return false
	}
	own := []journal.Interface{netconf.InterfaceOf(u.gen.Result, u.Entry.IfName)}
	if !own[0].Known() {
		if c, err := u.Node.CachedADD(u.Entry.Key); c != nil && err == nil {
			own = append(own, netconf.InterfaceOf(c.Result, u.Entry.IfName))
		}
		for _, c := range u.gen.Claims {
			owner, given, err := ipam.OwnerOf(c.Pool, c.Address)
			if c.Pool != "" && err == nil && given && owner.Is(u.Entry.ContainerID, u.Entry.IfName) {
				own = append(own, journal.Interface{Addresses: []netip.Addr{c.Address}})
			}
		}
	}
	return slices.ContainsFunc(own, seen.Is) && !u.Node.Anothers(ctx, u.Entry.Key, seen)
}

// The rest of this file decides which CNI_NETNS a DEL gets if the container's network namespace is
// gone, or if the DEL must not get it.

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
func (a *attempt) delLeft(ctx context.Context, c *delegate.Call, to string) *delegate.Failure {
	f := a.callDEL(ctx, c)
	if f == nil || f.Killed {
		return f
	}
	a.Log.Info("DEL left to "+to+": it cannot pass without its network namespace, which is gone",
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
func (a *attempt) shown() string {
	path, gets := a.gen.NetNS.Path, known.Of(a.Type).NetNS
	switch {
	case a.place.Path != "", !a.asked(), a.Verb.Netns == "":
		return a.place.Path
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
