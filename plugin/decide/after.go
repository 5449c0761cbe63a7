package decide

import (
	"slices"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/tristate"
)

// maxMistaken is how often the DEL of a failed ADD is tried whose plugin is no longer in the chain.
const maxMistaken = 20

// Outcome is what became of one try of a DEL.
type Outcome struct {
	Failed bool
	Killed bool   // the delegate did not end by itself
	Code   uint   // of a failure
	Words  string // of a failure

	Withheld bool           // an address was taken out of its prevResult
	Free     tristate.Value // the store of its IPAM plugin, or portmap, has released the address
	Kept     string         // what is still there, if not
	Queued   bool           // the plugin has put the DEL into a queue of its own
	// Unnamed says that the plugin does nothing without CNI_NETNS, and got none. The runtime, which
	// has not asked, may still bring it.
	Unnamed bool
	// NotInChain says that the chain has no delegate of the plugin any more.
	NotInChain bool

	Jitter float64 // from 0 to 1, see Pause
}

// After returns a step after a try of its DEL, and whether it is done. README.md, "What a try of a
// DEL means", has the rows. A plugin that frees by pod gets no second DEL after one that passed.
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
	if s.Wait = (journal.Wait{Until: s.Again, For: journal.ForRepeat}); Left(s.Wait, p) > 0 {
		return s, false
	}
	if o.Unnamed {
		s.Wait = journal.Wait{For: journal.ForRuntime}
	}
	return s, !o.Unnamed
}

// leftToRuntime reports whether a DEL has passed without CNI_NETNS, and did nothing. It runs again
// if the runtime asks while the record is there.
func leftToRuntime(s journal.Step) bool { return s.Wait == journal.Wait{For: journal.ForRuntime} }

// LeftToRuntime reports whether the DELs of a record are done but for those that the runtime may
// ask for. Such a record ends, for the runtime may never ask; a DEL of it runs without a record.
func LeftToRuntime(steps []journal.Step) bool {
	return len(steps) > 0 &&
		!slices.ContainsFunc(steps, func(s journal.Step) bool { return !leftToRuntime(s) })
}

// Killed returns a step whose delegate was killed, now on the clock CLOCK_BOOTTIME.
func Killed(s journal.Step, now int64, grace time.Duration) journal.Step {
	s.ADD, s.Again = journal.AddKilled, now+int64(grace)
	return s
}

// Share returns the time for the DEL of one step, of what is left for the last of a pass. A
// delegate that is slow, or waits for the lock of the kernel's rules, is not killed while the
// others do not need the time; one that was killed before gets an equal share.
func Share(
	s *journal.Step, left time.Duration, steps int, reserve, least time.Duration,
) time.Duration {
	limit := max(left-time.Duration(steps-1)*reserve, left/2)
	if s.ADD == journal.AddKilled {
		limit = left / time.Duration(steps)
	}
	return max(limit, least)
}
