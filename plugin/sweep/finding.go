package sweep

import (
	"net/netip"

	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/tristate"
)

// Finding is the verdict on an attachment, or on a host-local reservation without an attachment in
// the journal, and the outcome of its release.
type Finding struct {
	journal.Key
	alive.Verdict
	Address  netip.Addr // of a reservation; the Key has its owner, if any
	Pod      journal.Pod
	State    journal.State // before the release
	Busy     bool          // another unwind is working on it, so it counts as live
	Deferred bool          // it is dead, but not ready to retry
	Released bool          // nothing of it remains
	Pending  []string      // the delegates with a pending DEL, each with the reason
	Err      error         // why it was not released
	// Left are the commands that remove the leftovers of a dead container, if libcni's cache has no
	// DEL for it, see Leftovers. With LeftOnly it has nothing else to release; the key is empty if
	// the container's ID is unknown.
	Left     []string
	LeftOnly bool

	Evidence alive.Evidence // evidence for the verdict; zero if the verdict needed none

	listed     bool // the sweep had a list
	identified bool // its network namespace is on record

	thisBoot bool     // it was added in this boot
	passed   bool     // live only in the journal, because its DEL passed, see alive.Node.Passed
	orphaned bool     // orphaned delegates hold its lock
	failing  []string // see undo.FailingPlugins

	cached *alive.Cached // set if only libcni's cache has the attachment, see planCached
}

// Cached reports whether libcni's cache has the attachment and the journal does not. If so, it
// returns the cached addresses.
func (f *Finding) Cached() (addresses []netip.Addr, is bool) {
	if f.cached == nil {
		return nil, false
	}
	return netconf.InterfaceOf(f.cached.Result, f.IfName).Addresses, true
}

// Elsewhere reports whether this process cannot judge the attachment, because its ADD ran in other
// namespaces.
func (f *Finding) Elsewhere() bool {
	return f.Fate == alive.Unknown && f.Err == nil && f.cached == nil &&
		f.Evidence.SameNamespaces != tristate.Yes
}

// Fact is one piece of evidence for people: a question, and "yes", "no" or "unknown".
type Fact struct {
	Question  string `json:"question"`
	Answer    string `json:"answer"`
	NotLooked bool   `json:"notLooked,omitempty"` // unknown because it was not examined
}

// Facts returns the evidence for the verdict. It marks facts that were not examined, because other
// evidence decides or the fact means nothing, such as after a reboot.
func (f *Finding) Facts() []Fact {
	ev := f.Evidence
	here := ev.SameBoot == tristate.Yes
	looked := here && f.identified
	missing := looked && ev.NetNS != tristate.Yes
	fact := func(question string, answer tristate.Value, looked bool) Fact {
		return Fact{question, answer.String(), answer == tristate.Unknown && !looked}
	}
	return []Fact{
		fact("its lock is held", ev.Locked, true),
		fact("this process is in the namespaces of its ADD", ev.SameNamespaces, true),
		fact("added in this boot", ev.SameBoot, true),
		fact("added on another machine", ev.OtherHost, true),
		fact("its network namespace is at its path or mounted elsewhere", ev.NetNS, looked),
		fact("a process is in its network namespace", ev.HasProcess,
			missing || looked && ev.Listed == tristate.No),
		fact("the host end of its interface exists", ev.HostLink, missing),
		fact("the runtime lists it", ev.Listed, f.listed),
		fact("older than the grace period", ev.PastGracePeriod, here),
		fact("added again without a journal entry", ev.AddedUnseen,
			alive.DecideRecorded(ev).Releasable()),
	}
}
