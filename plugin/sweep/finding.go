package sweep

import (
	"net/netip"

	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/tristate"
)

// Finding is the verdict on an attachment, or on a reservation of host-local without an attachment
// in the journal, and the outcome.
type Finding struct {
	journal.Key
	Address  netip.Addr // of a reservation; the Key has its owner, if any
	Pod      journal.Pod
	State    journal.State // before the release
	Fate     alive.Fate
	Reason   alive.Reason
	Busy     bool     // an unwind works on it: live for now
	Deferred bool     // it is dead, but not ready to retry
	Released bool     // nothing of it is left
	Pending  []string // the delegates with a pending DEL, each with the reason
	Err      error    // why it was not released
	// Left are the commands that remove what a dead container has left, if libcni's cache has no DEL
	// for it, see addLeft.
	Left []string

	Evidence alive.Evidence // evidence for the verdict; zero where it needed none

	listed     bool // there was a list to look at
	identified bool // its network namespace is on record

	thisBoot  bool     // it was made in this boot
	passed    bool     // live by the journal alone, see delHasPassed
	orphaned  bool     // delegates that outlived their unwind hold its lock
	failing   []string // see failingPlugins
	throttled bool     // it is dead, but its failing plugins fail in this sweep too, see throttle

	cached *alive.CacheFile // libcni's cache alone has the attachment, see planCached; else nil
	pools  []Pool           // of the cached chain

	leftOnly bool // the container has left something, and no address or attachment
}

// LeftOnly says whether the container has nothing to release. If its ID is unknown, the key is
// empty.
func (f *Finding) LeftOnly() bool { return f.leftOnly }

// Releasable says whether the attachment is to be released.
func (f *Finding) Releasable() bool { return f.Fate == alive.Dead || f.Fate == alive.Foreign }

// Cached says whether libcni's cache has the attachment, and the journal does not; if so, with
// which addresses.
func (f *Finding) Cached() (addresses []netip.Addr, is bool) {
	if f.cached == nil {
		return nil, false
	}
	return netconf.InterfaceOf(f.cached.Result, f.IfName).Addresses, true
}

// Elsewhere says whether nothing can be told of it from here: this process is in other namespaces
// than its ADD.
func (f *Finding) Elsewhere() bool {
	return f.Fate == alive.Unknown && f.Err == nil && f.cached == nil &&
		f.Evidence.SameNamespaces != tristate.Yes
}

// Fact is one piece of evidence for people: a question, and "yes", "no" or "unknown".
type Fact struct {
	Question  string `json:"question"`
	Answer    string `json:"answer"`
	NotLooked bool   `json:"notLooked,omitempty"` // unknown since nobody looked
}

// Facts returns the evidence for the alive. It says where gather did not look: what other
// evidence decides, and what tells nothing, as of another boot.
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
		fact("this process sees what its ADD saw", ev.SameNamespaces, true),
		fact("made in this boot", ev.SameBoot, true),
		fact("made on another machine", ev.OtherHost, true),
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
