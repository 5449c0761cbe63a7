package journal

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
)

// Step is one delegate that was started.
type Step struct {
	Index int    `json:"index"` // in the chain
	Type  string `json:"type"`
	// Config is its stdin, without prevResult: that of the ADD, or of the chain at the time of a DEL
	// if the delegate rejected that of the ADD.
	Config json.RawMessage `json:"config"`

	// ADD says how the delegate's ADD ended if it is known not to have succeeded, else "".
	ADD Outcome `json:"add,omitempty"`

	State      StepState `json:"state,omitempty"`
	Attempts   int       `json:"attempts,omitempty"`   // DELs tried
	MayHaveRun bool      `json:"mayHaveRun,omitempty"` // its DEL, in a pass that was cut off
	LastError  string    `json:"lastError,omitempty"`  // of StepFailed
	LastCode   uint      `json:"lastCode,omitempty"`   // of StepFailed: CNI error code
	RetryAt    int64     `json:"retryAt,omitempty"`    // earliest, of a sweep (CLOCK_BOOTTIME, ns)
	// RepeatAt is set if the delegate was killed. An agent behind it may still work on the request,
	// so the delegate gets another DEL after this time (CLOCK_BOOTTIME, nanoseconds), even if one
	// passed.
	RepeatAt int64 `json:"repeatAt,omitempty"`
	// ConfirmAt is set if the DEL passed, this plugin's DEL also passes where it freed nothing
	// (known.Plugin.MayLie), and no store could be asked. The DEL runs once more after this time
	// (CLOCK_BOOTTIME, nanoseconds). Nothing was killed.
	ConfirmAt int64 `json:"confirmAt,omitempty"`
	// Unproven says why the last DEL that passed does not count: the store of the IPAM plugin still
	// has the address, or cannot be asked. It stays while a later DEL fails.
	Unproven string `json:"unproven,omitempty"`
}

// StepState is the state of a step's DEL. A step that is undone has none, because it is removed.
type StepState string

// The states of a step.
const (
	StepUntried  StepState = ""         // no DEL of it has ended
	StepFailed   StepState = "failed"   // the last DEL failed, or was killed
	StepUnproven StepState = "unproven" // it passed, and the address is not known to be free
	StepParked   StepState = "parked"   // it passed, without an address that has another owner
	StepRepeat   StepState = "repeat"   // it passed, and runs once more: see RepeatAt and ConfirmAt
)

// Ended stores the outcome of a step's DEL. lastError and code belong to a DEL that failed.
func (s *Step) Ended(to StepState, lastError string, code uint) {
	s.State, s.LastError, s.LastCode = to, lastError, code
}

// checkSteps returns an error if a step of an entry goes back to StepUntried. Any other change of
// state is allowed.
func checkSteps(old, e *Entry) error {
	if old == nil {
		return nil
	}
	tried := map[[2]uint64]StepState{}
	for _, g := range old.Generations {
		for _, s := range g.Steps {
			tried[[2]uint64{g.Number, uint64(s.Index)}] = s.State
		}
	}
	for _, g := range e.Generations {
		for _, s := range g.Steps {
			if was := tried[[2]uint64{g.Number, uint64(s.Index)}]; was != StepUntried &&
				s.State == StepUntried {
				return fmt.Errorf("journal: entry %s: the step of %s was %s and cannot become untried", e.Key,
					s.Type, was)
			}
		}
	}
	return nil
}

// Outcome is how an ADD of a delegate ended.
type Outcome string

// The outcomes that are recorded.
const (
	AddFailed Outcome = "failed"  // the delegate said so, and nobody killed it
	AddCutOff Outcome = "cut-off" // killed, or unwind was while it ran: it may have passed, or go on
)

// Claim is an address in a delegate's result that the previous result lacked. That delegate keeps
// the address under the container's ID. The delegates after it know the address from prevResult
// alone, so their rules are keyed by the address.
type Claim struct {
	Address netip.Addr `json:"address"`
	Step    int        `json:"step"` // index in the chain
	// Pool names the store of the node-local IPAM that gave the address, or is "". Two attachments
	// with one address are an error only within one pool.
	Pool string `json:"pool,omitempty"`
}

// Receives reports whether the delegate at this index of the chain got the address in its
// prevResult.
func (c Claim) Receives(index int) bool { return index > c.Step }

// Freed reports whether the delegate that brought the address is undone. From then on the address
// may have another owner.
func (g *Generation) Freed(c Claim) bool {
	return !slices.ContainsFunc(g.Steps, func(s Step) bool { return s.Index == c.Step })
}
