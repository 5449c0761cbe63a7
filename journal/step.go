package journal

import (
	"encoding/json"
	"net/netip"
)

// Step is one delegate that may have allocated or created something, and whose DEL is still
// pending.
type Step struct {
	Index int    `json:"index"` // position in the chain, from 0
	Type  string `json:"type"`
	// Config is the delegate's stdin, without prevResult. It is from the ADD, or from the chain at
	// the time of the runtime's DEL if unwind did not see the ADD.
	Config json.RawMessage `json:"config"`
	ADD    Outcome         `json:"add,omitempty"`
	// Refusal is the error of its ADD, if ADD is AddFailed. Alike counts the last tries of its DEL
	// that failed in a row with the same error, the first of them at AlikeSince (CLOCK_BOOTTIME,
	// nanoseconds).
	Refusal    Refusal `json:"refusal,omitzero"`
	Alike      int     `json:"alike,omitempty"`
	AlikeSince int64   `json:"alikeSince,omitempty"`
	Tries      int     `json:"tries,omitempty"` // tries of its DEL
	// Last and Code are the delegate's error if the last try failed. Code is then never 0.
	Last string `json:"last,omitempty"`
	Code uint   `json:"code,omitempty"`
	Next Next   `json:"next,omitzero"`
	// Again is a time (CLOCK_BOOTTIME, nanoseconds), or 0 if any success counts. Until that time, a
	// successful DEL does not count: either the delegate was killed and its agent may still be
	// working on the request, or a success proves nothing.
	Again int64 `json:"again,omitempty"`
	// LateKills counts the tries in which the DEL was late and reached its time limit (see undo.late).
	LateKills int `json:"lateKills,omitempty"`
	// MayHaveRun is set if the pass that started the step's first DEL was interrupted.
	MayHaveRun bool `json:"mayHaveRun,omitempty"`
}

// Refusal is an error that a delegate returned by itself.
type Refusal struct {
	Code  uint   `json:"code"` // the CNI error code; never 0
	Words string `json:"words"`
}

// Next says what the next try of a step's DEL waits for. The zero value is RunNow.
type Next struct {
	Why Why   `json:"why,omitempty"`
	At  int64 `json:"at,omitempty"` // when the wait is over, if it has an end (CLOCK_BOOTTIME, ns)
}

// Why is the word for what a DEL waits for, in the journal, in unwindctl's output and in metrics.
type Why string

// The words.
const (
	RunNow       Why = ""          // nothing: the next pass runs it
	ForBackoff   Why = "backoff"   // the pause after a failed try
	ForOwner     Why = "owner"     // its address has another owner
	ForContainer Why = "container" // it would free what another ADD of the container or pod uses
	ForPort      Why = "port"      // a host port may forward to its address
	ForRuntime   Why = "runtime"   // it is left to the runtime's own DEL
	ForRepeat    Why = "repeat"    // it succeeded, and runs once more
)

// Blocked reports whether a DEL waits for more than its turn and the end of a pause.
func (w Why) Blocked() bool { return w != RunNow && w != ForBackoff }

// Outcome is how the ADD of a delegate ended.
type Outcome string

// The outcomes.
const (
	AddPassed  Outcome = ""        // it succeeded, or has not run yet
	AddUnknown Outcome = "unknown" // unwind died while it ran, or just before
	AddFailed  Outcome = "failed"  // the delegate returned an error by itself
	AddKilled  Outcome = "killed"  // it was killed; the delegate's agent may continue
)

// Claim is an address that a delegate added to the result. That delegate's IPAM plugin stores the
// address under the container ID. The delegates after it know the address only from prevResult, so
// they make their rules for that address.
type Claim struct {
	Address netip.Addr `json:"address"`
	Step    int        `json:"step"` // Index of that step
	// Pool is the store of the node-local IPAM plugin that assigned the address, or "" if none did.
	// Two attachments with the same address are an error only if they share a pool.
	Pool string `json:"pool,omitempty"`
}

// Receives reports whether the delegate at this index of the chain got the address in its
// prevResult.
func (c Claim) Receives(index int) bool { return index > c.Step }
