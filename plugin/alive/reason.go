package alive

import (
	"cmp"
)

// Reason says why an attachment has its verdict, or why it is undone. Code is its name in the
// journal and in metrics, and the only part that programs may rely on. Text is for people, and may
// add details to the text of the same code below. Code is "" for most reasons to keep an
// attachment, which are never written to the journal.
type Reason struct {
	Code string
	Text string
}

func (r Reason) String() string { return r.Text }

// because adds a cause to the text of a reason.
func (r Reason) because(cause string) Reason {
	if cause != "" {
		r.Text += ": " + cause
	}
	return r
}

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

// The reasons to keep an attachment or a reservation.
var (
	netNSThere    = Reason{"", "its network namespace exists"}
	locked        = Reason{"", "its lock is held by a running operation"}
	listed        = Reason{"", "the runtime lists it"}
	hasProcess    = Reason{"", "a process is in its network namespace"}
	hostLinkThere = Reason{"", "the host end of its interface exists"}
	addedUnseen   = Reason{"",
		"it was added again by an ADD that the journal did not record and that is live; " +
			"the DEL of that ADD undoes both"}
	unlistedProcess = Reason{"",
		"a process is in its network namespace, though the runtime does not list it"}

	// WithinGrace is the reason for what may be dead, but is too young to be judged by a list.
	WithinGrace = Reason{"within-grace",
		"the runtime does not list it, but the grace period has not expired"}
)

// The reasons why unwind does not know whether an attachment is live.
var (
	lockUnknown     = Reason{"", "its lock cannot be inspected"}
	otherNamespaces = Reason{"",
		"its ADD ran in other namespaces than this process, which cannot see what the ADD saw; " +
			"run this where the runtime runs"}
	bootUnknown        = Reason{"", "it is unknown whether it was added in this boot of this machine"}
	addedUnseenUnknown = Reason{"",
		"it is unknown whether an ADD without a journal entry added it again"}
	unlistedProcesses = Reason{"",
		"the runtime does not list it, and the processes cannot be inspected"}
	unlistedAge = Reason{"", "the runtime does not list it, and its age is unknown"}
	nodeUnknown = Reason{"",
		"its network namespace, the processes or the host's interfaces cannot be inspected"}
)

// NetNSThere and Locked are the verdicts that need no further evidence.
var (
	NetNSThere = Verdict{Fate: Live, Reason: netNSThere}
	Locked     = Verdict{Fate: Live, Reason: locked}
)
