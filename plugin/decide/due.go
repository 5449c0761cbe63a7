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

// Pass contains the facts about a record before its DELs run.
type Pass struct {
	Now         int64 // CLOCK_BOOTTIME, nanoseconds
	SameBoot    bool  // the ADD was in this boot
	IgnorePause bool  // GC, unwindctl sweep or the runtime's DEL started the pass
	NewerLives  bool  // a newer ADD of the attachment is live
	// PodLives is set if another sandbox of the pod is live or being added. It matters only if a step
	// frees by pod (see FreesByPod).
	PodLives bool

	Steps  []journal.Step  // the record's pending DELs
	Claims []journal.Claim // the addresses that the record claims
}

// Due decides when a step's pending DEL runs: now, or what it waits for. All code that runs or
// reports a DEL calls Due. For the table of cases, see "When a pending DEL runs" in README.md.
func Due(s *journal.Step, p Pass) journal.Next {
	switch {
	case p.NewerLives, p.PodLives && (FreesByPod(*s) || slices.ContainsFunc(p.Steps, FreesByPod)):
		return journal.Next{Why: journal.ForContainer}
	case len(p.awaited(s)) > 0:
		return journal.Next{Why: journal.ForRules}
	case s.Next.Why == journal.ForBackoff && !p.IgnorePause && Left(s.Next, p) > 0:
		return s.Next
	}
	return journal.Next{}
}

// FreesByPod reports whether a step's DEL frees the address of the whole pod.
func FreesByPod(s journal.Step) bool { return known.IPAMOf(s.Config).FreesByPod }

// Left returns the time until a pause is over. If that is longer than any pause, it was set in
// another boot. Its clock means nothing now, so Left returns 0.
func Left(n journal.Next, p Pass) time.Duration {
	left := time.Duration(n.At - p.Now)
	if left > longPause {
		return 0
	}
	return max(0, left)
}

// Reserved reports whether an address that the delegate at an index of the chain got must stay
// reserved, because a pending DEL after it needs the address:
//
//   - that of a delegate with port mappings: the next pod with the address would get the traffic;
//   - that of a delegate that may remove rules by the address alone, for two tries: its DELs do not
//     get an address that is free (see Gets). While its binary is missing, the DEL was not tried.
//
// No DEL of an earlier boot counts, nor that of a plugin that has left the chain: the runtime gets
// no error for that one, and the container's next ADD may need the address.
func Reserved(index int, p Pass) bool { return len(p.needing(index)) > 0 }

// needing returns the steps whose DELs need an address that the delegate at an index got.
func (p Pass) needing(index int) (steps []journal.Step) {
	for _, s := range p.Steps {
		if p.SameBoot && s.Index > index && (mayForward(&s) || hasRules(&s)) {
			steps = append(steps, s)
		}
	}
	return steps
}

// PortPending reports whether a host port may still forward to an address that the delegate at an
// index of the chain got.
func PortPending(index int, p Pass) bool {
	return slices.ContainsFunc(p.needing(index), func(s journal.Step) bool { return mayForward(&s) })
}

func mayForward(s *journal.Step) bool {
	return s.Absent == 0 && s.ADD != journal.AddFailed && HasPorts(s)
}

// missing is the code of a DEL whose plugin has no binary (types.ErrPluginNotAvailable of CNI).
const missing = 50

func hasRules(s *journal.Step) bool {
	return s.Absent == 0 && s.ADD == journal.AddPassed && ByAddress(s) &&
		(s.Tries < 2 || s.Code == missing)
}

// awaited returns the steps for whose DELs a step's DEL waits, because it would free an address
// that they need.
func (p Pass) awaited(s *journal.Step) []journal.Step {
	if !slices.ContainsFunc(p.Claims, func(c journal.Claim) bool { return c.Step == s.Index }) {
		return nil
	}
	return p.needing(s.Index)
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

// KeepsContainer reports whether an attachment in this state is live or being added.
func KeepsContainer(state journal.State) bool {
	return state == journal.Adding || state == journal.Live
}

// Order returns the indexes of a record's steps in the order of their DELs. The fewest tries come
// first, so a DEL that hangs does not starve the others. Steps with equally many tries run in
// reverse chain order. A DEL that frees an address comes after those that it waits for.
func Order(p Pass) (order []int) {
	after := map[int]int{} // by index
	for _, s := range p.Steps {
		after[s.Index] = s.Tries
		for _, later := range p.awaited(&s) {
			after[s.Index] = max(after[s.Index], later.Tries)
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
	}
	return ""
}

var waits = map[journal.Why]string{
	journal.ForContainer: "waiting: it could release resources of another ADD",
	journal.ForRules:     "waiting: rules or host ports for its address may remain",
}

// Failing reports whether a step's last DEL failed, and nothing else keeps the next one waiting.
func Failing(s *journal.Step) bool { return s.Last != "" && !s.Next.Why.Blocked() }
