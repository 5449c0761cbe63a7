package plugin

import (
	"cmp"

	"cni-unwind/journal"
)

// answer is what was found out about a question, or that nothing was.
type answer int

const (
	unknown answer = iota // also whenever looking failed
	no
	yes
)

func answerOf(b bool, err error) answer {
	switch {
	case err != nil:
		return unknown
	case b:
		return yes
	}
	return no
}

// evidence is what is known of an attachment. Its zero value knows nothing.
type evidence struct {
	state     journal.State
	why       string // it is in this state, as is on record
	locked    answer // some process holds the attachment's lock
	lockFile  answer // it has a lock file
	observer  answer // this process sees what its ADD saw: what it does not find is not there
	sameBoot  answer // its newest ADD was in this boot
	otherHost answer // that ADD was on another machine
	netns     answer // its network namespace is at its path
	inside    answer // a process is in its network namespace
	hostLink  answer // the host's end of its interface is there
	listed    answer // the runtime's list of what is attached has it; unknown without a list that speaks of it
	aged      answer // it is older than the grace period: a list that is being read now could have it
}

// Fact is one piece of evidence for people: a question, and "yes", "no" or "unknown".
type Fact struct {
	Question string `json:"question"`
	Answer   string `json:"answer"`
}

func (a answer) String() string { return [...]string{"unknown", "no", "yes"}[a] }

// Facts returns the evidence on which an attachment was judged.
func (f *Finding) Facts() []Fact {
	ev := f.evidence
	return []Fact{
		{"its lock is held", ev.locked.String()},
		{"this process sees what its ADD saw", ev.observer.String()},
		{"made in this boot", ev.sameBoot.String()},
		{"made on another machine", ev.otherHost.String()},
		{"its network namespace is at its path", ev.netns.String()},
		{"a process is in its network namespace", ev.inside.String()},
		{"the host's end of its interface is there", ev.hostLink.String()},
		{"the runtime lists it", ev.listed.String()},
		{"older than the grace period", ev.aged.String()},
	}
}

// Fate is what becomes of an attachment.
type Fate string

// The fates. What is Unknown is kept as what is Live is.
const (
	Unknown Fate = "unknown"
	Live    Fate = "live"
	Dead    Fate = "dead"
	// Foreign is an attachment of another machine, whose disk this is a copy of. A DEL could take from the original what
	// a cluster-wide IPAM keeps for it; only what lies on this disk is released.
	Foreign Fate = "foreign"
)

// verdict says what becomes of an attachment, and why.
type verdict struct {
	fate   Fate
	reason string
	warn   bool // live, though the runtime does not know it
}

const (
	reasonThere    = "its network namespace is there"
	reasonLocked   = "its lock is held: it is being worked on"
	reasonForeign  = "it was made on another machine, of which this disk is a copy"
	reasonFailed   = "its ADD failed" // what is on record goes on with why
	reasonEarlier  = "it was made before this boot"
	reasonCutOff   = "its ADD was cut off before it succeeded"
	reasonGone     = "its network namespace is gone"
	reasonUnlisted = "the runtime does not list it, and no process is in its network namespace"
)

// ends says whether the attachment is to be settled.
func (v verdict) ends() bool { return v.fate == Dead || v.fate == Foreign }

// decide gives the verdict on an attachment: the table of DESIGN §4. It is dead only if something proves it.
func decide(ev evidence) verdict {
	switch {
	case ev.locked == yes:
		return verdict{fate: Live, reason: reasonLocked}
	case ev.locked == unknown:
		return verdict{fate: Unknown, reason: "its lock cannot be looked at"}
	case ev.observer != yes:
		return verdict{fate: Unknown, reason: "its ADD ran in other namespaces than this process, which can tell nothing " +
			"from what it does not see; look from where the runtime runs"}
	case ev.sameBoot == no && ev.otherHost == yes:
		return verdict{fate: Foreign, reason: reasonForeign}
	case ev.state == journal.Unwinding:
		return verdict{fate: Dead, reason: reasonFailed}
	case ev.state == journal.Removing:
		return verdict{fate: Dead, reason: cmp.Or(ev.why, askedFor)}
	case ev.sameBoot == no && ev.otherHost == no:
		return verdict{fate: Dead, reason: reasonEarlier}
	case ev.sameBoot != yes:
		return verdict{fate: Unknown, reason: "whether it was made in this boot of this machine cannot be told"}
	case ev.state == journal.Adding && ev.lockFile == yes:
		return verdict{fate: Dead, reason: reasonCutOff}
	case ev.netns == yes && ev.listed == no:
		return decideUnlisted(ev)
	case ev.netns == yes:
		return verdict{fate: Live, reason: reasonThere}
	case ev.listed == yes:
		return verdict{fate: Live, reason: "the runtime lists it"}
	case ev.inside == yes:
		return verdict{fate: Live, reason: "a process is in its network namespace"}
	case ev.hostLink == yes:
		return verdict{fate: Live, reason: "the host's end of its interface is there"}
	case ev.netns == no && ev.inside == no && ev.hostLink == no:
		return verdict{fate: Dead, reason: reasonGone}
	}
	return verdict{fate: Unknown, reason: "its network namespace, the processes or the host's interfaces cannot be looked at"}
}

// decideUnlisted gives the verdict where the network namespace is there and the runtime does not list the attachment. The
// list may be older than the attachment.
func decideUnlisted(ev evidence) verdict {
	switch {
	case ev.inside == yes:
		return verdict{fate: Live, reason: "a process is in its network namespace, though the runtime does not list it", warn: true}
	case ev.inside == unknown:
		return verdict{fate: Unknown, reason: "the runtime does not list it, and the processes cannot be looked at"}
	case ev.aged == unknown:
		return verdict{fate: Unknown, reason: "the runtime does not list it, and its age cannot be told"}
	case ev.aged == no:
		return verdict{fate: Live, reason: "the runtime does not list it, but the grace period is not over"}
	}
	return verdict{fate: Dead, reason: reasonUnlisted}
}
