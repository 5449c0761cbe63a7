package facts

import (
	"context"
	"os"
	"slices"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/tristate"
)

// Later reports whether an ADD that is not in the journal added the attachment again, because
// unwind was off or the journal could not be written. In that case, unwind must not undo the old
// ADD: its DELs go by container ID and interface, and would release the later ADD's resources. The
// runtime's DEL undoes both.
//
// Either of two facts proves a later ADD: host-local has created a file for the attachment that no
// record contains; or libcni's cache contains an interface that no record contains, and that was
// not in the cache when a recorded ADD began. Later compares both for equality, never by time. The
// cache may be stale. It counts only if the namespace that it names exists, or a process of the
// container runs. An error says why the result is unknown.
func (n *Node) Later(ctx context.Context, e *journal.Entry) (tristate.Value, error) {
	records := []*journal.Entry{e}
	n.Journal.Read(context.WithoutCancel(ctx), func(tx *journal.Tx) error {
		all, err := tx.Records(e.Key)
		records = append(records, all...)
		return journal.IgnoreDamaged(err)
	})
	pools := poolsOf(records)
	if slices.ContainsFunc(records, func(e *journal.Entry) bool {
		return e.State == journal.Adding && e.Result == nil
	}) {
		pools = nil // an interrupted ADD may have created a file that no commit saw
	}
	for pool := range pools {
		found, err := n.View.reservations(pool)
		if err != nil {
			return tristate.Unknown, err
		}
		if slices.ContainsFunc(found, func(r ipam.Reservation) bool {
			return r.Owner.Is(e.ContainerID, e.IfName) && !n.claimed(records, r)
		}) {
			return tristate.Yes, nil
		}
	}
	c, err := n.CachedADD(e.Key)
	if c == nil || err != nil {
		return tristate.Of(false, err), err
	}
	cached := netconf.InterfaceOf(c.Result, e.IfName)
	if !cached.Known() || slices.ContainsFunc(records, func(e *journal.Entry) bool {
		own := InterfaceOf(e)
		return own.Known() && SameADD(own, cached) != tristate.No ||
			e.Before.Known() && SameADD(e.Before, cached) != tristate.No
	}) {
		return tristate.No, nil
	}
	runs := c.netNSThere()
	if !runs {
		runs, err = n.View.ContainerRuns(e.ContainerID)
	}
	return tristate.Of(runs, err), err
}

// poolsOf returns the host-local pools from which the records claim addresses.
func poolsOf(records []*journal.Entry) map[string]bool {
	pools := map[string]bool{}
	for _, e := range records {
		for _, c := range e.Claims {
			pools[c.Pool] = true
		}
	}
	delete(pools, "")
	return pools
}

// claimed reports whether a record contains a reservation: its address, and the inode and time of
// its file. A copy of a disk has other inodes, so claimed compares inodes only within one boot.
func (n *Node) claimed(records []*journal.Entry, r ipam.Reservation) bool {
	return slices.ContainsFunc(records, func(e *journal.Entry) bool {
		return slices.ContainsFunc(e.Claims, func(c journal.Claim) bool {
			return c.Pool == r.Pool && c.Address == r.Address && (c.Ino == 0 ||
				c.Mtime == r.File.Mtime && (c.Ino == r.File.Ino || n.SameBoot(e) != tristate.Yes))
		})
	})
}

// InterfaceOf returns the container's interface in a record. It is zero if the record does not
// contain it.
func InterfaceOf(e *journal.Entry) journal.Interface {
	if named := netconf.InterfaceOf(e.Result, e.IfName); named.Known() {
		return named
	}
	return e.Interface
}

// HasADD reports whether one of the records certainly belongs to the ADD that created an interface,
// or to an ADD that followed it (see journal.Entry.Before).
func HasADD(records []*journal.Entry, named journal.Interface) bool {
	return slices.ContainsFunc(records, func(e *journal.Entry) bool {
		return SameADD(InterfaceOf(e), named) == tristate.Yes || SameADD(e.Before, named) == tristate.Yes
	})
}

// SameADD reports whether the interfaces in two results can come from the same ADD. The conversion
// of a result to an old version of the specification drops the interfaces, and all but one address
// per family. So the addresses of one result may be a subset of the other's.
func SameADD(a, b journal.Interface) tristate.Value {
	if a.MAC != "" && b.MAC != "" && a.MAC != b.MAC {
		return tristate.No
	}
	if len(a.Addresses) > len(b.Addresses) {
		a, b = b, a
	}
	for _, address := range a.Addresses {
		if !slices.Contains(b.Addresses, address) {
			return tristate.No
		}
	}
	return tristate.Equal(a.MAC != "" && b.MAC != "" || len(a.Addresses) > 0, true)
}

// Passed reports whether an attachment's DEL has succeeded although the attachment is live in the
// journal, because the journal could not be written. It needs two pieces of evidence: libcni's
// cache does not contain the attachment, and host-local no longer reserves its addresses. One is
// not enough, because an operator may have cleared host-local's files, and the runtime may not use
// the cache.
func (n *Node) Passed(e *journal.Entry) bool {
	if c, err := n.CachedADD(e.Key); c != nil || err != nil {
		return false
	}
	if _, err := os.Stat(n.cacheDir()); err != nil {
		return false
	}
	passed, owner := false, ipam.Owner{ContainerID: e.ContainerID, IfName: e.IfName}
	for _, c := range e.Claims {
		if c.Pool == "" {
			continue
		}
		if lost, err := ipam.Lost(c.Pool, owner, c.Address); err != nil || !lost {
			return false
		}
		passed = true
	}
	return passed
}

// Anothers reports whether an interface belongs to another attachment, according to the journal or
// libcni's cache.
func (n *Node) Anothers(ctx context.Context, key journal.Key, seen Interface) (is bool) {
	// if the journal cannot be read, only the cache counts
	n.Journal.Read(context.WithoutCancel(ctx), func(tx *journal.Tx) error {
		return tx.All(func(other *journal.Entry, damaged error) error {
			is = is || damaged == nil && other.State == journal.Live && other.Key != key &&
				other.IfName == key.IfName && other.Host.BootID == n.Host.BootID &&
				other.NetNS.Same(seen.Netns)
			return nil // a damaged record does not count as live
		})
	})
	return is || n.anyCached(func(c Cached) bool {
		return c.Key() != key && c.IfName == key.IfName &&
			seen.Is(netconf.InterfaceOf(c.Result, c.IfName))
	})
}
