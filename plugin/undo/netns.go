package undo

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/tristate"
)

// show returns the CNI_NETNS for a step's DEL, and a function to call after the DEL. It verifies
// the path of the namespace before each delegate, because the runtime may have mounted another
// namespace there.
func (u *undoing) show(s *journal.Step) (netns string, remove func()) {
	switch decide.Show(s, u.netns(s)) {
	case decide.ShowPinned:
		netns = u.place.Pinned()
	case decide.ShowPath:
		if u.place.IsAt(u.place.Path) {
			netns = u.place.Path
		}
	case decide.ShowScratch:
		return u.scratch(s, u.Entry.IfName)
	case decide.ShowEmpty:
		return u.scratch(s, "")
	case decide.ShowRecorded:
		netns = u.Entry.NetNS.Path
	case decide.ShowNowhere:
		netns = "/proc/0/ns/net" // no process has the ID 0
	}
	return netns, func() {}
}

// netns returns the facts about the namespace for a step's DEL.
func (u *undoing) netns(s *journal.Step) decide.NetNS {
	path := u.Entry.NetNS.Path
	n := decide.NetNS{Found: u.place.There(), Gone: u.gone, Asked: u.asked() && u.Verb.Netns != "",
		Path: path, PathFree: isMissing(path)}
	if n.Found && decide.UsesInterface(s) {
		seen, err := facts.Look(u.place.Pinned(), u.Entry.IfName)
		n.Interface = tristate.Of(seen.There(), err)
	}
	return n
}

// find searches for the record's network namespace: at the path in the runtime's DEL, at its
// recorded path, at its other mounts, and by its processes. It never returns a different namespace
// at one of these paths, or a namespace with another attachment's interface. gone reports whether
// the namespace is proven gone.
func (u *undoing) find(ctx context.Context) (found facts.Place, gone bool) {
	e, asked := u.Entry, ""
	if u.Node.SameBoot(e) == tristate.No {
		return found, true // inodes and cookies of an earlier boot mean nothing in this one
	}
	if u.asked() {
		asked = u.Verb.Netns
	}
	if !e.NetNS.Known() {
		return u.findUnknown(ctx, asked, e.NetNS.Path)
	}
	found, err := facts.Find(e.NetNS, e.IfName, asked)
	if !found.There() {
		var processErr error
		found, processErr = u.Node.View.OpenByProcess(e.NetNS, e.IfName, len(e.HostLinks) == 0)
		err = errors.Join(err, processErr)
	}
	switch {
	case !found.There():
		// The kernel destroys a namespace some time after its last user is gone. If a host link existed
		// and is gone, so is the namespace, even if some process cannot be inspected.
		return found, u.awaitHostLinkGone() && (err == nil || len(e.HostLinks) > 0)
	case u.shows(ctx, found.Seen):
		return found, false
	}
	u.Log.Warn("the interface belongs to another attachment; running the DEL without the namespace",
		"netns", found.Path)
	found.Close()
	return facts.Place{}, false
}

// findUnknown searches for a namespace whose identity was not recorded. The interface in it must
// match the ADD's.
func (u *undoing) findUnknown(ctx context.Context, paths ...string) (_ facts.Place, gone bool) {
	some := false // a path names a namespace
	for _, path := range paths {
		found, err := facts.Open(path, u.Entry.IfName)
		if err == nil && !u.Node.IsHost(found.Seen.Netns) && u.provesOwn(ctx, found.Seen) {
			return found, false
		}
		some = some || err == nil
		found.Close()
	}
	return facts.Place{}, !some && u.awaitHostLinkGone()
}

// awaitHostLinkGone reports whether the host end of the container's interface is gone, or
// disappears within Budgets.HostLink.
func (u *undoing) awaitHostLinkGone() bool {
	for end := time.Now().Add(u.Budgets.HostLink); ; time.Sleep(5 * time.Millisecond) {
		there, err := facts.LinkThere(u.Entry.HostLinks)
		if err != nil || !there || time.Now().After(end) {
			return err == nil && !there
		}
	}
}

// shows reports whether a DEL may get the ADD's namespace. It may if the interface is missing in
// the namespace, or does not belong to another attachment.
func (u *undoing) shows(ctx context.Context, seen facts.Interface) bool {
	if !seen.There() {
		return true
	}
	own := netconf.InterfaceOf(u.Entry.Result, u.Entry.IfName)
	switch mac, address := seen.HasMAC(own), seen.HasAny(own); {
	case mac == tristate.Yes || mac == tristate.Unknown && address == tristate.Yes:
		return true
	case mac == tristate.No && address != tristate.Yes,
		u.Entry.Occupant != "" && seen.Occupant() == u.Entry.Occupant:
		return false
	}
	return !u.Node.Anothers(ctx, u.Entry.Key, seen)
}

// provesOwn reports whether an interface belongs to the ADD. The proof is the runtime's result, the
// result in libcni's cache, or an address that host-local reserves for the attachment.
func (u *undoing) provesOwn(ctx context.Context, seen facts.Interface) bool {
	e := u.Entry
	own := []journal.Interface{netconf.InterfaceOf(e.Result, e.IfName)}
	if !own[0].Known() {
		if c, err := u.Node.CachedADD(e.Key); c != nil && err == nil {
			own = append(own, netconf.InterfaceOf(c.Result, e.IfName))
		}
		for _, c := range e.Claims {
			if c.Pool != "" && u.holds(c) {
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
