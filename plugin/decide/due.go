package decide

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/known"
)

// maxPause limits the pause between two tries of a failing DEL. After 20 tries (often), longPause
// limits it instead.
const (
	maxPause  = 30 * time.Second
	longPause = 5 * time.Minute
	often     = 20
)

// Pause returns how long a sweep waits before it retries a DEL that was tried that many times. It
// is 0 after the first try, because the next sandbox's ADD may follow a rollback immediately.
// jitter, from 0 to 1, spreads a node's attachments over the upper half of each pause.
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
	// Withheld reports whether an address in the step's prevResult has another owner.
	Withheld func(*journal.Step) bool
	// Reassigned reports whether the step's IPAM plugin has freed each address of the step's ADD: an
	// ADD of the same network has just got it.
	Reassigned func(*journal.Step) bool

	Steps  []journal.Step  // the record's pending DELs
	Claims []journal.Claim // the addresses that the record claims
}

// Due decides when a step's pending DEL runs: now, or what it waits for. All code that runs or
// reports a DEL calls Due. For the table of cases, see "When a pending DEL runs" in README.md. A
// wait for an owner, or for a repetition, is in the step itself, so no other wait replaces it.
func Due(s *journal.Step, p Pass) journal.Next {
	untilRuntime := p.Since + int64(p.GracePeriod)
	switch ipam := known.IPAMOf(s.Config); {
	case s.Next.Why == journal.ForOwner && (!p.IgnorePause && Left(s.Next, p) > 0 || p.Withheld(s)):
		return s.Next
	case s.Next.Why == journal.ForRepeat && Left(s.Next, p) > 0 &&
		(p.SameBoot || s.ADD != journal.AddKilled): // a reboot ends the agent behind the delegate
		return s.Next
	case p.NewerLives, ipam.FreesByPod && p.PodLives(), freesByContainer(s) && p.ContainerLives():
		return journal.Next{Why: journal.ForContainer}
	case p.NoNetNS && !p.Asked && p.SameBoot && known.Of(s.Type).SkipsUnnamed && p.Now < untilRuntime:
		return journal.Next{Why: journal.ForRuntime, At: untilRuntime}
	case p.awaitsPort(s):
		return journal.Next{Why: journal.ForPort}
	case s.Next.Why == journal.ForBackoff && !p.IgnorePause && Left(s.Next, p) > 0:
		return s.Next
	}
	return journal.Next{}
}

// Repeats reports whether a step's DEL has succeeded, and runs once more only because it may have
// freed nothing (known.Plugin.MayFreeNothing).
func Repeats(s *journal.Step) bool { return s.Again != 0 && s.ADD != journal.AddKilled }

// NeedsNoRepeat reports whether such a step is done without the second DEL, because its IPAM plugin
// has assigned its addresses again.
func NeedsNoRepeat(s *journal.Step, p Pass) bool { return Repeats(s) && p.Reassigned(s) }

// Left returns the time until a wait is over. If that is longer than any wait can be, the wait was
// set in another boot. Its clock means nothing now, so Left returns 0.
func Left(n journal.Next, p Pass) time.Duration {
	left := time.Duration(n.At - p.Now)
	if left > max(longPause, p.GracePeriod) {
		return 0
	}
	return max(0, left)
}

// PortPending reports whether a host port may still forward to the addresses that the delegate at
// an index of the chain allocated. It may while a later delegate that got port mappings has a
// pending DEL. The next pod with such an address would get the traffic, so nothing releases the
// address meanwhile. It counts no delegate whose ADD failed or was before this boot, nor one whose
// plugin has left the chain: the runtime gets no error for that one, and the container's next ADD
// may need the address.
func PortPending(index int, p Pass) bool {
	return p.SameBoot && slices.ContainsFunc(p.Steps,
		func(s journal.Step) bool { return s.Index > index && mayForward(&s) })
}

func mayForward(s *journal.Step) bool {
	return s.ADD != journal.AddFailed && s.Absent == 0 && HasPorts(s)
}

// HasPorts reports whether a delegate got port mappings. Its configuration contains some only if
// the delegate declares the capability, and the runtime sent some.
func HasPorts(s *journal.Step) bool {
	var conf struct {
		RuntimeConfig struct {
			PortMappings []json.RawMessage `json:"portMappings"`
		} `json:"runtimeConfig"`
	}
	return json.Unmarshal(s.Config, &conf) == nil && len(conf.RuntimeConfig.PortMappings) > 0
}

// awaitsPort reports whether a step's DEL would release an address to which a host port may still
// forward.
func (p Pass) awaitsPort(s *journal.Step) bool {
	return slices.ContainsFunc(p.Claims, func(c journal.Claim) bool { return c.Step == s.Index }) &&
		PortPending(s.Index, p)
}

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

// Order returns the indexes of a record's steps in the order of their DELs. The fewest tries come
// first, so a DEL that hangs does not starve the others. Steps with equally many tries run in
// reverse chain order. A delegate that was killed in its ADD comes after the other steps without a
// try. A DEL that waits for a host port comes after the DEL that removes the port.
func Order(p Pass) (order []int) {
	tries := func(s journal.Step) int {
		if s.Tries == 0 && s.ADD == journal.AddKilled {
			return 1
		}
		return 2 * s.Tries
	}
	after := map[int]int{} // by index
	for _, s := range p.Steps {
		after[s.Index] = tries(s)
		for _, port := range p.Steps {
			if port.Index > s.Index && mayForward(&port) && p.awaitsPort(&s) {
				after[s.Index] = max(after[s.Index], tries(port))
			}
		}
	}
	sorted := slices.Clone(p.Steps)
	slices.Reverse(sorted)
	slices.SortStableFunc(sorted,
		func(a, b journal.Step) int { return cmp.Compare(after[a.Index], after[b.Index]) })
	for _, s := range sorted {
		order = append(order, s.Index)
	}
	return order
}

// Words describes the state of a step's DEL in a few words. It returns "" for a DEL that was never
// tried.
func Words(s *journal.Step) string {
	switch {
	case s.Next.Why.Blocked():
		return waits[s.Next.Why]
	case s.Code != 0:
		return fmt.Sprintf("code %d", s.Code)
	case s.Last != "":
		return s.Last
	case s.ADD == journal.AddKilled:
		return "was killed"
	}
	return ""
}

var waits = map[journal.Why]string{
	journal.ForOwner:     "waiting: its address has a new owner",
	journal.ForContainer: "waiting: it could release resources of another ADD",
	journal.ForPort:      "waiting: a host port may forward to its address",
	journal.ForRuntime:   "waiting for the runtime's own DEL",
	journal.ForRepeat:    "succeeded; runs once more",
}

// Failing reports whether a step's last DEL failed, and nothing else keeps the next one waiting.
func Failing(s *journal.Step) bool { return s.Last != "" && !s.Next.Why.Blocked() }
