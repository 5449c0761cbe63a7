// Package alive decides which attachments are dead: it gathers evidence on the node and turns it
// into a verdict. It changes nothing.
package alive

import (
	"cmp"

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

// Decide returns the verdict on an attachment, according to the table in plugin/README.md, "Who is
// dead". The attachment is dead only if evidence proves it and no later ADD without a journal entry
// added it again: undoing the earlier ADD would remove what belongs to the later one.
func Decide(ev Evidence) Verdict {
	v := DecideRecorded(ev)
	switch {
	case v.Releasable() && ev.AddedUnseen == tristate.Yes:
		return Verdict{Fate: Live, Reason: addedUnseen, Warn: true}
	case v.Releasable() && ev.AddedUnseen == tristate.Unknown:
		return Verdict{Fate: Unknown, Reason: addedUnseenUnknown.because(ev.Doubt)}
	}
	return v
}

// DecideRecorded returns the verdict on the ADD in the journal.
func DecideRecorded(ev Evidence) Verdict {
	switch {
	case ev.Locked == tristate.Yes:
		return Verdict{Fate: Live, Reason: locked}
	case ev.Locked == tristate.Unknown:
		return Verdict{Fate: Unknown, Reason: lockUnknown}
	case ev.SameNamespaces != tristate.Yes:
		return Verdict{Fate: Unknown, Reason: otherNamespaces}
	case ev.SameBoot == tristate.No && ev.OtherHost == tristate.Yes:
		return Verdict{Fate: Foreign, Reason: OtherMachine}
	case ev.State == journal.Unwinding:
		return Verdict{Fate: Dead, Reason: FailedADD}
	case ev.State == journal.Removing:
		return Verdict{Fate: Dead, Reason: Recorded(ev.Reason.Code, ev.Reason.Text)}
	case ev.SameBoot == tristate.No && ev.OtherHost == tristate.No:
		return Verdict{Fate: Dead, Reason: EarlierBoot}
	case ev.SameBoot != tristate.Yes:
		return Verdict{Fate: Unknown, Reason: bootUnknown}
	case ev.State == journal.Adding && ev.LockFile == tristate.Yes:
		return Verdict{Fate: Dead, Reason: CutOff}
	case ev.Listed != tristate.Yes && ev.NetNS == tristate.No && ev.HasProcess == tristate.No &&
		ev.HostLink == tristate.No:
		return Verdict{Fate: Dead, Reason: NetNSGone}
	case ev.Listed == tristate.No && ev.NetNS != tristate.Unknown:
		return decideUnlisted(ev)
	case ev.NetNS == tristate.Yes:
		return Verdict{Fate: Live, Reason: netNSThere}
	case ev.Listed == tristate.Yes:
		return Verdict{Fate: Live, Reason: listed}
	case ev.HasProcess == tristate.Yes:
		return Verdict{Fate: Live, Reason: hasProcess}
	case ev.HostLink == tristate.Yes:
		return Verdict{Fate: Live, Reason: hostLinkThere}
	}
	return Verdict{Fate: Unknown, Reason: Reason{Text: cmp.Or(ev.Doubt, nodeUnknown.Text)}}
}

// decideUnlisted returns the verdict if the runtime does not list the attachment and its network
// namespace may still exist, perhaps only because some process has it open: the host end of the
// interface alone does not prove that it is live. The list may be older than the attachment.
func decideUnlisted(ev Evidence) Verdict {
	switch {
	case ev.HasProcess == tristate.Yes:
		return Verdict{Fate: Live, Reason: unlistedProcess, Warn: true}
	case ev.HasProcess == tristate.Unknown:
		return Verdict{Fate: Unknown, Reason: unlistedProcesses.because(ev.Doubt)}
	case ev.PastGracePeriod == tristate.Unknown:
		return Verdict{Fate: Unknown, Reason: unlistedAge}
	case ev.PastGracePeriod == tristate.No:
		return Verdict{Fate: Live, Reason: WithinGrace}
	}
	return Verdict{Fate: Dead, Reason: Unlisted}
}
