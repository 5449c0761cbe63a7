package journal

import (
	"encoding/json"
	"net/netip"
	"slices"
)

// Step is one delegate that was started.
type Step struct {
	Index  int             `json:"index"` // in the chain
	Type   string          `json:"type"`
	Config json.RawMessage `json:"config"` // its stdin, without prevResult

	// ADD says how the delegate's ADD ended if it is known not to have succeeded, else "".
	ADD Outcome `json:"add,omitempty"`

	Attempts   int    `json:"attempts,omitempty"`   // DELs tried
	MayHaveRun bool   `json:"mayHaveRun,omitempty"` // its DEL, in a pass that was cut off; not in Attempts
	LastError  string `json:"lastError,omitempty"`
	LastCode   uint   `json:"lastCode,omitempty"` // CNI error code
	RetryAt    int64  `json:"retryAt,omitempty"`  // no sweep retries it before (CLOCK_BOOTTIME, ns)
	Parked     bool   `json:"parked,omitempty"`   // undone, except for an address of another owner
	// Replaced is set if Config comes from the chain at the time of a DEL, because the delegate
	// rejected the Config of its ADD.
	Replaced bool `json:"replaced,omitempty"`
	// RepeatAt is set if the delegate was killed. An agent behind it may still work on the request,
	// so the delegate gets another DEL after this time (CLOCK_BOOTTIME, nanoseconds), even if one
	// passed.
	RepeatAt int64 `json:"repeatAt,omitempty"`
	// ConfirmAt is set if the DEL passed, this plugin's DEL also passes where it freed nothing
	// (ipam.MayLie), and no store could be asked. The DEL runs once more after this time
	// (CLOCK_BOOTTIME, nanoseconds). Nothing was killed.
	ConfirmAt int64 `json:"confirmAt,omitempty"`
	// Unproven says why a DEL that passed does not count: the store of the IPAM plugin still has the
	// address, or cannot be asked.
	Unproven string `json:"unproven,omitempty"`
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
