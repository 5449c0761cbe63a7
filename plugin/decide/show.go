package decide

import (
	"cni-unwind/journal"
	"cni-unwind/plugin/known"
)

// NetNS contains the facts about the namespace for the DELs of a record.
type NetNS struct {
	Found bool // the ADD's namespace exists, and a DEL may get it
	// Interface says whether that namespace has the ADD's interface. Show needs it for known.Scratch.
	Interface Truth
	// Unknown is set if nothing is known of what the ADD got: neither a result nor a claim. A scratch
	// namespace would be empty.
	Unknown bool
	Sent    bool // the runtime has sent this DEL, with a path
	// Anothers is set if that path leads to the namespace of another attachment in the journal, or
	// to the runtime's own.
	Anothers bool
}

// Shown is the CNI_NETNS of a DEL.
type Shown string

// The values of Shown.
const (
	ShowNone    Shown = "none"    // no CNI_NETNS
	ShowPath    Shown = "path"    // the namespace's path, verified again
	ShowPinned  Shown = "pinned"  // the namespace, kept open since it was found
	ShowScratch Shown = "scratch" // a scratch namespace with an interface like the ADD's
	ShowSent    Shown = "sent"    // the path that the runtime sent
	ShowNowhere Shown = "nowhere" // a path that never exists
)

// Show decides which CNI_NETNS a step's DEL gets. Some delegates free nothing without a path, and
// ovs-cni finds its port by the path. A sweep gives them none if the namespace was not found: an
// agent that goes by the pod or a device could free the next sandbox's resources.
func Show(s *journal.Step, n NetNS) Shown {
	facts := known.Of(s.Type)
	switch {
	case n.Found && facts.NetNS == known.Scratch && n.Interface == False:
		return ShowScratch // the delegate finds its resources by an interface that is gone
	case n.Found && !n.Sent && facts.Pinned:
		return ShowPinned // it opens the namespace itself
	case n.Found:
		return ShowPath
	case facts.NetNS == known.Scratch && (!n.Unknown || facts.NeedsNetNS):
		return ShowScratch
	case !n.Sent, facts.NetNS == known.None: // or it could take another container's device
		return ShowNone
	case n.Anothers:
		return ShowNowhere
	}
	return ShowSent // as without unwind
}
