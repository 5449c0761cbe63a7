package plugin

import (
	"context"
	"math/rand/v2"
	"time"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/internal/tristate"
)

// maxBackoff bounds the time between two tries of a DEL that fails; longBackoff bounds it after
// more than often tries.
const (
	maxBackoff  = 30 * time.Second
	longBackoff = 5 * time.Minute
	often       = 20
)

// backoff returns how long sweeps leave a DEL alone after that many tries. It is 0 after the first,
// since the rollback of an ADD and the next sandbox's ADD may come at once; then 2 s, 4 s, 8 s and
// so on. It is random within its upper half, which spreads the attachments of a node.
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

// deferred says whether it is too early for a step's DEL once more. A reboot ends the wait for a
// killed delegate, since it ends the agent behind it, and not that for a DEL that proves nothing. A
// time further away than the grace period is of another boot.
func (u *undoing) deferred(step *journal.Step) bool {
	now := journal.BootNanos()
	if now < step.RepeatAt && u.sameBoot(u.gen) == tristate.Yes {
		return true
	}
	wait := step.ConfirmAt - now
	return wait > 0 && wait <= int64(u.gracePeriod(u.entry))
}

// readyToRetry says whether an entry has a step that can run now. A step cannot while it waits for
// its second DEL, for its container, for the new owner of its address, in its plugin's own queue,
// or, unless backoff is ignored, for its next try. A DEL that passed unproven has its next try like
// one that failed.
func (o *op) readyToRetry(ctx context.Context, e *journal.Entry, eager bool) bool {
	now := journal.BootNanos()
	for i := range e.Generations {
		u := undoing{op: o, entry: e, gen: &e.Generations[i]}
		for j := range u.gen.Steps {
			s := &u.gen.Steps[j]
			switch wait := s.RetryAt - now; {
			case u.queued(ctx, s):
			case o.waitsForContainer(ctx, e, s):
			case isMissing(u.gen.NetNS.Path) && u.waitsForRuntime(s):
			case s.Attempts == 0:
				return true
			case s.LastError != "", s.Unproven != "", o.askable(s):
				if eager || wait <= 0 || wait > int64(longBackoff) { // set in another boot
					return true
				}
			case s.Parked:
				if u.withheld == nil {
					u.withheld = u.addressesOfOthers(ctx)
				}
				if _, is := u.withheldFrom(s); !is {
					return true
				}
			case !u.deferred(s):
				return true
			}
		}
	}
	return false
}

// askable says whether this process may be able to ask the store of a step whose DEL passed and
// waits for another one because the process that ran it could not.
func (o *op) askable(step *journal.Step) bool {
	return len(o.Probes) > 0 && step.Attempts > 0 && step.LastError == "" && !step.Parked && ipam.Elsewhere(step.Config)
}

// waitsForContainer says whether the DEL of a step must not run again yet, since it could free the
// address of another attachment of the same container that lives or is being added: whereabouts goes
// by container ID and interface, whatever the network, and before 0.9.0 by the container ID alone.
// The plain chain runs no such DEL. One that may have run when unwind was killed counts as one that
// passed, unless the runtime asks for it.
func (o *op) waitsForContainer(ctx context.Context, e *journal.Entry, step *journal.Step) bool {
	passed := step.LastError == "" || step.Unproven != "" || step.RepeatAt != 0 ||
		step.ConfirmAt != 0
	if step.Attempts == 0 && !step.MayHaveRun || !passed || !ipam.Elsewhere(step.Config) {
		return false
	}
	lives := true // in doubt
	o.read(context.WithoutCancel(ctx), func(tx *journal.Tx) error {
		lives = false
		return tx.Outlines(func(other journal.Outline, err error) error {
			undone := other.State == journal.Removing || other.State == journal.Unwinding
			lives = lives || other.Key != e.Key && other.ContainerID == e.ContainerID && !undone
			return err
		})
	})
	return lives
}
