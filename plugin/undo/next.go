package undo

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/tristate"
)

// maxBackoff limits the time between two tries of a failing DEL; longBackoff limits it after more
// than often tries.
const (
	maxBackoff  = 30 * time.Second
	longBackoff = 5 * time.Minute
	often       = 20
)

// backoff returns how long sweeps wait before they retry a DEL, after that many tries. It is 0
// after the first, since the next sandbox's ADD may follow a rollback immediately; then 2 s, 4 s, 8
// s and so on. Random jitter over its upper half spreads the attachments of a node.
func backoff(attempts int) time.Duration {
	if attempts < 2 {
		return 0
	}
	d := maxBackoff
	switch {
	case attempts < 6:
		d = time.Second << (attempts - 1)
	case attempts > often:
		d = longBackoff
	}
	return d/2 + rand.N(d/2)
}

// Awaits is what a pending DEL waits for.
type Awaits string

// A pending DEL awaits one of these.
const (
	Nothing     Awaits = ""             // the next sweep runs it
	Pause       Awaits = "pause"        // after a try; who asks for the DEL does not wait
	Container   Awaits = "container"    // the other attachments of its container are over
	Runtime     Awaits = "runtime"      // the runtime asks, and names its namespace, or a time is over
	NewOwner    Awaits = "new owner"    // the new owner of its address is gone
	GracePeriod Awaits = "grace period" // it has passed, and runs once more then
	Queue       Awaits = "queue"        // its plugin's agent takes up a queue that has it
)

// Next says when a pending DEL runs next: at the next sweep after the event in Awaits. In is the
// time until then, if the wait has a limit.
type Next struct {
	Awaits Awaits
	In     time.Duration
}

// Asker describes the process that would run a pending DEL, and what it knows.
type Asker struct {
	Now          int64         // CLOCK_BOOTTIME, nanoseconds
	SameBoot     bool          // the ADD was in this boot
	Since        int64         // the attachment is in its state, as Now
	NoNetNS      bool          // nothing is at the path of its namespace, and the runtime does not ask
	GracePeriod  time.Duration // of the attachment
	IgnoresPause bool          // the runtime or a person asked: GC, unwindctl sweep, the runtime's DEL
	AsksStores   bool          // it has a probe of a store on another machine
	// another attachment of the container lives, or is being added
	ContainerLives func() bool
	Queued         func(*journal.Step) bool // the plugin's own queue has the DEL
}

// NextTry decides when the pending DEL of a step runs next. Everything that runs or reports a DEL
// uses it. The caller has to find out itself whether the new owner of an address is gone.
func NextTry(s *journal.Step, by Asker) Next {
	switch in := forRuntimeIn(s, by); {
	case s.Unproven != "" && by.Queued(s):
		return Next{Awaits: Queue}
	case freesByContainer(s) && by.ContainerLives():
		return Next{Awaits: Container}
	case in > 0:
		return Next{Runtime, in}
	case s.State == journal.StepUntried:
		return Next{}
	case s.State == journal.StepParked:
		return Next{Awaits: NewOwner}
	case s.State == journal.StepRepeat && !(by.AsksStores && storeElsewhere(s)):
		return after(GracePeriod, onceMoreIn(s, by))
	}
	pause := time.Duration(s.RetryAt - by.Now)
	if by.IgnoresPause || pause > longBackoff { // set in another boot
		pause = 0
	}
	return after(Pause, pause)
}

func after(awaits Awaits, in time.Duration) Next {
	if in <= 0 {
		return Next{}
	}
	return Next{awaits, in}
}

// forRuntimeIn returns how long a sweep leaves the DEL of a step to the runtime. Without the path,
// the DEL would succeed and do nothing (SkipsUnnamed); the runtime may still send a DEL with the
// path. The wait is the grace period, from when the attachment was found dead. A reboot ends it.
func forRuntimeIn(s *journal.Step, by Asker) time.Duration {
	if !by.NoNetNS || !by.SameBoot || !known.Of(s.Type).SkipsUnnamed {
		return 0
	}
	return max(0, by.GracePeriod-time.Duration(by.Now-by.Since))
}

// onceMoreIn returns how long to wait before the repeated DEL of a step. A reboot ends the wait for
// a killed delegate, because it also ends the agent behind it, but not the wait for an unverified
// DEL. A time further away than the grace period comes from another boot.
func onceMoreIn(s *journal.Step, by Asker) time.Duration {
	killed, proof := time.Duration(s.RepeatAt-by.Now), time.Duration(s.ConfirmAt-by.Now)
	if !by.SameBoot {
		killed = 0
	}
	if proof > by.GracePeriod {
		proof = 0
	}
	return max(killed, proof, 0)
}

// storeElsewhere reports whether a step's DEL has succeeded and has to run again because the
// process that ran it could not query the store.
func storeElsewhere(s *journal.Step) bool {
	return (s.State == journal.StepUnproven || s.State == journal.StepRepeat) &&
		known.IPAMOf(s.Config).Elsewhere
}

// freesByContainer reports whether the DEL of a step has succeeded, or may have, and would free the
// address of another attachment of the same container if it ran again: whereabouts goes by
// container ID and interface in all networks, and before 0.9.0 by container ID alone. The plain
// chain runs no such DEL. A DEL that may have run when unwind was killed counts as successful,
// unless the runtime asks for it.
func freesByContainer(s *journal.Step) bool {
	passed := s.State != journal.StepFailed || s.Unproven != "" || s.RepeatAt != 0 || s.ConfirmAt != 0
	return (s.State != journal.StepUntried || s.MayHaveRun) && passed &&
		known.IPAMOf(s.Config).Elsewhere
}

// KeepsContainer reports whether an attachment in this state is live or being added.
func KeepsContainer(state journal.State) bool {
	return state != journal.Removing && state != journal.Unwinding
}

// asker returns this process as it would run the steps of the generation.
func (u *undoing) asker(ctx context.Context, ignoreBackoff bool) Asker {
	by := Asker{
		Now: journal.BootNanos(), SameBoot: u.Node.SameBoot(u.gen) == tristate.Yes,
		GracePeriod: u.Node.GraceOf(u.Entry), Since: u.Entry.Since.Boot,
		NoNetNS:        !u.asked() && isMissing(u.gen.NetNS.Path),
		IgnoresPause:   ignoreBackoff,
		ContainerLives: func() bool { return u.containerLives(ctx, u.Entry.Key) },
		Queued:         func(s *journal.Step) bool { return (&attempt{u, s}).queued(ctx) },
	}
	for plugin := range u.Probes {
		by.AsksStores = by.AsksStores || known.Of(plugin).Elsewhere
	}
	return by
}

// Ready reports whether an entry has a step that can run now.
func (w *Worker) Ready(ctx context.Context, e *journal.Entry, ignoreBackoff bool) bool {
	for i := range e.Generations {
		u := &undoing{Worker: w, Job: Job{Entry: e}, gen: &e.Generations[i]}
		by := u.asker(ctx, ignoreBackoff)
		for j := range u.gen.Steps {
			a := &attempt{u, &u.gen.Steps[j]}
			switch NextTry(a.Step, by).Awaits {
			case Nothing:
				return true
			case NewOwner:
				if u.withheld == nil {
					u.withheld = u.addressesOfOthers(ctx, nil)
				}
				if _, is := a.withheldFrom(); !is {
					return true
				}
			}
		}
	}
	return false
}

// containerLives reports whether another attachment of a container is live or being added. In doubt
// it returns true, as for one with a damaged entry, which has no state.
func (w *Worker) containerLives(ctx context.Context, key journal.Key) bool {
	lives := true
	w.Journal.Read(context.WithoutCancel(ctx), func(tx *journal.Tx) error {
		lives = false
		return tx.Outlines(func(other journal.Outline, _ error) error {
			lives = lives || other.Key != key && other.ContainerID == key.ContainerID &&
				KeepsContainer(other.State)
			return nil
		})
	})
	return lives
}

// FailingPlugins returns the plugins with a pending DEL that has failed, or is unproven, if the
// attachment has no other pending DELs.
func FailingPlugins(e *journal.Entry) (plugins []string) {
	for _, g := range e.Generations {
		for _, s := range g.Steps {
			if s.State != journal.StepFailed && s.State != journal.StepUnproven {
				return nil
			}
			plugins = append(plugins, s.Type)
		}
	}
	return plugins
}

// Words describes the state of a step's DEL in a few words, or "" if none was tried.
func Words(s *journal.Step) string {
	switch s.State {
	case journal.StepFailed:
		return fmt.Sprintf("code %d", s.LastCode)
	case journal.StepUntried:
		if s.RepeatAt != 0 {
			return "was killed"
		}
	case journal.StepParked:
		return "its address has another owner"
	case journal.StepRepeat:
		var why []string
		if s.RepeatAt != 0 {
			why = append(why, "was killed")
		}
		if s.ConfirmAt != 0 {
			why = append(why, "unverified")
		}
		return "repeat: " + strings.Join(why, ", ")
	}
	return string(s.State)
}

// PendingSteps names the delegates with a pending DEL, each with its Words.
func PendingSteps(e *journal.Entry) []string {
	var names []string
	for _, g := range e.Generations {
		for _, s := range g.Steps {
			name := s.Type
			if words := Words(&s); words != "" {
				name += " (" + words + ")"
			}
			names = append(names, name)
		}
	}
	return names
}
