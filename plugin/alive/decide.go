// Package alive decides which attachments are dead: it gathers evidence on the node and turns it
// into a verdict. It changes nothing.
package alive

import (
	"cmp"
	"slices"

	"cni-unwind/journal"
	"cni-unwind/plugin/tristate"
)

// Evidence is what unwind knows about an attachment. The zero value means that nothing is known.
type Evidence struct {
	State           journal.State
	Reason          Reason         // why it is in this state, from the journal
	Locked          tristate.Value // some process holds the attachment's lock
	LockFile        tristate.Value // it has a lock file
	SameNamespaces  tristate.Value // this process sees what its ADD saw
	SameBoot        tristate.Value // its newest ADD was in this boot
	OtherHost       tristate.Value // that ADD was on another machine
	NetNS           tristate.Value // its network namespace is at its path, or mounted elsewhere
	HasProcess      tristate.Value // a process is in its network namespace
	HostLink        tristate.Value // the host end of its interface exists
	Listed          tristate.Value // a list of the runtime has it; unknown if no list covers it
	PastGracePeriod tristate.Value // older than the grace period: a list read now could have it
	AddedUnseen     tristate.Value // by an ADD that the journal does not have, see Node.Later
	Doubt           string         // for people: why a check failed, or ""
}

// Fate is the verdict on an attachment.
type Fate string

// These are the fates. Sweep keeps Unknown attachments as it keeps Live ones.
const (
	Unknown Fate = "unknown"
	Live    Fate = "live"
	Dead    Fate = "dead"
	// Foreign is an attachment of another machine, whose disk was cloned. A DEL could release what a
	// cluster-wide IPAM plugin keeps for the original, so unwind releases only what is on this disk.
	Foreign Fate = "foreign"
)

// Verdict is the fate of an attachment, with the reason.
type Verdict struct {
	Fate   Fate
	Reason Reason
	Warn   bool // live, but the runtime does not know it
}

// Releasable reports whether the attachment should be released.
func (v Verdict) Releasable() bool { return v.Fate == Dead || v.Fate == Foreign }

// NetNSThere and Locked are the verdicts that need no further evidence.
var (
	NetNSThere = live("its network namespace exists")
	Locked     = live("its lock is held by a running operation")
)

func live(text string) Verdict { return Verdict{Fate: Live, Reason: Reason{Text: text}} }

func dead(reason Reason) Verdict { return Verdict{Fate: Dead, Reason: reason} }

// unknown returns Unknown, with the doubt, if any, as the cause.
func unknown(text, doubt string) Verdict {
	if doubt != "" {
		text += ": " + doubt
	}
	return Verdict{Fate: Unknown, Reason: Reason{Text: text}}
}

// Decide returns the verdict on an attachment, according to the table in plugin/README.md, "Who is
// dead". The attachment is dead only if evidence proves it and no later ADD without a journal entry
// added it again: undoing the earlier ADD would remove what belongs to the later one.
func Decide(ev Evidence) Verdict {
	v := DecideRecorded(ev)
	switch {
	case v.Releasable() && ev.AddedUnseen == tristate.Yes:
		v = live("it was added again by an ADD that the journal did not record and that is live; " +
			"the DEL of that ADD undoes both")
		v.Warn = true
	case v.Releasable() && ev.AddedUnseen == tristate.Unknown:
		return unknown("it is unknown whether an ADD without a journal entry added it again", ev.Doubt)
	}
	return v
}

// DecideRecorded returns the verdict on the ADD in the journal.
func DecideRecorded(ev Evidence) Verdict {
	switch {
	case ev.Locked == tristate.Yes:
		return Locked
	case ev.Locked == tristate.Unknown:
		return unknown("its lock cannot be inspected", "")
	case ev.SameNamespaces != tristate.Yes:
		return unknown("its ADD ran in other namespaces than this process, which cannot see what the "+
			"ADD saw; run this where the runtime runs", "")
	case ev.SameBoot == tristate.No && ev.OtherHost == tristate.Yes:
		return Verdict{Fate: Foreign, Reason: OtherMachine}
	case ev.State == journal.Unwinding:
		return dead(FailedADD)
	case ev.State == journal.Removing:
		return dead(Recorded(ev.Reason.Code, ev.Reason.Text))
	case ev.SameBoot == tristate.No && ev.OtherHost == tristate.No:
		return dead(EarlierBoot)
	case ev.SameBoot != tristate.Yes:
		return unknown("it is unknown whether it was added in this boot of this machine", "")
	case ev.State == journal.Adding && ev.LockFile == tristate.Yes:
		return dead(CutOff)
	case ev.Listed != tristate.Yes && ev.NetNS == tristate.No && ev.HasProcess == tristate.No &&
		ev.HostLink == tristate.No:
		return dead(NetNSGone)
	case ev.Listed == tristate.No && ev.NetNS != tristate.Unknown:
		return decideUnlisted(ev)
	case ev.NetNS == tristate.Yes:
		return NetNSThere
	case ev.Listed == tristate.Yes:
		return live("the runtime lists it")
	case ev.HasProcess == tristate.Yes:
		return live("a process is in its network namespace")
	case ev.HostLink == tristate.Yes:
		return live("the host end of its interface exists")
	}
	return unknown(cmp.Or(ev.Doubt,
		"its network namespace, the processes or the host's interfaces cannot be inspected"), "")
}

// decideUnlisted returns the verdict if the runtime does not list the attachment and its network
// namespace may still exist, perhaps only because some process has it open: the host end of the
// interface alone does not prove that it is live. The list may be older than the attachment.
func decideUnlisted(ev Evidence) Verdict {
	switch {
	case ev.HasProcess == tristate.Yes:
		v := live("a process is in its network namespace, though the runtime does not list it")
		v.Warn = true
		return v
	case ev.HasProcess == tristate.Unknown:
		return unknown("the runtime does not list it, and the processes cannot be inspected", ev.Doubt)
	case ev.PastGracePeriod == tristate.Unknown:
		return unknown("the runtime does not list it, and its age is unknown", "")
	case ev.PastGracePeriod == tristate.No:
		return Verdict{Fate: Live, Reason: WithinGrace}
	}
	return dead(Unlisted)
}

// Orphan is the evidence on a reservation, or on an attachment in libcni's cache, whose owner is
// not in the journal. A list covers it by container, regardless of the interface.
type Orphan struct {
	SameNamespaces  tristate.Value // this process sees what the runtime sees
	Listed          tristate.Value // a list has the container; unknown if none covers it
	PastGracePeriod tristate.Value // the reservation is older than the grace period
	Cached          tristate.Value // libcni's cache has it with an existing network namespace
	InUse           tristate.Value // an interface in some network namespace has the address
	Doubt           string         // for people: why the look for that interface failed, or ""
}

// DecideOrphan returns the verdict on a reservation whose owner is not in the journal. The owner is
// a pod from before the installation or, after a loss of the journal, any pod (antrea#8239). The
// reservation is dead only if all evidence agrees. No list of pods covers a container of nerdctl or
// podman: it is live if its address is there, else unknown.
func DecideOrphan(o Orphan) Verdict {
	switch {
	case o.SameNamespaces != tristate.Yes:
		return unknown("this process does not see what the runtime sees; run this on the host, or with "+
			"--cri", "")
	case o.Listed == tristate.Unknown && o.InUse == tristate.Yes:
		return live("no list of the runtime covers its owner, but an interface has the address")
	case o.Listed == tristate.Unknown:
		return unknown("its owner is not in the journal, and no list of the runtime covers it", o.Doubt)
	case o.Listed == tristate.Yes:
		return live("the runtime lists its owner")
	case o.PastGracePeriod == tristate.Unknown:
		return unknown("its age is unknown", "")
	case o.PastGracePeriod == tristate.No:
		return Verdict{Fate: Live, Reason: Reason{WithinGrace.Code,
			"the runtime does not list its owner, but the grace period has not expired"}}
	case o.Cached == tristate.Unknown:
		return unknown("libcni's cache cannot be read", "")
	case o.Cached == tristate.Yes:
		return live("libcni's cache has its owner, and the owner's network namespace exists")
	case o.InUse == tristate.Unknown:
		return unknown("some network namespaces cannot be inspected", o.Doubt)
	case o.InUse == tristate.Yes:
		return live("an interface has the address")
	}
	return dead(Reason{"orphan", "its owner is neither in the journal nor in the runtime's list, " +
		"and no interface has the address"})
}

// OtherOwner is another attachment that claims an address.
type OtherOwner struct {
	BeingUndone bool // it is being undone
	GaveBack    bool // host-local's file names the attachment whose DEL is about to run, see gaveBack
	Fate        Fate
}

// HasOtherOwner decides whether an address belongs to another attachment than the one whose DEL is
// about to run. named says whether host-local's file has another owner.
func HasOtherOwner(named tristate.Value, others []OtherOwner) bool {
	return named != tristate.No || slices.ContainsFunc(others, func(r OtherOwner) bool {
		return !r.BeingUndone && !r.GaveBack && r.Fate != Dead
	})
}

// Reason says why an attachment has its verdict, or why it is undone. Code is its name in the
// journal and in metrics, and the only part that programs may rely on. Text is for people, and may
// add details to the text of the same code below. Code is "" for most reasons to keep an
// attachment, which are never written to the journal.
type Reason struct {
	Code string
	Text string
}

func (r Reason) String() string { return r.Text }

// Label returns the value of the metric label "reason": Code, or "requested" if a verb of the
// runtime undid the attachment.
func (r Reason) Label() string {
	if r == (Reason{}) || r.Code == Superseded.Code {
		return Requested.Code
	}
	return r.Code
}

// Is reports whether two reasons are the same, even if the text of one has more details.
func (r Reason) Is(other Reason) bool { return r.Code == other.Code && r.Code != "" || r == other }

// The reasons to undo an attachment.
var (
	Requested   = Reason{"requested", "the runtime asked for its DEL"}
	Superseded  = Reason{"superseded", "superseded by another ADD of the same container ID"}
	FailedADD   = Reason{"failed-add", "its ADD failed"}
	EarlierBoot = Reason{"earlier-boot", "it was added before the last boot"}
	CutOff      = Reason{"cut-off", "its ADD was cut off before it succeeded"}
	NetNSGone   = Reason{"netns-gone", "its network namespace is gone"}
	Unlisted    = Reason{"unlisted",
		"the runtime does not list it, and no process is in its network namespace"}
	OtherMachine = Reason{"foreign", "it was added on another machine, and this disk is a copy"}
)

// Recorded returns the reason of an entry from its code and text. The text may have more details
// than that of the same code above.
func Recorded(code, text string) Reason {
	return Reason{cmp.Or(code, Requested.Code), cmp.Or(text, Requested.Text)}
}

// WithinGrace is the reason to keep what may be dead, but is too young to be judged by a list.
var WithinGrace = Reason{"within-grace",
	"the runtime does not list it, but the grace period has not expired"}
