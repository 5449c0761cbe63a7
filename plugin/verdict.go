package plugin

import "cni-unwind/journal"

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
	locked    answer // some process holds the attachment's lock
	lockFile  answer // it has a lock file
	sameBoot  answer // its newest ADD was in this boot
	otherHost answer // that ADD was on another machine
	netns     answer // its network namespace is at its path
	inside    answer // a process is in its network namespace
	hostLink  answer // the host's end of its interface is there
}

// verdict says whether an attachment is dead, so that it may be released, and why.
type verdict struct {
	dead   bool
	reason string
}

// decide gives the verdict on an attachment: the table of DESIGN §4. It is dead only if something proves it.
func decide(ev evidence) verdict {
	switch {
	case ev.locked != no:
		return verdict{false, "its lock is held: it is being worked on"}
	case ev.state == journal.Unwinding:
		return verdict{true, "its ADD failed"}
	case ev.state == journal.Removing:
		return verdict{true, "the runtime asked for its DEL"}
	case ev.sameBoot == no && ev.otherHost == yes:
		return verdict{false, "it was made on another machine"}
	case ev.sameBoot == no && ev.otherHost == no:
		return verdict{true, "it was made before this boot"}
	case ev.state == journal.Adding && ev.lockFile == yes:
		return verdict{true, "its ADD was cut off before it succeeded"}
	case ev.netns == yes:
		return verdict{false, "its network namespace is there"}
	case ev.inside == yes:
		return verdict{false, "a process is in its network namespace"}
	case ev.hostLink == yes:
		return verdict{false, "the host's end of its interface is there"}
	case ev.netns == no && ev.inside == no && ev.hostLink == no:
		return verdict{true, "its network namespace is gone"}
	}
	return verdict{false, "not enough is known of it"}
}
