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

// maxPause limits the pause between two attempts at a DEL that fails. After manyTries attempts, the
// limit is longPause.
const (
	maxPause  = 30 * time.Second
	longPause = 5 * time.Minute
	manyTries = 20
)

// Pause returns the time to wait before a failed DEL is retried, given the number of tries so far.
// After the first try, there is no pause: the pod's next ADD may follow a rollback at once, and can
// then retry the DEL. jitter, from 0 to 1, makes the pause 50 to 100 % of its maximum, so that a
// node's attachments don't retry simultaneously.
func Pause(tries int, jitter float64) time.Duration {
	if tries < 2 {
		return 0
	}
	d := maxPause
	switch {
	case tries < 6:
		d = time.Second << (tries - 1)
	case tries > manyTries:
		d = longPause
	}
	return d/2 + time.Duration(float64(d/2)*jitter)
}

// Pass contains the facts about a record before its DELs run.
type Pass struct {
	Now         int64 // CLOCK_BOOTTIME, nanoseconds
	SameBoot    bool  // the ADD was in this boot
	IgnorePause bool  // a failed DEL is retried even before its pause is over
	NewerLives  bool  // a newer ADD of the attachment is running or live
	// PodLives is set if another sandbox of the pod is live or being added. It matters only if a step
	// releases addresses by pod (see FreesByPod).
	PodLives bool

	Steps  []journal.Step  // the record's pending DELs
	Claims []journal.Claim // the addresses that the record claims
}

// Due decides whether a step's pending DEL runs now, or what it waits for. All code that runs or
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

// FreesByPod reports whether a step's DEL also frees the addresses of the pod's other sandboxes.
func FreesByPod(s journal.Step) bool { return known.IPAMOf(s.Config).FreesByPod }

// Left returns the time until a pause is over. It returns 0 if that time is longer than any pause:
// such a pause was set in another boot, whose clock means nothing now.
func Left(n journal.Next, p Pass) time.Duration {
	left := time.Duration(n.At - p.Now)
	if left > longPause {
		return 0
	}
	return max(0, left)
}

// Reserved reports whether the address that a delegate allocated must stay reserved, because the
// pending DEL of a later delegate needs it. index is the allocating delegate's place in the chain.
//
// After a reboot, no delegate needs the address. A delegate whose ADD failed does not need it, nor
// does one whose plugin has left the chain: the runtime gets no error for the DEL of such a plugin,
// so the container's next ADD may come, and may need the address. For all other delegates:
//
//   - A delegate with port mappings needs the address until its DEL succeeds: before that, a pod
//     that got the address would also get the traffic of the host ports.
//   - A delegate whose ADD succeeded, and that may remove rules by address alone, needs the address
//     until its DEL has been tried twice, or longer while its binary is missing. Once the address
//     is free, the delegate's DEL no longer gets it (see Gets).
func Reserved(index int, p Pass) bool { return len(p.needing(index)) > 0 }

// needing returns the steps whose DELs need an address that the delegate at an index allocated (see
// Reserved).
func (p Pass) needing(index int) (steps []journal.Step) {
	for _, s := range p.Steps {
		if p.SameBoot && s.Index > index && (mayForward(&s) || hasRules(&s)) {
			steps = append(steps, s)
		}
	}
	return steps
}

// PortPending reports whether a host port may still forward to an address that the delegate at an
// index of the chain allocated.
func PortPending(index int, p Pass) bool {
	return slices.ContainsFunc(p.needing(index), func(s journal.Step) bool { return mayForward(&s) })
}

func mayForward(s *journal.Step) bool {
	return s.Absent == 0 && s.ADD != journal.AddFailed && HasPorts(s)
}

// missing is the error code of a DEL whose plugin's binary is missing (ErrPluginNotAvailable).
const missing = 50

func hasRules(s *journal.Step) bool {
	return s.Absent == 0 && s.ADD == journal.AddPassed && ByAddress(s) &&
		(s.Tries < 2 || s.Code == missing)
}

// awaited returns the steps that a step's DEL waits for: their DELs need an address that the
// waiting DEL would release.
func (p Pass) awaited(s *journal.Step) []journal.Step {
	if !slices.ContainsFunc(p.Claims, func(c journal.Claim) bool { return c.Step == s.Index }) {
		return nil
	}
	return p.needing(s.Index)
}

// HasPorts reports whether a delegate got port mappings. The recorded configuration contains them
// only if the delegate declares the capability and the runtime sent mappings.
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

// Order returns the indexes of a record's steps in the order of their DELs. The steps with the
// fewest tries come first, so a DEL that hangs does not starve the others. Steps with the same
// number of tries run in reverse chain order. A DEL that releases an address comes after the DELs
// that it waits for.
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

// Words describes the state of a step's DEL in a few words. It returns "" for a DEL that neither
// failed nor waits.
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
	journal.ForRules: "waiting for a later plugin: rules or host ports may still use the pod's " +
		"address",
}

// Failing reports whether the last attempt at a step's DEL failed, and the DEL now waits for
// nothing but the end of the pause after that attempt.
func Failing(s *journal.Step) bool { return s.Last != "" && !s.Next.Why.Blocked() }

// NetNS contains the facts that decide the CNI_NETNS of a DEL.
type NetNS struct {
	Found bool // the ADD's namespace exists, and a DEL may get it
	// Interface says whether that namespace has the ADD's interface. It is needed only for a plugin
	// with known.Scratch.
	Interface Truth
	// Unknown is set if the record has neither a result nor a claim. The addresses are then unknown,
	// so the interface in a scratch namespace would have none.
	Unknown bool
	Sent    bool // the runtime sent a path for this DEL
	// Anothers is set if the path that the runtime sent leads to the namespace of another attachment
	// in the journal, or to the runtime's own namespace.
	Anothers bool
}

// Shown is the CNI_NETNS of a DEL.
type Shown string

// The values of Shown.
const (
	ShowNone    Shown = "none"    // no CNI_NETNS
	ShowPath    Shown = "path"    // the namespace's path, verified again
	ShowPinned  Shown = "pinned"  // the namespace, kept open since it was found
	ShowScratch Shown = "scratch" // a scratch namespace with an interface like the ADD's
	ShowSent    Shown = "sent"    // the path that the runtime sent
	ShowNowhere Shown = "nowhere" // a path that never exists
)

// Show decides which CNI_NETNS a step's DEL gets. If the namespace was not found, most delegates
// still get the path that the runtime sent: some release nothing without a path, and ovs-cni finds
// its port by the path. In a sweep, these delegates get no path: with one, an agent that finds
// resources by pod or device could release the resources of the pod's next sandbox.
func Show(s *journal.Step, n NetNS) Shown {
	facts := known.ByType(s.Type)
	switch {
	case n.Found && facts.NetNS == known.Scratch && n.Interface == False:
		return ShowScratch // the delegate finds its resources by an interface that is gone
	case n.Found && !n.Sent && facts.Pinned:
		return ShowPinned // the delegate only opens the path
	case n.Found:
		return ShowPath
	case facts.NetNS == known.Scratch && (!n.Unknown || facts.NeedsNetNS):
		return ShowScratch
	case !n.Sent, facts.NetNS == known.None: // None: it could move another container's device
		return ShowNone
	case n.Anothers:
		return ShowNowhere
	}
	return ShowSent // as without unwind
}

// Needless reports whether a sweep skips a step's DEL, given whether the ADD's namespace is proven
// gone (see known.Plugin.GoesWithNetNS).
func Needless(s *journal.Step, netNSGone bool) bool {
	return netNSGone && known.ByType(s.Type).GoesWithNetNS
}

// maxFailures is the number of failures after which unwind may drop a pending DEL. A failure counts
// only if the try came after the pause (see Pause), so 300 failures take about a day. unwind counts
// tries instead of time, so reboots don't matter.
const maxFailures = 300

// Outcome is the result of one attempt at a DEL.
type Outcome struct {
	Failed bool
	Code   uint   // the error code, if the DEL failed
	Words  string // the error message, if the DEL failed

	// The facts about a DEL that failed.
	Early     bool  // the pause after the previous try was not over
	Left      Truth // the plugin has left the network's chain; Unclear if the chain is unknown
	NetNSGone bool  // the ADD's namespace is proven gone
	MayHold   bool  // an address may depend on the DEL (see func MayHold)

	Jitter float64 // from 0 to 1 (see Pause)
}

// After returns a step's state after an attempt at its DEL, and whether the step is done. A DEL
// that exits 0 counts as done. The parameter now is CLOCK_BOOTTIME in nanoseconds. For the table of
// cases, see "What follows a try of a DEL" in README.md.
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

// countFailure counts a failed try, and reports whether the DEL is dropped. If an address may
// depend on the DEL, the DEL is dropped only if the chain lacked its plugin at maxFailures
// failures, and never contained it in between.
func countFailure(s journal.Step, o Outcome) (after journal.Step, dropped bool) {
	switch {
	case o.Left == False:
		s.Absent = 0
	case o.Left == True && (!o.Early || s.Absent == 0):
		s.Absent++
	}
	if o.Early {
		return s, false
	}
	s.Failures++
	return s, o.NetNSGone && s.Failures >= maxFailures && (!o.MayHold || s.Absent >= maxFailures)
}

// MayHold reports whether an address may depend on a step's DEL, because the delegate may hold the
// address, or because a host port may forward to it. held contains the claims on the addresses that
// the attachment still has.
func MayHold(s *journal.Step, held []journal.Claim) bool {
	return s.MayAllocate || HasPorts(s) ||
		slices.ContainsFunc(held, func(c journal.Claim) bool { return c.Step == s.Index })
}

// Retry says with which configuration unwind retries a DEL that failed with the recorded one.
type Retry int

// The configurations for a retry.
const (
	Present       Retry = iota // the plugin's present configuration, as without unwind
	RecordedInNew              // the recorded one, with the chain's present cniVersion
)

// Retries returns the configurations with which unwind retries a DEL that failed with its recorded
// configuration. unwind tries them in order, and stops at the first success. With its present
// configuration, portmap might search for its rules in the wrong place. So if a plugin with port
// mappings rejects the recorded configuration as invalid, unwind first changes only its cniVersion.
func Retries(s *journal.Step, code uint) []Retry {
	if s.ADD == journal.AddPassed && HasPorts(s) && slices.Contains(unread, code) {
		return []Retry{RecordedInNew, Present}
	}
	return []Retry{Present}
}

// unread are the error codes of a plugin that cannot use its configuration (SPEC 1.1 §5 "Error").
var unread = []uint{1, 2, 6, 7}
