package decide

import (
	"encoding/json"
	"slices"
	"strings"

	"cni-unwind/journal"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/tristate"
)

// NetNS is what is known about the namespace for the DELs of a record.
type NetNS struct {
	Found     bool           // the ADD's namespace is there, and may be shown
	Gone      bool           // it is proven gone
	Interface tristate.Value // the ADD's interface is in it
	Asked     bool           // the runtime asks for this DEL, and names a path
	Path      string         // of the ADD
	PathFree  bool           // nothing is at it
}

// Shown is the CNI_NETNS of a DEL.
type Shown string

// The values of Shown.
const (
	ShowNone     Shown = "none"     // no CNI_NETNS
	ShowPath     Shown = "path"     // the path of the namespace, identified again
	ShowPinned   Shown = "pinned"   // the namespace that was opened when it was found
	ShowScratch  Shown = "scratch"  // a scratch namespace with an interface like the ADD's
	ShowEmpty    Shown = "empty"    // a scratch namespace without one
	ShowRecorded Shown = "recorded" // the path of the ADD, at which nothing is
	ShowNowhere  Shown = "nowhere"  // a path at which nothing ever is
)

// Show decides which CNI_NETNS the DEL of a step gets.
//
//	found; finds what it made by the interface, gone   scratch
//	found; a sweep, and the delegate opens it itself   pinned
//	found                                              path
//	finds what it made by the interface                scratch
//	frees nothing without a namespace                  empty
//	a sweep                                            none
//	must not see another's device                      none
//	the runtime's path, at which nothing is            recorded
//	the same, but something is or may come to be       nowhere
//
// If the runtime asks, a delegate gets what it would get without unwind: the path of the ADD, which
// no longer exists. Some free nothing without it (SkipsUnnamed), and ovs-cni finds its port by it.
// In a sweep they get none: otherwise an agent that identifies the container by its pod or a device
// could release what belongs to the next sandbox.
func Show(s *journal.Step, n NetNS) Shown {
	facts := known.Of(s.Type)
	switch {
	case n.Found && facts.NetNS == known.Scratch && n.Interface == tristate.No:
		return ShowScratch
	case n.Found && !n.Asked && facts.Pinned:
		return ShowPinned
	case n.Found:
		return ShowPath
	case facts.NetNS == known.Scratch:
		return ShowScratch
	case getsEmpty(s):
		return ShowEmpty
	case !n.Asked, facts.NetNS == known.None:
		return ShowNone
	case n.Path == "" || strings.HasPrefix(n.Path, "/proc/") || !n.PathFree:
		return ShowNowhere
	}
	return ShowRecorded
}

// getsEmpty reports whether the DEL of a step gets an empty network namespace in place of the
// container's: it fails, or frees nothing, unless CNI_NETNS is a namespace.
func getsEmpty(s *journal.Step) bool {
	facts := known.Of(s.Type)
	var keys map[string]json.RawMessage
	_ = json.Unmarshal(s.Config, &keys)
	return facts.NetNS == known.Empty &&
		!slices.ContainsFunc(facts.ByInterface, func(key string) bool { return len(keys[key]) > 0 })
}

// LeftTo returns the program that cleans up in place of the DEL of a step, which always fails once
// the namespace is gone, or "".
func LeftTo(s *journal.Step, n NetNS) string {
	if !n.Gone || getsEmpty(s) {
		return ""
	}
	return known.Of(s.Type).LeftTo
}

// UsesInterface reports whether Show asks for the interface in the namespace.
func UsesInterface(s *journal.Step) bool { return known.Of(s.Type).NetNS == known.Scratch }
