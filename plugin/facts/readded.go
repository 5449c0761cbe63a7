package facts

import (
	"context"
	"path/filepath"
	"slices"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/tristate"
)

// An ADD is known by its network namespace. Its container ID, addresses and MAC address may be
// those of a later ADD, too.

// Named is what a path to a network namespace leads to.
type Named struct {
	// Interface is in the namespace. Its Netns has only the path if the path leads nowhere, to
	// another attachment in the journal, or to the runtime's own namespace.
	Interface
	// Again is set if an ADD certainly put the interface there: it has an address of the result.
	Again bool
}

// Names reports whether a path names the network namespace of a record's ADD: the path leads to
// that namespace, or is the ADD's path. The ADD's path doesn't count if it leads to another
// namespace, unless the ADD's own one is gone and no ADD that the journal doesn't have uses the
// other one. Any path names the namespace of a record that has no path.
func (n *Node) Names(e *journal.Entry, at Named) bool {
	switch same := SamePath(e.Added.NetNS.Path, at.Netns.Path); {
	case e.Added.NetNS.Path == "":
		return true
	case !at.Netns.Known():
		return same
	case n.IsAt(e, at.Netns):
		return true
	default:
		return same && !at.Again && n.isGone(e)
	}
}

// IsAt reports whether a path leads to the network namespace of a record's ADD. Without cookies, an
// inode may have been reused, so the paths must be the same, too.
func (n *Node) IsAt(e *journal.Entry, at journal.NetNS) bool {
	hasCookies := e.Added.NetNS.Cookie != 0 && at.Cookie != 0
	return n.SameBoot(e) != tristate.No && e.Added.NetNS.Same(at) &&
		(hasCookies || SamePath(e.Added.NetNS.Path, at.Path))
}

// isGone reports whether the network namespace of a record's ADD is gone, or was not identified.
func (n *Node) isGone(e *journal.Entry) bool {
	if !e.Added.NetNS.Known() || n.SameBoot(e) == tristate.No {
		return true
	}
	place, err := Find(e.Added.NetNS, "")
	place.Close()
	if place.There() || err != nil {
		return false
	}
	inside, err := n.View.ProcessIn(e.Added.NetNS, true)
	return !inside && err == nil
}

// SamePath reports whether two paths are the same, after the links in their directories, such as
// /var/run, have been resolved.
func SamePath(a, b string) bool { return a != "" && resolved(a) == resolved(b) }

func resolved(path string) string {
	dir, name := filepath.Split(path)
	if real, err := filepath.EvalSymlinks(dir); err == nil {
		dir = real
	}
	return filepath.Join(dir, name)
}

// Later reports whether an ADD that is not in the journal added the attachment again, because
// unwind was off or the journal could not be written. In that case, unwind must not undo the old
// ADD: its DELs go by container ID and interface, and would release the later ADD's resources. The
// runtime's DEL undoes both.
//
// The evidence is libcni's cache: it names a network namespace that exists, has the interface (with
// an address of the cached result, if that has any), and is no record's. An error says why the
// result is unknown.
func (n *Node) Later(ctx context.Context, e *journal.Entry) (tristate.Value, error) {
	seen, err := n.CachedInterface(e.Key)
	if !seen.There() || err != nil || n.IsHost(seen.Netns) {
		return tristate.Of(false, err), err
	}
	all, err := n.Journal.Snapshot(ctx).Records(e.Key)
	if err = journal.IgnoreDamaged(err); err != nil {
		return tristate.Unknown, err
	}
	known := n.IsAt(e, seen.Netns) || slices.ContainsFunc(all,
		func(o *journal.Entry) bool { return n.IsAt(o, seen.Netns) })
	return tristate.Of(!known && !n.Anothers(ctx, e.Key, seen.Netns), nil), nil
}

// CachedInterface returns the interface of an attachment whose ADD is in libcni's cache. It returns
// none if the cache has no such ADD, its network namespace is gone, or the interface in it has no
// address of the cached result. An error means that this is unknown.
func (n *Node) CachedInterface(key journal.Key) (Interface, error) {
	c, err := n.CachedADD(key)
	if c == nil || err != nil {
		return Interface{}, err
	}
	seen, err := Look(c.NetNS, key.IfName)
	switch {
	case IsNoNetNS(err):
		return Interface{}, nil
	case err != nil:
		return Interface{}, err
	case !seen.Is(netconf.AddressesOf(c.Result)):
		return Interface{}, nil
	}
	return seen, nil
}

// Anothers reports whether another attachment in the journal, with the same interface name, uses a
// network namespace. A damaged record does not count.
func (n *Node) Anothers(ctx context.Context, key journal.Key, netns journal.NetNS) bool {
	living, _ := n.Journal.Snapshot(ctx).Living()
	return slices.ContainsFunc(living, func(o *journal.Entry) bool {
		return o.Key != key && o.IfName == key.IfName && n.SameBoot(o) == tristate.Yes &&
			o.Added.NetNS.Same(netns)
	})
}
