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

// maxPause limits the pause between two tries of a failing DEL. After 20 tries (often), longPause
// limits it instead.
const (
	maxPause  = 30 * time.Second
	longPause = 5 * time.Minute
	often     = 20
)

// Pause returns how long a sweep waits before it retries a DEL that was tried that many times. It
// is 0 after the first try, because the next sandbox's ADD may follow a rollback immediately. Then
// it is 2 s, 4 s, 8 s and so on. jitter, from 0 to 1, spreads a node's attachments over the upper
// half of each pause.
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

// Pass contains the facts about a record before its DELs run. Its functions check their facts only
// when a case of Due needs them.
type Pass struct {
	Now         int64         // CLOCK_BOOTTIME, nanoseconds
	SameBoot    bool          // the ADD was in this boot
	Since       int64         // when the record entered its state, on the same clock
	GracePeriod time.Duration // the attachment's grace period
	Asked       bool          // the runtime has sent the DEL of this attachment
	IgnorePause bool          // GC, unwindctl sweep or the runtime's DEL started the pass
	NoNetNS     bool          // the DEL cannot get the namespace, and nothing is at its path
	NewerLives  bool          // a newer ADD of the attachment is live

	ContainerLives func() bool // another attachment of the container is live or being added
	PodLives       func() bool // another sandbox of the pod is live or being added
	// Queued reports whether the plugin's own queue still contains the step's DEL.
	Queued func(*journal.Step) bool
	// Withheld reports whether an address in the step's prevResult has another owner.
	Withheld func(*journal.Step) bool
	// Forwarded reports whether a host port of this node may forward to an address that the step's
	// DEL releases.
	Forwarded func(*journal.Step) bool
}

// Due decides when a step's pending DEL runs. If the result is zero, the DEL runs now. Otherwise
// the result says what the DEL waits for, and until when at most, if there is a limit. All code
// that runs or reports a DEL calls Due. For the table of cases, see "When a pending DEL runs" in
// README.md.
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

// Left returns the time until a wait is over. If that is longer than any wait can be, the wait was
// set in another boot. Its clock means nothing now, so Left returns 0.
func Left(w journal.Wait, p Pass) time.Duration {
	left := time.Duration(w.Until - p.Now)
	if left > max(longPause, p.GracePeriod) {
		return 0
	}
	return max(0, left)
}

// HoldBack decides whether an address must not be released, because a host port forwards to it. If
// the rules cannot be listed, an address is held back only if the ADD may have created a rule.
func HoldBack(forwarded tristate.Value, mayHaveRule bool) bool {
	return forwarded == tristate.Yes || forwarded == tristate.Unknown && mayHaveRule
}

// MayHaveTaken reports whether a delegate's ADD may have taken something. It may, unless it is
// known to have failed.
func MayHaveTaken(s *journal.Step) bool { return s.ADD != journal.AddFailed }

// freesByContainer reports whether a second DEL of a step could free an address of another
// attachment of the same container, because the first DEL succeeded or may have succeeded. For
// example, whereabouts frees by container ID and interface in all networks, and before 0.9.0 by
// container ID alone. A DEL that may have run when unwind was killed counts as successful.
func freesByContainer(s *journal.Step) bool {
	passed := s.Tries > 0 && (s.Code == 0 || s.ADD == journal.AddKilled)
	return (passed || s.MayHaveRun) && known.IPAMOf(s.Config).Elsewhere
}

// KeepsContainer reports whether an attachment in this state is live or being added.
func KeepsContainer(state journal.State) bool {
	return state == journal.Adding || state == journal.Live
}

// Order returns the indexes of the steps in the order of their DELs. The fewest tries come first,
// so a DEL that hangs does not starve the others. Steps with equally many tries run in reverse
// chain order. A delegate that was killed in its ADD comes after the other steps without a try. A
// DEL that waits for a rule comes last, because another DEL may remove the rule.
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

// Words describes the state of a step's DEL in a few words. It returns "" for a DEL that was never
// tried.
func Words(s *journal.Step) string {
	waits := map[journal.Cause]string{
		journal.ForOwner:     "waiting: its address has a new owner",
		journal.ForContainer: "waiting: it could release resources of another sandbox",
		journal.ForRule:      "waiting: a host port forwards to its address",
		journal.ForNewer:     "waiting: the container was added again",
		journal.ForRuntime:   "waiting for the runtime's own DEL",
		journal.ForQueue:     "waiting: its plugin has queued the deletion",
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

// Failing reports whether a step's last DEL failed, and the next one only waits for time to pass.
func Failing(s *journal.Step) bool { return s.Last != "" && s.Wait.For == journal.ForTime }
