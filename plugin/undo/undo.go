package undo

import (
	"context"
	"slices"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/internal/delegate"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/netconf"
)

// Job is an entry with pending DELs.
type Job struct {
	Entry *journal.Entry
	Lock  *journal.Lock // the entry's; nil without a journal
	Netns string        // CNI_NETNS as the runtime gave it with this DEL, or ""
	// Others are the other entries that claim the entry's addresses, read with the entry; nil makes
	// Run look for them.
	Others []*journal.Entry
	// Unrecorded says that the journal does not have the attachment. An ADD that gets one of its
	// addresses then does not wait for its DELs, so they run under the pools' locks: see holdPools.
	Unrecorded bool
}

// Run runs the pending DELs of an entry, newest generation first, each in reverse order, and
// removes undone steps from the entry. It returns the failures. A step that remains without a
// failure is parked, or waits for its second DEL. The caller holds the entry's lock and writes the
// entry.
//
// A step gets the time of ctx, less a reserve for the steps after it: a delegate that is slow, or
// waits for the lock of the kernel's rules, is not killed while the others do not need the time. A
// delegate that was killed before gets only an equal share. The pass ends when there is no time for
// the next step. A step that failed or hung last time runs last. After a pass that was interrupted
// or ended early, the next pass starts with another step.
func (w *Worker) Run(ctx context.Context, job Job) (failures []*delegate.Failure) {
	defer w.Runner.Drop()
	e := job.Entry
	w.ClaimHeld(e)
	ofEntry := *w
	ofEntry.Log = w.Log.With("attachment", e.Key.String())
	cutOff, ended, left := job.Lock.BeginPass(), true, e.Pending()
	for i := range slices.Backward(e.Generations) {
		u := undoing{Worker: &ofEntry, Job: job, gen: &e.Generations[i], left: left, cutOff: cutOff}
		left -= len(u.gen.Steps)
		if i < len(e.Generations)-1 {
			u.Netns = ""
		}
		failures = append(failures, u.pass(ctx)...)
		ended = ended && !u.gen.Begun
	}
	if ended {
		job.Lock.EndPass()
	}
	dropUndone(e)
	return failures
}

// maxUndone limits the undone ADDs that an entry keeps.
const maxUndone = 8

// dropUndone drops the generations without pending DELs. While others are left, the entry keeps the
// interfaces of dropped ones: the runtime, whose DEL fails, and libcni's cache still have the
// result. Addresses alone do not distinguish one ADD from the next.
func dropUndone(e *journal.Entry) {
	e.Generations = slices.DeleteFunc(e.Generations, func(g journal.Generation) bool {
		if len(g.Steps) > 0 {
			return false
		}
		if named := netconf.InterfaceOf(g.Result, e.IfName); named.MAC != "" {
			e.Undone = append(e.Undone, named)
		}
		return true
	})
	e.Undone = e.Undone[max(0, len(e.Undone)-maxUndone):]
}

func (u *undoing) pass(ctx context.Context) (failures []*delegate.Failure) {
	u.place = u.find(ctx)
	defer u.place.Close()
	u.withheld = u.addressesOfOthers(ctx, u.Others)
	u.gen.Begun = true
	order := undoOrder(u.gen, u.cutOff)
	for n, index := range order {
		a := u.attempt(index)
		u.next = nil
		if n+1 < len(order) {
			u.next = u.attempt(order[n+1]).nextCall()
		}
		limit, ok := a.share(ctx)
		if !ok {
			return append(failures, a.notAttempted("out of time"))
		}
		stepCtx, cancel := context.WithTimeout(ctx, limit)
		u.left--
		undone, f := a.run(stepCtx)
		cancel()
		if undone {
			u.gen.Steps = slices.DeleteFunc(u.gen.Steps,
				func(s journal.Step) bool { return s.Index == index })
		}
		if f != nil {
			failures = append(failures, f)
		}
		u.at("undone")
	}
	u.gen.Begun = false
	u.releaseHeld(ctx)
	return failures
}

// attempt returns the DEL of the delegate at an index of the chain.
func (u *undoing) attempt(index int) *attempt {
	i := slices.IndexFunc(u.gen.Steps, func(s journal.Step) bool { return s.Index == index })
	return &attempt{u, &u.gen.Steps[i]}
}

// run runs the DEL of a step, unless it has to wait, and reports whether the step is undone.
func (a *attempt) run(ctx context.Context) (undone bool, f *delegate.Failure) {
	switch pools := a.poolsOf(); {
	case a.Unrecorded && len(pools) > 0:
		release, ok := a.holdPools(ctx, pools)
		defer release()
		if !ok {
			return false, a.notAttempted("host-local's lock is busy")
		}
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, a.Budgets.LateDel)
		defer cancel()
	case a.late():
		var end func()
		ctx, end = a.whileFree(ctx)
		defer end()
	}
	undone, waits := a.settle(ctx)
	switch {
	case waits:
		return false, nil
	case !undone:
		f = a.del(ctx)
	}
	return a.noteOutcome(ctx, f), f
}

// notAttempted is the failure of a step whose delegate was not started.
func (a *attempt) notAttempted(why string) *delegate.Failure {
	return &delegate.Failure{Plugin: a.Type, Command: "DEL", Code: types.ErrTryAgainLater,
		Msg: "not attempted: " + why, Unstarted: true}
}

// releaseHeld releases addresses that host-local still has for the attachment, after the step that
// claimed them is undone or if the namespace is proven gone. A successful DEL is not enough:
// host-device keeps the address when its device is gone, and a plugin that fails early may not call
// its IPAM plugin.
func (u *undoing) releaseHeld(ctx context.Context) {
	owner := ipam.Owner{ContainerID: u.Entry.ContainerID, IfName: u.Entry.IfName}
	for _, c := range u.gen.Claims {
		if c.Pool == "" || !u.gen.Freed(c) && !u.place.gone || u.claimedAgain(c) {
			continue
		}
		freed, err := ipam.Free(ctx, c.Pool, owner, c.Address)
		if err != nil {
			u.Log.Warn("cannot release an address that its DEL left behind", "address", c.Address,
				"err", err)
		}
		if freed {
			u.Log.Info("released an address that its DEL left behind", "address", c.Address)
		}
	}
}

// claimedAgain reports whether another ADD of the attachment got the same address.
func (u *undoing) claimedAgain(c journal.Claim) bool {
	return slices.ContainsFunc(u.Entry.Generations, func(g journal.Generation) bool {
		return g.Number != u.gen.Number &&
			slices.ContainsFunc(g.Claims, func(o journal.Claim) bool { return o.Address == c.Address })
	})
}

// undoOrder returns the indexes of the steps in the order of their DELs. cutOff is how many passes
// were cut off since the last one that ended.
func undoOrder(g *journal.Generation, cutOff int) []int {
	var first, last []int
	for _, s := range slices.Backward(g.Steps) {
		hungInADD := cutOff == 0 && s.RepeatAt != 0 && s.State == journal.StepUntried
		if s.State == journal.StepFailed || hungInADD {
			last = append(last, s.Index)
		} else {
			first = append(first, s.Index)
		}
	}
	order := append(first, last...)
	if cutOff > 0 && len(order) > 0 {
		n := cutOff % len(order)
		order = append(order[n:], order[:n]...)
	}
	return order
}

// share returns a step's share of the remaining time, if that is enough: see Run.
func (a *attempt) share(ctx context.Context) (limit time.Duration, ok bool) {
	left := a.Budgets.Undo
	if deadline, bounded := ctx.Deadline(); bounded {
		left = time.Until(deadline)
	}
	limit = max(left-time.Duration(a.left-1)*a.Budgets.Reserve, left/2)
	if a.RepeatAt != 0 {
		limit = left / time.Duration(a.left)
	}
	return max(limit, a.Budgets.Step), left >= a.Budgets.Step
}

// del runs the DEL of one step. If the delegate rejects the configuration of its ADD as invalid
// (for example after an upgrade), del also tries the chain's current configuration. It does so
// after no other error, because success with another configuration proves nothing about what the
// ADD took. A delegate whose ADD did not succeed may have taken nothing: see undoMistake.
func (a *attempt) del(ctx context.Context) *delegate.Failure {
	f := a.delWith(ctx, a.Config)
	if f != nil && !f.Killed && known.Of(a.Type).MasqueradesBy(a.Config) {
		f = a.delStrayRules(ctx, f)
	}
	switch {
	case f == nil || f.Killed:
		return f
	case a.ADD == journal.AddFailed, a.ADD == journal.AddCutOff && a.State != journal.StepUntried:
		return a.undoMistake(ctx, f)
	case slices.Contains(rejections, f.Code):
		return a.delPresent(ctx, f)
	}
	return f
}

// rejections are the codes of a delegate that cannot use its configuration.
var rejections = []uint{types.ErrIncompatibleCNIVersion, types.ErrUnsupportedField,
	types.ErrDecodingFailure, types.ErrInvalidNetworkConfig}

// ClaimHeld claims the addresses that host-local's own files have for the attachment, if a delegate
// was interrupted before its result was written. The claims must be written before the first DEL:
// that DEL frees the addresses, and a second one must still know them. ClaimHeld reports whether it
// claimed any.
func (w *Worker) ClaimHeld(e *journal.Entry) (found bool) {
	for i := range e.Generations {
		g := &e.Generations[i]
		for _, step := range g.Steps {
			pool := ipam.Pool(step.Config, e.Network)
			if pool == "" || slices.ContainsFunc(g.Claims,
				func(c journal.Claim) bool { return c.Step == step.Index }) {
				continue
			}
			held, err := ipam.HeldBy(pool, e.ContainerID, e.IfName)
			if err != nil {
				w.Log.Warn("cannot list the addresses of the container", "attachment", e.Key.String(),
					"pool", pool, "err", err)
			}
			for _, a := range held {
				g.Claims = append(g.Claims, journal.Claim{Address: a, Step: step.Index, Pool: pool})
				found = true
			}
		}
	}
	return found
}

// StartFirst starts the delegate that will probably get the first DEL, while unwind searches for
// the namespace.
func (w *Worker) StartFirst(lock *journal.Lock, e *journal.Entry) {
	gen := e.Newest()
	order := undoOrder(gen, 0)
	if w.Verb.Netns == "" || len(order) == 0 {
		return
	}
	u := undoing{Worker: w, Job: Job{Entry: e, Lock: lock}, gen: gen}
	u.place.Path = w.Verb.Netns
	w.StartEarly(u.attempt(order[0]).callOf(nil))
}
