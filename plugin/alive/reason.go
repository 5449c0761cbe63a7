package alive

import "cmp"

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
