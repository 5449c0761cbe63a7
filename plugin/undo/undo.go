package undo

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/delegate"
)

// Job is a record with pending DELs.
type Job struct {
	Entry *journal.Entry
	Lock  *journal.Lock // the attachment's; nil without a journal
	Netns string        // CNI_NETNS as the runtime gave it with this DEL, or ""
	// Others are the records of other attachments that claim the record's addresses, read with it;
	// nil makes Run look for them.
	Others []*journal.Entry
	// Later is how many steps the caller has to run after those of this record.
	Later int
	// Newer says that a newer ADD of the attachment lives.
	Newer bool
	// Unrecorded says that the journal does not have the ADD: the record was reconstructed. The caller
	// removes the reservations that are left.
	Unrecorded bool
}

// undoing is one pass over the steps of a record, with what was found when it began.
type undoing struct {
	*Worker
	Job
	place    place
	withheld []netip.Addr // claimed addresses that another attachment owns
	unnamed  bool         // the last delegate got no CNI_NETNS
	ran      int          // delegates
}

// Run runs the DELs of a record that are due, and removes the undone steps from the record. It
// returns the failures, and how many delegates ran. A step that remains without a failure waits:
// see journal.Wait. The caller holds the attachment's lock and writes the record.
//
//  1. Load: the caller has read the record, or made it.
//  2. Gather: find the namespace of the ADD, and open it; find the addresses with another owner.
//  3. For each step, fewest tries first: decide whether its DEL is due, and what it is shown; run
//     it; decide whether it is done.
//  4. Remove the reservations of host-local that the DELs left behind.
//  5. Save: the caller calls Finish.
//
// A step gets the time of ctx, less a reserve for the steps after it. The pass ends when there is
// no time for the next step. While a step takes longer than half a second, the journal has it as
// tried, so a pass that is interrupted there makes the next one begin with another step.
func (w *Worker) Run(ctx context.Context, job Job) (failures []*delegate.Failure, ran int) {
	ofEntry := *w
	ofEntry.Log = w.Log.With("attachment", job.Entry.Key.String())
	u := &undoing{Worker: &ofEntry, Job: job}
	w.ClaimHeld(u.Entry)
	u.dropHeld(ctx)
	u.place = u.find(ctx)
	defer u.place.Close()
	u.withheld = u.addressesOfOthers(ctx, job.Others)
	u.Entry.Begun = true
	order := decide.Order(u.Entry.Steps)
	for n, index := range order {
		s := u.step(index)
		left := u.timeLeft(ctx)
		if left < u.Budgets.Step {
			return append(failures, notAttempted(s, "out of time")), u.ran
		}
		limit := decide.Share(s, left, len(order)-n+job.Later, u.Budgets.Reserve, u.Budgets.Step)
		stepCtx, cancel := context.WithTimeout(ctx, limit)
		done, f := u.try(stepCtx, s)
		cancel()
		if done {
			u.Entry.Steps = slices.DeleteFunc(u.Entry.Steps,
				func(s journal.Step) bool { return s.Index == index })
		}
		if f != nil {
			failures = append(failures, f)
		}
		u.at("undone")
	}
	if u.Entry.Unnamed = decide.LeftToRuntime(u.Entry.Steps); u.Entry.Unnamed {
		u.Entry.Steps = nil
	}
	if u.Entry.Begun = false; !u.Unrecorded {
		u.releaseHeld(ctx)
	}
	return failures, u.ran
}

func (u *undoing) timeLeft(ctx context.Context) time.Duration {
	if deadline, bounded := ctx.Deadline(); bounded {
		return time.Until(deadline)
	}
	return u.Budgets.Undo
}

// step returns the step of the delegate at an index of the chain.
func (u *undoing) step(index int) *journal.Step {
	return &u.Entry.Steps[slices.IndexFunc(u.Entry.Steps,
		func(s journal.Step) bool { return s.Index == index })]
}

// asked reports whether the pass is for the attachment of the verb itself.
func (u *undoing) asked() bool { return u.Entry.Key == u.Verb.Key }

// releaseHeld releases addresses that host-local still has for the attachment, after the step that
// claimed them is undone or if the namespace is proven gone. A successful DEL is not enough:
// host-device keeps the address when its device is gone, and a plugin that fails early may not call
// its IPAM plugin. An address that another ADD of the attachment claims stays, and so does one to
// which a host port forwards.
func (u *undoing) releaseHeld(ctx context.Context) {
	owner := u.owner()
	for _, c := range u.Entry.Claims {
		undone := u.Entry.Freed(c)
		if c.Pool == "" || !undone && !u.place.gone || !u.holds(c) || u.claimedAgain(ctx, c) ||
			u.heldBack(ctx, c) != "" {
			continue
		}
		released, err := ipam.Release(ctx, c.Pool, owner, c.Address)
		if err != nil {
			u.Log.Warn("cannot release an address that its DEL left behind", "address", c.Address,
				"err", err)
		}
		if len(released) > 0 {
			u.Log.Info("released an address that its DEL left behind", "address", c.Address)
		}
	}
}

func (u *undoing) owner() ipam.Owner {
	return ipam.Owner{ContainerID: u.Entry.ContainerID, IfName: u.Entry.IfName}
}

// dropHeld removes the files with which a pass that was killed held addresses.
func (u *undoing) dropHeld(ctx context.Context) {
	for _, c := range u.Entry.Claims {
		if c.Pool == "" {
			continue
		}
		if err := ipam.DropHeld(ctx, c.Pool, u.owner(), c.Address); err != nil {
			u.Log.Warn("cannot give back an address that was held for a DEL", "address", c.Address,
				"err", err)
		}
	}
}

// claimedAgain reports whether another ADD of the attachment got the same address.
func (u *undoing) claimedAgain(ctx context.Context, c journal.Claim) (is bool) {
	u.Journal.Read(context.WithoutCancel(ctx), func(tx *journal.Tx) error {
		records, err := tx.ByAddress(c.Address)
		is = err != nil || slices.ContainsFunc(records, func(e *journal.Entry) bool {
			return e.Key == u.Entry.Key && e.Number != u.Entry.Number
		})
		return err
	})
	return is
}

// ClaimHeld claims the addresses that host-local's own files have for the attachment, if a delegate
// was interrupted before its result was written. The claims must be written before the first DEL:
// that DEL frees the addresses, and a second one must still know them. ClaimHeld reports whether it
// claimed any.
func (w *Worker) ClaimHeld(e *journal.Entry) (found bool) {
	for _, step := range e.Steps {
		pool := ipam.Pool(step.Config, e.Network)
		if pool == "" || slices.ContainsFunc(e.Claims,
			func(c journal.Claim) bool { return c.Step == step.Index }) {
			continue
		}
		held, err := ipam.HeldBy(pool, e.ContainerID, e.IfName)
		if err != nil {
			w.Log.Warn("cannot list the addresses of the container", "attachment", e.Key.String(),
				"pool", pool, "err", err)
		}
		for _, a := range held {
			e.Claims = append(e.Claims, journal.Claim{Address: a, Step: step.Index, Pool: pool})
			found = true
		}
	}
	return found
}

// Ready reports whether a record has a step whose DEL is due. others are further records of the
// attachment.
func (w *Worker) Ready(ctx context.Context, e *journal.Entry, ignorePause bool) bool {
	u := &undoing{Worker: w, Job: Job{Entry: e, Newer: w.newerLives(ctx, e)}}
	p := u.pass(ctx, ignorePause)
	return slices.ContainsFunc(e.Steps,
		func(s journal.Step) bool { return decide.Due(&s, p) == journal.Wait{} })
}

// newerLives reports whether a newer ADD of the attachment lives.
func (w *Worker) newerLives(ctx context.Context, e *journal.Entry) (lives bool) {
	w.Journal.Read(context.WithoutCancel(ctx), func(tx *journal.Tx) error {
		newest, err := tx.Get(e.Key)
		lives = newest != nil && newest.Number > e.Number && decide.KeepsContainer(newest.State)
		return err
	})
	return lives
}

// FailingPlugins returns the plugins with a DEL that has failed, if the record has no other pending
// DELs.
func FailingPlugins(e *journal.Entry) (plugins []string) {
	for i := range e.Steps {
		if !decide.Failing(&e.Steps[i]) {
			return nil
		}
		plugins = append(plugins, e.Steps[i].Type)
	}
	return plugins
}

// PendingSteps names the delegates with a pending DEL, each with its state in words.
func PendingSteps(e *journal.Entry) []string {
	var names []string
	for i := range e.Steps {
		name := e.Steps[i].Type
		if words := decide.Words(&e.Steps[i]); words != "" {
			name += " (" + words + ")"
		}
		names = append(names, name)
	}
	return names
}
