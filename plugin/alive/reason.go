package alive

import (
	"cmp"
)

// Reason says why an attachment has its verdict, or why it is undone. Code is its name in the
// journal and in metrics, and the only part that code goes by. Text is for people, and may say more
// than the Reason of the same code below. Code is "" for a reason that keeps an attachment: the
// journal never has it.
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

// Is says whether two reasons are the same, even if the text of one says more.
func (r Reason) Is(other Reason) bool { return r.Code == other.Code && r.Code != "" || r == other }

// These are the reasons for which an attachment is undone.
var (
	Requested    = Reason{"requested", "the runtime asked for its DEL"}
	Superseded   = Reason{"superseded", "superseded by another ADD of the same container ID"}
	FailedADD    = Reason{"failed-add", "its ADD failed"}
	EarlierBoot  = Reason{"earlier-boot", "it was made before this boot"}
	CutOff       = Reason{"cut-off", "its ADD was cut off before it succeeded"}
	NetNSGone    = Reason{"netns-gone", "its network namespace is gone"}
	Unlisted     = Reason{"unlisted", "the runtime does not list it, and no process is in its network namespace"}
	OtherMachine = Reason{"foreign", "it was made on another machine, of which this disk is a copy"}
)

// Recorded returns the reason of an entry from its code and text. The text may say more than that of the
// same code above.
func Recorded(code, text string) Reason {
	return Reason{cmp.Or(code, Requested.Code), cmp.Or(text, Requested.Text)}
}

// These are the reasons for which an attachment, or a reservation, is kept.
var (
	netNSThere      = Reason{"", "its network namespace is there"}
	locked          = Reason{"", "its lock is held: it is being worked on"}
	listed          = Reason{"", "the runtime lists it"}
	hasProcess      = Reason{"", "a process is in its network namespace"}
	hostLinkThere   = Reason{"", "the host's end of its interface is there"}
	addedUnseen     = Reason{"", "it was added again by an ADD that the journal did not see, and that lives: its own DEL undoes both"}
	withinGrace     = Reason{"", "the runtime does not list it, but the grace period is not over"}
	unlistedProcess = Reason{"", "a process is in its network namespace, though the runtime does not list it"}
)

// These are the reasons for which unwind cannot tell whether an attachment lives.
var (
	lockUnknown        = Reason{"", "its lock cannot be looked at"}
	otherNamespaces    = Reason{"", "its ADD ran in other namespaces than this process, which can tell nothing from what it does not see; look from where the runtime runs"}
	bootUnknown        = Reason{"", "whether it was made in this boot of this machine cannot be told"}
	addedUnseenUnknown = Reason{"", "whether an ADD past the journal added it again cannot be told"}
	unlistedProcesses  = Reason{"", "the runtime does not list it, and the processes cannot be looked at"}
	unlistedAge        = Reason{"", "the runtime does not list it, and its age cannot be told"}
	nodeUnknown        = Reason{"", "its network namespace, the processes or the host's interfaces cannot be looked at"}
)

// NetNSThere and Locked are the verdicts that need no more evidence.
var (
	NetNSThere = Verdict{Fate: Live, Reason: netNSThere}
	Locked     = Verdict{Fate: Live, Reason: locked}
)
