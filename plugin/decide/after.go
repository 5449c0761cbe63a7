package decide

import (
	"encoding/json"
	"slices"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/tristate"
)

// maxMistaken limits the tries of a failed ADD's DEL if its plugin is no longer in the chain, or if
// the DEL fails with the ADD's error for at least mistakenFor.
const (
	maxMistaken = 20
	mistakenFor = time.Hour
)

// Outcome is the result of one try of a DEL.
type Outcome struct {
	Failed bool
	Killed bool   // the delegate did not end by itself
	Code   uint   // the error code, if the DEL failed
	Words  string // the error message, if the DEL failed

	LateKilled bool // the DEL was late, and was killed at the time limit for late DELs

	Withheld bool // an address was removed from its prevResult
	// The facts about a DEL that failed. NotInChain is set if the plugin is no longer in the chain,
	// and NetNSGone if the ADD's namespace is proven gone. Reserved says whether host-local reserves
	// an address for the attachment, and is unknown if the step's IPAM plugin is not host-local.
	NotInChain bool
	NetNSGone  bool
	Reserved   tristate.Value

	Jitter float64 // from 0 to 1 (see Pause)
}

// After returns a step's state after a try of its DEL, and whether the step is done. For the table
// of cases, see "What follows a try of a DEL" in README.md. A plugin that frees by pod gets no
// second DEL after a successful one.
func After(s journal.Step, o Outcome, p Pass) (after journal.Step, done bool) {
	s.Tries++
	s.MayHaveRun = false
	s = countAlike(s, o, p.Now)
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
		left := o.NotInChain && s.Tries >= maxMistaken
		return s, s.ADD == journal.AddFailed && (left || tookNothing(&s, o, p.Now))
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

// countAlike counts a try if it failed with the error of the ADD. A time after now is from an
// earlier boot, so the time of the tries begins again.
func countAlike(s journal.Step, o Outcome, now int64) journal.Step {
	if !o.Failed || o.Killed || (journal.Refusal{Code: max(1, o.Code), Words: o.Words}) != s.Refusal {
		s.Alike, s.AlikeSince = 0, 0
		return s
	}
	if s.Alike++; s.Alike == 1 || s.AlikeSince > now {
		s.AlikeSince = now
	}
	return s
}

// tookNothing reports whether a failed ADD has taken nothing: its DEL has failed with the ADD's
// error often enough and for long enough, and the attachment has neither a namespace nor an
// address. It returns false for a plugin that may hide an IPAM plugin, and for one that got port
// mappings.
func tookNothing(s *journal.Step, o Outcome, now int64) bool {
	return s.Alike >= maxMistaken && now-s.AlikeSince >= int64(mistakenFor) && o.NetNSGone &&
		o.Reserved == tristate.No && hidesNoIPAM(s) && !HasPorts(s)
}

// hidesNoIPAM reports whether a step's plugin has no IPAM plugin, or executes the one in its
// configuration.
func hidesNoIPAM(s *journal.Step) bool {
	var config known.Object
	if json.Unmarshal(s.Config, &config) != nil {
		return false
	}
	plugin, ipam := known.Of(s.Type), known.IPAMOf(s.Config).Name
	if ipam == "" {
		return plugin.Source != ""
	}
	return plugin.ExecutesIPAM != nil && plugin.ExecutesIPAM(ipam, config)
}

// TryPresent decides whether a DEL that failed with a code runs again with the chain's present
// configuration. It does if the ADD failed too, or if the plugin rejects the recorded one (for
// example after an upgrade). After another error, success would not prove that the ADD's resources
// are free: portmap may look for its rules in the wrong place. The reference plugins reject a
// configuration with the code 999. After that code, needsProof is set: success counts only if
// host-local reserves nothing for the attachment afterwards.
func TryPresent(s *journal.Step, code uint) (try, needsProof bool) {
	switch {
	case s.ADD != journal.AddPassed:
		return true, false
	case HasPorts(s):
		return false, false
	case slices.Contains(rejections, code):
		return true, false
	}
	proves := code == internal && known.IPAMOf(s.Config).Name == "host-local"
	return proves, proves
}

// rejections are the error codes of a plugin that cannot use its configuration (SPEC 1.1 §5
// "Error"). internal is the code of libcni's skel for an error without a code.
var rejections = []uint{1, 2, 6, 7}

const internal = 999

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
