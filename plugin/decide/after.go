package decide

import (
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/tristate"
)

// maxMistaken limits the tries of a failed ADD's DEL if its plugin is no longer in the chain.
const maxMistaken = 20

// Outcome is the result of one try of a DEL.
type Outcome struct {
	Failed bool
	Killed bool   // the delegate did not end by itself
	Code   uint   // the error code, if the DEL failed
	Words  string // the error message, if the DEL failed

	Withheld bool           // an address was removed from its prevResult
	Free     tristate.Value // the address is released, according to the plugin's store
	Kept     string         // what still exists, if Free is No
	Queued   bool           // the plugin has put the DEL into its own queue
	// NotInChain is set if the plugin is no longer in the chain.
	NotInChain bool

	Jitter float64 // from 0 to 1 (see Pause)
}

// After returns a step's state after a try of its DEL, and whether the step is done. For the table
// of cases, see "What follows a try of a DEL" in README.md. A plugin that frees by pod gets no
// second DEL after a successful one.
func After(s journal.Step, o Outcome, p Pass) (after journal.Step, done bool) {
	s.Tries++
	s.MayHaveRun = false
	s.Last, s.Code, s.Wait = "", 0, journal.Wait{}
	pause := journal.Wait{Until: p.Now + int64(Pause(s.Tries, o.Jitter))}
	byContainer := known.Of(s.Type).FreesByContainer || known.IPAMOf(s.Config).FreesByContainer
	switch byPod := known.IPAMOf(s.Config).FreesByPod; {
	case o.Failed:
		if s.Last, s.Code, s.Wait = o.Words, max(1, o.Code), pause; o.Killed {
			s = Killed(s, p.Now, p.GracePeriod)
		}
		return s, o.NotInChain && !MayHaveTaken(&s) && s.Tries >= maxMistaken
	case o.Withheld:
		s.Wait = journal.Wait{Until: pause.Until, For: journal.ForOwner}
		return s, false
	case o.Queued:
		s.Last, s.Wait.For = "exit code 0, but "+o.Kept, journal.ForQueue
		return s, false
	case o.Free == tristate.No:
		s.Last, s.Wait = "exit code 0, but "+o.Kept, pause
		return s, false
	case s.Again == 0 && byContainer && o.Free == tristate.Unknown:
		s.Again = p.Now + int64(p.GracePeriod)
	case byPod, o.Free == tristate.Yes && s.ADD != journal.AddKilled,
		s.ADD == journal.AddKilled && !p.SameBoot: // a reboot ends the agent behind the delegate
		s.Again = 0
	}
	s.Wait = journal.Wait{Until: s.Again, For: journal.ForRepeat}
	return s, Left(s.Wait, p) == 0
}

// Killed returns the state of a step whose delegate was killed at the time now (CLOCK_BOOTTIME).
func Killed(s journal.Step, now int64, grace time.Duration) journal.Step {
	s.ADD, s.Again = journal.AddKilled, now+int64(grace)
	return s
}

// Share returns the time for one step's DEL, given the time that is left for the remaining steps of
// a pass. A delegate may be slow, or wait for the lock of the firewall rules, as long as the others
// do not need the time. A delegate that was killed before gets only an equal share.
func Share(
	s *journal.Step, left time.Duration, steps int, reserve, least time.Duration,
) time.Duration {
	limit := max(left-time.Duration(steps-1)*reserve, left/2)
	if s.ADD == journal.AddKilled {
		limit = left / time.Duration(steps)
	}
	return max(limit, least)
}
