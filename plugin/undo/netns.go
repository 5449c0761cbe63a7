package undo

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"time"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/tristate"
)

// place is the namespace in which the DELs of a record run. It is opened when it is found, and
// stays open until the pass ends, so that it cannot become another one meanwhile.
type place struct {
	facts.Place      // none if it may not be shown
	gone        bool // it is proven gone
}

// nowhere is a path that never exists, because no process has the ID 0.
const nowhere = "/proc/0/ns/net"

// show returns the CNI_NETNS for the DEL of a step. The path of a namespace is identified again
// before each delegate, because the runtime may have made another namespace there.
func (u *undoing) show(s *journal.Step) (netns string, remove func()) {
	remove = func() {}
	switch decide.Show(s, u.place.facts(u, s)) {
	case decide.ShowPinned:
		return u.place.Pinned(), remove
	case decide.ShowPath:
		if !u.place.IsAt(u.place.Path) {
			return "", remove
		}
		return u.place.Path, remove
	case decide.ShowScratch:
		return u.scratch(s, u.Entry.IfName)
	case decide.ShowEmpty:
		return u.scratch(s, "")
	case decide.ShowRecorded:
		return u.Entry.NetNS.Path, remove
	case decide.ShowNowhere:
		return nowhere, remove
	}
	return "", remove
}

// facts returns what is known about the namespace for the DEL of a step.
func (p place) facts(u *undoing, s *journal.Step) decide.NetNS {
	n := decide.NetNS{Found: p.There(), Gone: p.gone, Asked: u.asked() && u.Verb.Netns != "",
		Path: u.Entry.NetNS.Path, PathFree: isMissing(u.Entry.NetNS.Path)}
	if n.Found && decide.UsesInterface(s) {
		seen, err := facts.Look(p.Pinned(), u.Entry.IfName)
		n.Interface = tristate.Of(seen.There(), err)
	}
	return n
}

// find searches for the record's network namespace: at the runtime's path, at its recorded path, at
// its other mounts, and in the processes. It never returns another namespace at one of these paths,
// or one with another attachment's interface. If the namespace is not on record, the interface at a
// path has to prove to be the ADD's.
func (u *undoing) find(ctx context.Context) place {
	e := u.Entry
	if u.Node.SameBoot(e) == tristate.No {
		return place{gone: true} // identities of an earlier boot mean nothing in this one
	}
	if !e.NetNS.Known() {
		return u.findUnknown(ctx)
	}
	found, err := facts.Find(e.NetNS, e.IfName, u.Netns)
	if !found.There() {
		var processErr error
		found, processErr = u.Node.View.OpenByProcess(e.NetNS, e.IfName, len(e.HostLinks) == 0)
		err = errors.Join(err, processErr)
	}
	switch {
	case !found.There():
		// The kernel destroys a namespace some time after its last user is gone. A host link that
		// existed and is gone proves as much as a look at every process.
		return place{gone: u.awaitHostLinkGone() && (err == nil || len(e.HostLinks) > 0)}
	case u.shows(ctx, found.Seen):
		return place{Place: found}
	}
	u.Log.Warn("the interface belongs to another attachment; running the DEL without the namespace",
		"netns", found.Path)
	found.Close()
	return place{}
}

// findUnknown returns the namespace at the runtime's path or at the recorded path, if the interface
// in it proves to be the ADD's.
func (u *undoing) findUnknown(ctx context.Context) place {
	some := false // a path names a namespace
	for _, path := range []string{u.Netns, u.Entry.NetNS.Path} {
		found, err := facts.Open(path, u.Entry.IfName)
		if some = some || err == nil; err == nil && u.shows(ctx, found.Seen) {
			return place{Place: found}
		}
		found.Close()
	}
	return place{gone: !some && u.awaitHostLinkGone()}
}

// awaitHostLinkGone reports whether the host end of the container's interface is gone, or
// disappears within Budgets.HostLink.
func (u *undoing) awaitHostLinkGone() bool {
	for end := time.Now().Add(u.Budgets.HostLink); ; time.Sleep(5 * time.Millisecond) {
		there, err := facts.LinkThere(u.Entry.HostLinks)
		if err != nil || there && time.Now().After(end) {
			return false
		}
		if !there {
			return true
		}
	}
}

// shows decides whether the DELs of a record may run in the namespace of an inspected interface. It
// must be the namespace of the ADD, and the interface there, if any, the ADD's. If the journal does
// not have the namespace, the interface must prove to be the ADD's.
func (u *undoing) shows(ctx context.Context, seen facts.Interface) bool {
	e := u.Entry
	if !e.NetNS.Known() {
		return !u.Node.IsHost(seen.Netns) && u.provesOwn(ctx, seen)
	}
	if !seen.There() {
		return true
	}
	own := netconf.InterfaceOf(e.Result, e.IfName)
	switch mac, address := seen.HasMAC(own), seen.HasAny(own); {
	case mac == tristate.Yes || mac == tristate.Unknown && address == tristate.Yes:
		return true
	case mac == tristate.No && address != tristate.Yes:
		return false
	case e.Occupant != "" && seen.Occupant() == e.Occupant:
		return false
	}
	return !u.Node.Anothers(ctx, e.Key, seen)
}

// provesOwn reports whether an interface is the ADD's, according to the result of the runtime or of
// libcni's cache, or to an address that host-local has for the attachment.
func (u *undoing) provesOwn(ctx context.Context, seen facts.Interface) bool {
	if !seen.There() {
		return false
	}
	e := u.Entry
	own := []journal.Interface{netconf.InterfaceOf(e.Result, e.IfName)}
	if !own[0].Known() {
		if c, err := u.Node.CachedADD(e.Key); c != nil && err == nil {
			own = append(own, netconf.InterfaceOf(c.Result, e.IfName))
		}
		for _, c := range e.Claims {
			owner, given, err := ipam.OwnerOf(c.Pool, c.Address)
			if c.Pool != "" && err == nil && given && owner.Is(e.ContainerID, e.IfName) {
				own = append(own, journal.Interface{Addresses: []netip.Addr{c.Address}})
			}
		}
	}
	return slices.ContainsFunc(own, seen.Is) && !u.Node.Anothers(ctx, e.Key, seen)
}

func isMissing(path string) bool {
	_, err := os.Lstat(path)
	return errors.Is(err, fs.ErrNotExist)
}
