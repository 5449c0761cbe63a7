package decide

import (
	"slices"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/known"
)

// maxFailures is how often a pending DEL fails before it is dropped. Only tries after their pause
// count, so that takes about a day (see Pause), without a clock and across boots.
const maxFailures = 300

// Outcome is the result of one try of a DEL.
type Outcome struct {
	Failed bool
	Killed bool   // the delegate did not end by itself
	Code   uint   // the error code, if the DEL failed
	Words  string // the error message, if the DEL failed

	LateKilled bool // the DEL was late, and was killed at the time limit for late DELs

	Withheld bool // an address was removed from its prevResult
	// The facts about a DEL that failed. Early is set if the pause after the last try was not over,
	// NotInChain if the network's chain can be read and lacks the plugin, NetNSGone if the ADD's
	// namespace is proven gone, and MayHold if an address may depend on the DEL (see MayHold).
	Early      bool
	NotInChain bool
	NetNSGone  bool
	MayHold    bool

	Jitter float64 // from 0 to 1 (see Pause)
}

// After returns a step's state after a try of its DEL, and whether the step is done. For the table
// of cases, see "What follows a try of a DEL" in README.md. A plugin that frees by pod gets no
// second DEL after a successful one.
func After(s journal.Step, o Outcome, p Pass) (after journal.Step, done bool) {
	s.Tries++
	s.MayHaveRun = false
	s.Last, s.Code = "", 0
	pause := p.Now + int64(Pause(s.Tries, o.Jitter))
	provesNothing := known.Of(s.Type).MayFreeNothing || known.IPAMOf(s.Config).MayFreeNothing
	switch byPod := known.IPAMOf(s.Config).FreesByPod; {
	case o.Failed:
		s.Last, s.Code = o.Words, max(1, o.Code)
		if s.Next = (journal.Next{Why: journal.ForBackoff, At: pause}); o.Killed {
			s = Killed(s, p.Now, p.GracePeriod)
		}
		if o.LateKilled {
			s.LateKills++
		}
		return countFailure(s, o)
	case o.Withheld && !known.Of(s.Type).ByContainer:
		s.Next = journal.Next{Why: journal.ForOwner, At: pause}
		return s, false
	case s.Again == 0 && provesNothing && !p.Reassigned(&s):
		s.Again = p.Now + int64(p.GracePeriod)
	// a reboot ends the agent behind the delegate
	case byPod, s.ADD == journal.AddKilled && !p.SameBoot:
		s.Again = 0
	}
	s.Next = journal.Next{Why: journal.ForRepeat, At: s.Again}
	return s, Left(s.Next, p) == 0
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

// MayHold reports whether an address may depend on a step's DEL. isFree reports whether the
// attachment no longer has a claimed address. A host port may forward to an address.
func MayHold(s *journal.Step, claims []journal.Claim, isFree func(journal.Claim) bool) bool {
	return s.MayAllocate || HasPorts(s) || slices.ContainsFunc(claims,
		func(c journal.Claim) bool { return c.Step == s.Index && !isFree(c) })
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

// Killed returns the state of a step whose delegate was killed at the time now (CLOCK_BOOTTIME).
func Killed(s journal.Step, now int64, grace time.Duration) journal.Step {
	s.ADD, s.Again = journal.AddKilled, now+int64(grace)
	return s
}

// Share returns the time for one step's DEL, given the time that is left for the remaining steps. A
// delegate may be slow as long as the others do not need the time. A delegate that was killed
// before gets only an equal share.
func Share(s *journal.Step, left time.Duration, steps int, least time.Duration) time.Duration {
	limit := max(left-time.Duration(steps-1)*least, left/2)
	if s.ADD == journal.AddKilled {
		limit = left / time.Duration(steps)
	}
	return max(limit, least)
}
