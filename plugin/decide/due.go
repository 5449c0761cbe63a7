package decide

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/tristate"
)

// maxPause limits the time between two tries of a failing DEL; longPause limits it after more than
// often tries.
const (
	maxPause  = 30 * time.Second
	longPause = 5 * time.Minute
	often     = 20
)

// Pause returns how long sweeps wait before they retry a DEL, after that many tries. It is 0 after
// the first, since the next sandbox's ADD may follow a rollback immediately; then 2 s, 4 s, 8 s and
// so on. jitter, from 0 to 1, spreads the attachments of a node over the upper half.
func Pause(tries int, jitter float64) time.Duration {
	if tries < 2 {
		return 0
	}
	d := maxPause
	switch {
	case tries < 6:
		d = time.Second << (tries - 1)
	case tries > often:
		d = longPause
	}
	return d/2 + time.Duration(float64(d/2)*jitter)
}

// Pass is what is known about a record when its DELs are to run. A function looks when a row first
// asks for its fact.
type Pass struct {
	Now         int64         // CLOCK_BOOTTIME, nanoseconds
	SameBoot    bool          // the ADD was in this boot
	Since       int64         // the record is in its state, as Now
	GracePeriod time.Duration // of the attachment
	Asked       bool          // the runtime asks for the DEL of this attachment
	IgnorePause bool          // the runtime or a person asked: GC, unwindctl sweep, the runtime's DEL
	NoNetNS     bool          // there is no namespace to show, and nothing is at its path
	NewerLives  bool          // a newer ADD of the attachment lives

	ContainerLives func() bool // another attachment of the container lives, or is being added
	PodLives       func() bool // another sandbox of the pod lives, or is being added
	Queued         func(*journal.Step) bool
	// Withheld reports whether an address that the step would get has another owner.
	Withheld func(*journal.Step) bool
	// Forwarded reports whether a host port of this node may forward to an address that the DEL of the
	// step gives back.
	Forwarded func(*journal.Step) bool
}

// Due decides when the pending DEL of a step runs: now, if the result is zero. Otherwise it is what
// the DEL waits for, at most until a time if the result has one. Whatever runs or reports a DEL
// asks Due. README.md, "When a pending DEL runs", has the rows.
func Due(s *journal.Step, p Pass) journal.Wait {
	untilRuntime := p.Since + int64(p.GracePeriod)
	switch ipam := known.IPAMOf(s.Config); {
	case p.NewerLives:
		return journal.Wait{For: journal.ForNewer}
	case ipam.FreesByPod && p.PodLives(), freesByContainer(s) && p.ContainerLives():
		return journal.Wait{For: journal.ForContainer}
	case s.Wait.For == journal.ForQueue && p.Queued(s):
		return journal.Wait{For: journal.ForQueue}
	case p.NoNetNS && !p.Asked && p.SameBoot && known.Of(s.Type).SkipsUnnamed && p.Now < untilRuntime:
		return journal.Wait{Until: untilRuntime, For: journal.ForRuntime}
	case leftToRuntime(*s) && !p.Asked:
		return s.Wait
	case s.Wait.For == journal.ForRule && p.Forwarded(s):
		return journal.Wait{For: journal.ForRule}
	case s.Wait.For == journal.ForOwner && (!p.IgnorePause && Left(s.Wait, p) > 0 || p.Withheld(s)):
		return s.Wait
	case s.Wait.For == journal.ForRepeat && Left(s.Wait, p) > 0 &&
		(p.SameBoot || s.ADD != journal.AddKilled): // a reboot ends the agent behind the delegate
		return s.Wait
	case s.Wait.For == journal.ForTime && !p.IgnorePause && Left(s.Wait, p) > 0:
		return s.Wait
	}
	return journal.Wait{}
}

// Left returns the time until a wait is over. One that is further away than any wait can be was
// set in another boot, whose clock means nothing now.
func Left(w journal.Wait, p Pass) time.Duration {
	left := time.Duration(w.Until - p.Now)
	if left > max(longPause, p.GracePeriod) {
		return 0
	}
	return max(0, left)
}

// HoldBack decides whether an address must not be given back, since a host port forwards to it. If
// the rules cannot be listed, it must not only if the ADD may have made one.
func HoldBack(forwarded tristate.Value, mayHaveRule bool) bool {
	return forwarded == tristate.Yes || forwarded == tristate.Unknown && mayHaveRule
}

// MayHaveTaken reports whether the ADD of a delegate may have taken something: nobody knows that it
// failed.
func MayHaveTaken(s *journal.Step) bool { return s.ADD != journal.AddFailed }

// freesByContainer reports whether the DEL of a step has succeeded, or may have, and would free the
// address of another attachment of the same container if it ran again: whereabouts goes by
// container ID and interface in all networks, and before 0.9.0 by container ID alone. A DEL that
// may have run when unwind was killed counts as successful.
func freesByContainer(s *journal.Step) bool {
	passed := s.Tries > 0 && (s.Code == 0 || s.ADD == journal.AddKilled)
	return (passed || s.MayHaveRun) && known.IPAMOf(s.Config).Elsewhere
}

// KeepsContainer reports whether an attachment in this state is live or being added.
func KeepsContainer(state journal.State) bool {
	return state == journal.Adding || state == journal.Live
}

// Order returns the indexes of the steps in the order of their DELs: fewest tries first, so that a
// DEL that hangs starves no other, and otherwise in reverse order of the chain. A delegate that was
// killed before its first DEL comes after the others without one. A DEL that waits for a rule comes
// last, since another one may remove the rule.
func Order(steps []journal.Step) (order []int) {
	tries := func(s journal.Step) int {
		switch {
		case s.Wait.For == journal.ForRule:
			return math.MaxInt
		case s.Tries == 0 && s.ADD == journal.AddKilled:
			return 1
		}
		return 2 * s.Tries
	}
	sorted := slices.Clone(steps)
	slices.Reverse(sorted)
	slices.SortStableFunc(sorted,
		func(a, b journal.Step) int { return cmp.Compare(tries(a), tries(b)) })
	for _, s := range sorted {
		order = append(order, s.Index)
	}
	return order
}

// Words describes the state of a step's DEL in a few words, or "" if none was tried.
func Words(s *journal.Step) string {
	waits := map[journal.Cause]string{
		journal.ForOwner:     "waiting: its address has a new owner",
		journal.ForContainer: "waiting: it could release resources of another sandbox",
		journal.ForRule:      "waiting: a host port forwards to its address",
		journal.ForNewer:     "waiting: the container was added again",
		journal.ForRuntime:   "waiting: the runtime may ask for it",
		journal.ForQueue:     "waiting: its plugin has it in a queue",
		journal.ForRepeat:    "succeeded; runs once more",
	}
	switch words := waits[s.Wait.For]; {
	case words != "":
		return words
	case s.Code != 0:
		return fmt.Sprintf("code %d", s.Code)
	case s.Last != "":
		return s.Last
	case s.ADD == journal.AddKilled:
		return "was killed"
	}
	return ""
}

// Failing reports whether the last DEL of a step failed, and nothing but time lies before the next.
func Failing(s *journal.Step) bool { return s.Last != "" && s.Wait.For == journal.ForTime }
