// Package decide makes unwind's decisions, such as which attachments are dead. Its functions are
// pure: package facts inspects the node, and package undo acts.
package decide

import (
	"cmp"

	"cni-unwind/journal"
	"cni-unwind/plugin/known"
)

// Evidence contains the facts about an attachment. In the zero value, every fact is unknown.
type Evidence struct {
	State           journal.State
	Reason          Reason // why it is in this state, from the journal
	Locked          Fact   // another process holds the attachment's lock
	SameNamespaces  Fact   // this process runs in the namespaces of its ADD
	SameBoot        Fact   // its ADD was in this boot
	OtherHost       Fact   // its ADD was on another machine
	NetNS           Fact   // its network namespace is at its path, or mounted elsewhere
	HasProcess      Fact   // a process is in its network namespace
	HostLink        Fact   // the host end of its interface exists
	Listed          Fact   // the runtime's list contains it; unknown if no list covers it
	PastGracePeriod Fact   // it is older than the grace period, so a list should contain it
	AddedUnseen     Fact   // an ADD that is not in the journal added it again (see facts.Node.Later)
}

// Verdict says whether an attachment is dead.
type Verdict string

// The verdicts. A sweep keeps Unknown attachments, as it keeps Live ones.
const (
	Unknown Verdict = "unknown"
	Live    Verdict = "live"
	Dead    Verdict = "dead"
	// Foreign is the verdict on an attachment of an earlier boot that may belong to another machine,
	// because the node's disk may be a clone. A DEL could release resources of the other machine, such
	// as an address of a cluster-wide pool. This node's kernel has kept nothing across the reboot. So
	// unwind runs no DEL, and releases only host-local's reservations on the node's disk.
	Foreign Verdict = "other-machine"
)

// Judgment is the verdict on an attachment, with the reason.
type Judgment struct {
	Verdict Verdict
	Reason  Reason
	Warn    bool // the verdict is Live, but a sweep logs the reason as a warning
}

// Releasable reports whether the attachment should be released.
func (v Judgment) Releasable() bool { return v.Verdict == Dead || v.Verdict == Foreign }

// Recent reports whether the verdict is live only because the grace period has not expired.
func (v Judgment) Recent() bool { return v.Reason.Is(WithinGrace) }

// NetNSThere and Locked are verdicts that other packages also use without calling Decide.
var (
	NetNSThere = live("its network namespace exists")
	Locked     = live("its lock is held by a running operation")
)

func live(text string) Judgment { return Judgment{Verdict: Live, Reason: Reason{Text: text}} }

func dead(reason Reason) Judgment { return Judgment{Verdict: Dead, Reason: reason} }

// Undecided returns the verdict Unknown with the given text as its reason. If doubt is not "", it
// is appended to the text, as the cause.
func Undecided(text, doubt string) Judgment {
	if doubt != "" {
		text += ": " + doubt
	}
	return Judgment{Verdict: Unknown, Reason: Reason{Text: text}}
}

// Decide returns the verdict on an attachment (see "Who is dead" in README.md). An attachment is
// not dead if an ADD without a journal record added it again: the DELs of the recorded ADD would
// release resources of the later one.
func Decide(ev Evidence) Judgment {
	v := decideRecorded(ev)
	switch {
	case v.Releasable() && Yes(ev.AddedUnseen):
		v = live("a later ADD, which is not in the journal, added it again; the runtime's DEL will " +
			"undo both ADDs")
		v.Warn = true
	case v.Releasable() && unknown(ev.AddedUnseen):
		return Undecided("cannot tell whether a later ADD, which is not in the journal, added it "+
			"again",
			why(ev.AddedUnseen))
	}
	return v
}

// decideRecorded returns the verdict on the ADD in the journal.
func decideRecorded(ev Evidence) Judgment {
	switch {
	case Yes(ev.Locked):
		return Locked
	case unknown(ev.Locked):
		return Undecided("its lock cannot be inspected", "")
	case !Yes(ev.SameNamespaces):
		return Undecided("cannot tell from these namespaces whether it is live; run this on the "+
			"host, or with --host", "")
	case No(ev.SameBoot) && !No(ev.OtherHost):
		return Judgment{Verdict: Foreign, Reason: OtherMachine}
	case ev.State == journal.RollingBack:
		return dead(FailedADD)
	case ev.State == journal.Deleting:
		return dead(Recorded(ev.Reason.Code, ev.Reason.Text))
	case No(ev.SameBoot):
		return dead(EarlierBoot)
	case unknown(ev.SameBoot):
		return Undecided("cannot tell whether it was added since this machine last booted", "")
	case ev.State == journal.Adding:
		return dead(Interrupted)
	case !Yes(ev.Listed) && No(ev.NetNS) && No(ev.HasProcess) &&
		No(ev.HostLink):
		return dead(NetNSGone)
	case No(ev.Listed) && !unknown(ev.NetNS):
		return decideUnlisted(ev)
	case Yes(ev.NetNS):
		return NetNSThere
	case Yes(ev.Listed):
		return live("the runtime lists it")
	case Yes(ev.HasProcess):
		return live("a process is in its network namespace")
	case Yes(ev.HostLink):
		return live("the host end of its interface exists")
	}
	return Undecided(cmp.Or(why(ev.NetNS, ev.HasProcess, ev.HostLink),
		"its network namespace, the processes or the host's interfaces cannot be inspected"), "")
}

// decideUnlisted returns the verdict on an attachment that the runtime does not list, although its
// network namespace, a process in it, or the host end of its interface may exist. The namespace or
// the host end alone does not prove that the attachment is live, because a process elsewhere may
// merely keep the namespace open. A young attachment is live: the list may be older than it.
func decideUnlisted(ev Evidence) Judgment {
	switch {
	case Yes(ev.HasProcess):
		v := live("a process is in its network namespace, though the runtime does not list it")
		v.Warn = true
		return v
	case unknown(ev.HasProcess):
		return Undecided("the runtime does not list it, and some processes cannot be inspected",
			why(ev.HasProcess))
	case unknown(ev.PastGracePeriod):
		return Undecided("the runtime does not list it, and its age is unknown", "")
	case No(ev.PastGracePeriod):
		return Judgment{Verdict: Live, Reason: WithinGrace}
	}
	return dead(Unlisted)
}

// Stray contains the evidence on an owner that the journal does not contain: the owner of a
// host-local reservation or of a file in libcni's cache. An owner is listed if the runtime's list
// contains its container, with any interface.
type Stray struct {
	SameNamespaces  Fact // this process runs in the runtime's namespaces
	Listed          Fact // the runtime's list contains the container; unknown if no list covers it
	PastGracePeriod Fact // see DecideGrace
	Undated         bool // the clock does not show the owner's age
	Cached          Fact // libcni's cache contains the owner, and the owner's namespace may exist
	Runs            Fact // a process's cgroup names the container
	InUse           Fact // an interface in some network namespace uses the address
}

// DecideStray returns the verdict on a reservation whose owner is not in the journal. Such an owner
// is a pod that started without unwind or, if the journal was lost, any pod (antrea#8239). The
// reservation is dead only if all evidence agrees.
func DecideStray(o Stray) Judgment {
	switch {
	case unknown(o.SameNamespaces):
		return Undecided("this process cannot see whether it runs in the runtime's namespaces (run "+
			"this on the host as root, or with --cri)", why(o.SameNamespaces))
	case No(o.SameNamespaces):
		return Undecided("this process does not run in the runtime's namespaces (run this on the "+
			"host, or with --cri)", "")
	case unknown(o.Listed) && Yes(o.Runs):
		return live("no runtime's list covers its owner, but one of the owner's processes is running")
	case unknown(o.Listed) && Yes(o.InUse):
		return live("no runtime's list covers its owner, but an interface has the address")
	case unknown(o.Listed):
		return Undecided("its owner is not in the journal, and no runtime's list covers it",
			why(o.InUse, o.Runs))
	case Yes(o.Listed):
		return live("the runtime lists its owner")
	case unknown(o.PastGracePeriod):
		return Undecided("its age is unknown, because this process cannot see whether it runs in the "+
			"time namespace of process 1 (run this on the host as root, or with --host)", "")
	case No(o.PastGracePeriod) && o.Undated:
		return Judgment{Verdict: Live, Reason: Reason{WithinGrace.Code,
			"the runtime does not list its owner, but the owner's age is unknown, because the clock " +
				"was set after host-local wrote the file"}}
	case No(o.PastGracePeriod):
		return Judgment{Verdict: Live, Reason: Reason{WithinGrace.Code,
			"the runtime does not list its owner, but the grace period has not expired"}}
	case unknown(o.Cached):
		return Undecided("libcni's cache cannot be read", "")
	case Yes(o.Cached):
		return live("its owner is in libcni's cache, and the owner's network namespace exists")
	case Yes(o.Runs):
		return live("the runtime does not list its owner, but the owner has a running process")
	case Yes(o.InUse):
		return live("an interface has the address")
	case unknown(o.Runs), unknown(o.InUse):
		return Undecided("some processes or network namespaces cannot be inspected",
			why(o.InUse, o.Runs))
	}
	return dead(Reason{"stray", "its owner is in neither the journal nor the runtime's list and has " +
		"no running process, and no interface has the address"})
}

// Owner contains the facts about the owner of an address that a record claims.
type Owner struct {
	InFile bool // host-local's file in the recorded pool names the attachment
	Freed  bool // the DEL of the step that allocated the address may have been started
	Others bool // another attachment has, or may have, the address, and may have rules for it
}

// ByAddress reports whether a step's DEL may remove rules by address alone. Such a DEL may remove
// the rules of the address's next owner.
func ByAddress(s *journal.Step) bool { return !known.ByType(s.Type).ByContainer }

// Gets reports whether a step's DEL gets a claimed address in its prevResult. The delegate that
// allocated the address always gets it, and so does a plugin that removes only its own container's
// resources. Any other plugin might remove the rules of the address's next owner (cni#924). So such
// a plugin gets the address only while the address provably belongs to this ADD; its DEL should
// succeed even without the address.
func Gets(s *journal.Step, c journal.Claim, o Owner) bool {
	switch {
	case s.Index == c.Step || !ByAddress(s):
		return true
	case o.Others:
		return false
	case c.Pool != "":
		return o.InFile
	}
	return !o.Freed
}

// Reason says why an attachment got its verdict, or why it is undone. Code identifies the reason in
// the journal and in metrics; it is "" for most reasons to keep an attachment. Text is for people,
// and may contain more details than the usual text for the code.
type Reason struct {
	Code string
	Text string
}

func (r Reason) String() string { return r.Text }

// Label returns the value of the metric label "reason". It is Code, or "requested" if a DEL or ADD
// of the runtime undid the attachment.
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
	Requested   = Reason{"requested", "the runtime requested its DEL"}
	Superseded  = Reason{"superseded", "superseded by another ADD of the same container ID"}
	FailedADD   = Reason{"failed-add", "its ADD failed"}
	EarlierBoot = Reason{"earlier-boot", "it was added before the last boot"}
	Interrupted = Reason{"interrupted", "its ADD was interrupted before it succeeded"}
	NetNSGone   = Reason{"netns-gone", "its network namespace is gone"}
	Unlisted    = Reason{"unlisted",
		"the runtime does not list it, and no process is in its network namespace"}
	OtherMachine = Reason{"other-machine",
		"it was added before the last boot, possibly on another machine"}
)

// Recorded returns a record's reason. An empty code or text is replaced by that of Requested.
func Recorded(code, text string) Reason {
	return Reason{cmp.Or(code, Requested.Code), cmp.Or(text, Requested.Text)}
}

// WithinGrace is the reason to keep an attachment that the runtime's list lacks, because the list
// may be older than the attachment.
var WithinGrace = Reason{"within-grace",
	"the runtime does not list it, but the grace period has not expired"}

// Fact is yes, no or unknown. nil is unknown. Package facts determines a fact when it is first
// needed, and only once. A Truth is a fact that is already determined.
type Fact interface {
	// Ask returns the fact. If the fact is unknown, why is the reason in words, or "".
	Ask() (v Truth, why string)
}

func ask(f Fact) (v Truth, why string) {
	if f == nil {
		return Unclear, ""
	}
	return f.Ask()
}

// Yes reports whether a fact is known to be true.
func Yes(f Fact) bool { v, _ := ask(f); return v == True }

// No reports whether a fact is known to be false.
func No(f Fact) bool { v, _ := ask(f); return v == False }

func unknown(f Fact) bool { v, _ := ask(f); return v == Unclear }

// why returns the first known reason for which a fact is unknown, or "".
func why(facts ...Fact) string {
	for _, f := range facts {
		if _, why := ask(f); why != "" {
			return why
		}
	}
	return ""
}
