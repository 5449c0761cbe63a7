package decide

import (
	"slices"

	"cni-unwind/journal"
)

// maxFailures is how often a pending DEL fails before it is dropped. Only tries after their pause
// count, so that takes about a day (see Pause), without a clock and across boots.
const maxFailures = 300

// Outcome is the result of one try of a DEL.
type Outcome struct {
	Failed bool
	Code   uint   // the error code, if the DEL failed
	Words  string // the error message, if the DEL failed

	// The facts about a DEL that failed. Early is set if the pause after the last try was not over,
	// NotInChain if the network's chain can be read and lacks the plugin, NetNSGone if the ADD's
	// namespace is proven gone, and MayHold if an address may depend on the DEL (see MayHold).
	Early      bool
	NotInChain bool
	NetNSGone  bool
	MayHold    bool

	Jitter float64 // from 0 to 1 (see Pause)
}

// After returns a step's state after a try of its DEL at the time now (CLOCK_BOOTTIME), and whether
// the step is done. For the table of cases, see "What follows a try of a DEL" in README.md. A DEL
// that exits 0 is believed.
func After(s journal.Step, o Outcome, now int64) (after journal.Step, done bool) {
	s.Tries++
	s.Last, s.Code, s.Next = "", 0, journal.Next{}
	if !o.Failed {
		return s, true
	}
	s.Last, s.Code = o.Words, max(1, o.Code)
	s.Next = journal.Next{Why: journal.ForBackoff, At: now + int64(Pause(s.Tries, o.Jitter))}
	return countFailure(s, o)
}

// countFailure counts a try that failed, and reports whether the DEL is dropped. A DEL on which an
// address may depend is dropped only if its plugin has left the chain for good.
func countFailure(s journal.Step, o Outcome) (after journal.Step, dropped bool) {
	switch {
	case !o.NotInChain:
		s.Absent = 0
	case !o.Early || s.Absent == 0:
		s.Absent++
	}
	if o.Early {
		return s, false
	}
	s.Failures++
	return s, o.NetNSGone && s.Failures >= maxFailures && (!o.MayHold || s.Absent >= maxFailures)
}

// MayHold reports whether an address may depend on a step's DEL, given the claims on addresses that
// the attachment still has. A host port may forward to an address.
func MayHold(s *journal.Step, held []journal.Claim) bool {
	return s.MayAllocate || HasPorts(s) ||
		slices.ContainsFunc(held, func(c journal.Claim) bool { return c.Step == s.Index })
}

// Retry is another configuration for a DEL that failed with its recorded one.
type Retry int

// The configurations.
const (
	Present       Retry = iota // the plugin's present one, as the runtime's DEL has it without unwind
	RecordedInNew              // the recorded one in the chain's present cniVersion
)

// Retries returns what a DEL gets that failed with its recorded configuration, in this order. A
// success counts. With another configuration, portmap might look for its rules in the wrong place,
// so if it rejected the recorded one unread, it gets that one in the present version first.
func Retries(s *journal.Step, code uint) []Retry {
	if s.ADD == journal.AddPassed && HasPorts(s) && slices.Contains(unread, code) {
		return []Retry{RecordedInNew, Present}
	}
	return []Retry{Present}
}

// unread are the error codes of a plugin that cannot use its configuration (SPEC 1.1 §5 "Error").
var unread = []uint{1, 2, 6, 7}
