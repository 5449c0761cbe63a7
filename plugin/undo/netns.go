package undo

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/tristate"
)

// show returns the CNI_NETNS for a step's DEL, and a function to call after the DEL. It verifies
// the path of the namespace before each delegate, because the runtime may have mounted another
// namespace there.
func (u *undoing) show(s *journal.Step, shown decide.Shown) (netns string, remove func()) {
	switch shown {
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
	case decide.ShowSent:
		netns = u.sentPath()
	case decide.ShowNowhere:
		netns = "/proc/0/ns/net" // no process has the ID 0
	}
	return netns, func() {}
}

// netns returns the facts about the namespace for a step's DEL.
func (u *undoing) netns(ctx context.Context, s *journal.Step) decide.NetNS {
	sent := u.sentPath()
	n := decide.NetNS{Found: u.place.There(), Gone: u.gone, Sent: sent != ""}
	switch {
	case n.Found && decide.UsesInterface(s):
		seen, err := facts.Look(u.place.Pinned(), u.Entry.IfName)
		n.Interface = tristate.Of(seen.There(), err)
	case !n.Found && n.Sent:
		seen, err := facts.Look(sent, u.Entry.IfName)
		n.Anothers = err == nil && (u.Node.IsHost(seen.Netns) || u.isAnothers(ctx, seen))
	}
	return n
}

// sentPath returns the path that a delegate gets as in the plain chain if the ADD's namespace
// cannot be found, or "". It is the path in the runtime's DEL, if that is the DEL of this ADD, or
// the path of an earlier ADD that the runtime's verb undoes too, if nothing is there.
func (u *undoing) sentPath() string {
	switch path := u.Entry.Added.NetNS.Path; {
	case !u.Mode.ofVerb() || u.Verb.Netns == "":
		return ""
	case u.Job.Netns == "" && isMissing(path):
		return path
	}
	return u.Job.Netns
}

// find searches for the record's network namespace: at the path in the runtime's DEL, at its
// recorded path, at its other mounts, and by its processes. It never returns a different namespace
// at one of these paths, or a namespace with another attachment's interface. gone reports whether
// the namespace is proven gone.
func (u *undoing) find(ctx context.Context) (found facts.Place, gone bool) {
	e := u.Entry
	if u.Node.SameBoot(e) == tristate.No {
		return found, true // inodes and cookies of an earlier boot mean nothing in this one
	}
	if !e.Added.NetNS.Known() {
		_, err := facts.Look(e.Added.NetNS.Path, "")
		return found, err != nil && u.awaitHostLinkGone()
	}
	found, err := facts.Find(e.Added.NetNS, e.IfName, u.Job.Netns)
	if !found.There() {
		var processErr error
		found, processErr = u.Node.View.OpenByProcess(e.Added.NetNS, e.IfName, len(e.Got.HostLinks) == 0)
		err = errors.Join(err, processErr)
	}
	switch {
	case !found.There():
		// The kernel destroys a namespace some time after its last user is gone. If a host link existed
		// and is gone, so is the namespace, even if some process cannot be inspected.
		return found, u.awaitHostLinkGone() && (err == nil || len(e.Got.HostLinks) > 0)
	case !u.isAnothers(ctx, found.Seen):
		return found, false
	}
	u.Log.Warn("the interface belongs to another attachment; running the DEL without the namespace",
		"netns", found.Path)
	found.Close()
	return facts.Place{}, false
}

// isAnothers reports whether the interface in a namespace was there before the ADD, or the
// namespace is that of another attachment in the journal.
func (u *undoing) isAnothers(ctx context.Context, seen facts.Interface) bool {
	return u.Entry.Added.Occupant != "" && seen.Occupant() == u.Entry.Added.Occupant ||
		u.Node.Anothers(ctx, u.Entry.Key, seen.Netns)
}

// awaitHostLinkGone reports whether the host end of the container's interface is gone, or
// disappears within Budgets.HostLink.
func (u *undoing) awaitHostLinkGone() bool {
	for end := time.Now().Add(u.Budgets.HostLink); ; time.Sleep(5 * time.Millisecond) {
		there, err := facts.LinkThere(u.Entry.Got.HostLinks)
		if err != nil || !there || time.Now().After(end) {
			return err == nil && !there
		}
	}
}

func isMissing(path string) bool {
	_, err := os.Lstat(path)
	return errors.Is(err, fs.ErrNotExist)
}
