package alive

import (
	"os"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/tristate"
)

// delEvidence is the evidence outside the journal that an attachment has not had its DEL. The zero
// value means that nothing is known.
type delEvidence struct {
	owned  tristate.Value // host-local names it at a claimed address; unknown without a claim
	cached tristate.Value // libcni's cache has its result
}

// passed reports whether the DEL of an attachment has succeeded although the journal still has it
// as live, because the journal could not be written. It needs both pieces of evidence: an operator
// may have cleared host-local's files, and the runtime may have no cache.
func (t delEvidence) passed() bool { return t.owned == tristate.No && t.cached == tristate.No }

// Passed reports whether evidence shows that the DEL of an attachment has succeeded. In doubt it
// returns false.
func (n *Node) Passed(e *journal.Entry) bool {
	return delEvidence{owned: OwnsClaim(e), cached: n.IsCached(e.Key)}.passed()
}

// OwnsClaim reports whether host-local's files have one of the claimed addresses for the
// attachment.
func OwnsClaim(e *journal.Entry) tristate.Value {
	owns := tristate.Unknown
	owner := ipam.Owner{ContainerID: e.ContainerID, IfName: e.IfName}
	for _, g := range e.Generations {
		for _, c := range g.Claims {
			if c.Pool == "" {
				continue
			}
			lost, err := ipam.Lost(c.Pool, owner, c.Address)
			if owns = tristate.Of(!lost, err); owns != tristate.No {
				return owns
			}
		}
	}
	return owns
}

// IsCached reports whether libcni's cache has an attachment. Without a cache the result is unknown.
func (n *Node) IsCached(k journal.Key) tristate.Value {
	c, err := n.CachedADD(k)
	if c == nil && err == nil {
		_, err = os.Stat(n.cacheDir())
	}
	return tristate.Of(c != nil, err)
}
