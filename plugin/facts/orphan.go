package facts

import (
	"cmp"
	"net/netip"
	"os"
	"slices"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/tristate"
)

// Owner is a container that is not in the journal. Its fields help to prove it live or dead.
type Owner struct {
	Network, ContainerID string
	Addresses            []netip.Addr
	Made                 time.Time // wall-clock time of its youngest file; zero if unknown
	Grace                time.Duration
}

// JudgeOwner returns the verdict on a container that is not in the journal.
func (n *Node) JudgeOwner(o Owner) decide.Verdict {
	cache, cacheErr := n.readCache(o.Network + "-" + o.ContainerID + "-")
	seen := decide.Orphan{
		SameNamespaces: &Fact{look: func() (tristate.Value, error) {
			_, err := os.Readlink(procOf(1) + "/ns/mnt")
			return n.seesAsRuntime(), err
		}},
		Listed: n.List.HasContainer(o.Network, o.ContainerID, cache),
		Cached: lookFor(func() (bool, error) {
			if slices.ContainsFunc(cache, Cached.netNSThere) {
				return true, nil
			}
			return false, cacheErr
		}),
		Runs:  lookFor(func() (bool, error) { return n.View.ContainerRuns(o.ContainerID) }),
		InUse: lookFor(func() (bool, error) { return n.View.Uses(o.Addresses) }),
	}
	if !o.Made.IsZero() && n.Host.TimeNS == namespacesOf(procOf(1)).TimeNS {
		seen.PastGracePeriod = tristate.Of(n.OwnerGraceLeft(o) < 0, nil)
	}
	return decide.DecideOrphan(seen)
}

// OwnerGraceLeft returns how much of the grace period is left for a container that is not in the
// journal (see GraceLeft).
func (n *Node) OwnerGraceLeft(o Owner) time.Duration {
	// The wall clock may have been set since Made, so the age is capped at the time since boot.
	return cmp.Or(n.ListGrace, o.Grace) - min(time.Since(o.Made), time.Duration(journal.BootNanos()))
}
