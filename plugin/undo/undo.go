package undo

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/record"
)

// Request says which record to undo, and how.
type Request struct {
	Record  *journal.Record
	Mode    Mode
	Lock    *journal.Lock // the attachment's lock; nil without a journal
	Later   int           // number of steps that the caller must run after this record
	Changed bool          // the caller has added claims to the record (see ClaimHeld)
	// Netns is CNI_NETNS of the ADD that is rolled back, or of the runtime's DEL if that DEL is for
	// this record's ADD (see deleting.isOf). In all other cases, it is "".
	Netns string
}

// Mode says why a record is undone.
type Mode int

// The modes.
const (
	Sweep         Mode = iota // the attachment is dead; the runtime may still send its DEL
	Requested                 // the runtime sent the DEL of the attachment
	Rollback                  // the verb's own ADD failed
	Superseding               // a new ADD of the attachment follows, which needs the lock and its file
	Reconstructed             // like Sweep, without a journal record; the caller releases addresses
)

// ofVerb reports whether the runtime's verb names the attachment. If so, the DELs get the
// environment and the namespace path that the runtime sent.
func (m Mode) ofVerb() bool { return m == Requested || m == Rollback || m == Superseding }

// Undo undoes one ADD for a reason. It returns the results of Run. The steps:
//
//  1. Mark the record.
//  2. Write it. The runtime's DEL and a rollback write it only if a later verb or sweep needs the
//     mark (see mark), and continue after an error.
//  3. Run the DELs that are due.
//  4. Write the DELs that are still pending, and record the event.
//
// If the ADD may have been on another machine (see decide.Foreign), Undo releases only host-local's
// reservations on the node's disk, and drops the record with its pending DELs. The pending DELs may
// be missing from the journal if Undo returned an error, or if Journal.Lost is set.
func (w *Worker) Undo(
	ctx context.Context, request Request, reason decide.Reason,
) (failures []*delegate.Failure, ran int, err error) {
	e, foreign := request.Record, reason.Is(decide.OtherMachine)
	var killed string // the first plugin whose ADD may have been cut off
	// an older live record had a result, but the runtime's cache of results was removed
	if steps := w.cutOff(e, request.Mode); len(steps) > 0 &&
		(e.State == journal.Adding || w.Node.GraceLeft(e) > 0) {
		killed = steps[0].Type
	}
	if foreign {
		if err := purge(ctx, e); err != nil {
			return nil, 0, err
		}
		e.Steps, e.Cause, e.Reason = nil, reason.Code, reason.Text
	} else {
		if w.mark(e, request, reason) && w.Node.Journal.Lost == nil {
			err = w.Node.Journal.Save(ctx, e)
		}
		switch {
		case err == nil:
		case request.Mode == Requested:
			w.Degrade("DEL", err)
		case request.Mode != Rollback:
			return nil, 0, err
		}
		failures, ran = w.Run(ctx, request)
	}
	err = nil
	if w.Node.Journal.Lost == nil {
		err = w.Finish(ctx, request)
	}
	if err != nil || w.Node.Journal.Lost != nil {
		return failures, ran, err
	}
	event := record.EventOf(journal.Swept, e)
	event.Reason = reason.Text
	switch {
	case request.Mode == Superseding && !foreign:
		event.Kind, event.Plugins = journal.Superseded, PendingSteps(e)
		w.Node.Journal.Event(event)
	case !request.Mode.ofVerb() && len(e.Steps) == 0 || foreign:
		w.Node.Journal.Event(event, record.CountSwept, reason.Label())
	case request.Mode == Requested && killed != "" && w.Node.SameBoot(e) == decide.True:
		event.Kind, event.Plugins = journal.RolledBack, []string{killed}
		event.Reason = "the ADD was probably killed while this plugin, or one after it, was running"
		w.Node.Journal.Event(event, record.CountRollbacks, killed, Result(e))
	}
	w.Node.Journal.Flush()
	return failures, ran, nil
}

// mark updates a record at the start of a pass over its steps, and stores the reason. It reports
// whether the record must be written before the first DEL:
//
//   - in a sweep, or before a new ADD, always: the next pass must know that this one has begun;
//   - if the record has new claims: once a DEL has released an address, only a claim names it;
//   - at the runtime's DEL, if the record is not in the journal and has a result or claims. A new
//     record without them is not written, because the runtime repeats a DEL that is killed.
func (w *Worker) mark(e *journal.Record, request Request, reason decide.Reason) (unwritten bool) {
	mode := request.Mode
	if unwritten = request.Changed; mode != Requested { // in a DEL, the caller calls ClaimHeld
		unwritten = w.ClaimHeld(e)
	}
	if mode == Rollback {
		e.State = journal.RollingBack
	} else {
		unwritten = unwritten || mode != Requested ||
			e.Number == 0 && (e.Got.Result != nil || len(e.Got.Claims) > 0)
	}
	Interrupted(w.cutOff(e, mode))
	switch e.State {
	case journal.Adding:
		e.State = journal.RollingBack
	case journal.Live:
		e.State = journal.Deleting
	}
	// a recorded text for the same reason stays, because it may contain more details
	if e.Reason == "" || !decide.Recorded(e.Cause, e.Reason).Is(reason) {
		e.Reason = reason.Text
	}
	e.Cause = reason.Code
	return unwritten
}

// cutOff returns the steps of a killed ADD whose plugins may have been cut off. The first result
// makes a record live. So if the runtime has no result for it, a later plugin was cut off.
func (w *Worker) cutOff(e *journal.Record, mode Mode) []journal.Step {
	switch {
	case mode == Rollback:
		return nil
	case e.State == journal.Adding:
		return e.Steps
	case e.State == journal.Live && mode == Requested && w.Verb.Conf.NeverAdded():
		return e.Steps[min(1, len(e.Steps)):]
	}
	return nil
}

// Result returns the label "result" of record.CountRollbacks: pending if DELs remain.
func Result(e *journal.Record) string {
	if len(e.Steps) > 0 {
		return "pending"
	}
	return "complete"
}

// Finish writes a record after a pass, or deletes it if no DEL is pending. Before it deletes a
// record in a sweep, it removes the ADD from libcni's cache, as libcni does after a DEL. So if the
// runtime sends a DEL later, that DEL has no prevResult, and cannot harm the address's next owner.
func (w *Worker) Finish(ctx context.Context, request Request) error {
	e := request.Record
	done := len(e.Steps) == 0
	foreign := e.Cause == decide.OtherMachine.Code // the runtime's own DEL still runs the delegates
	if done && request.Mode == Sweep && !foreign {
		w.dropCached(e)
	}
	last := false // the attachment has no other record
	change := func(tx *journal.Tx) error {
		left, err := tx.Pending(e.Key)
		last = done && !slices.ContainsFunc(left,
			func(o *journal.Record) bool { return o.Number != e.Number })
		switch {
		case journal.IgnoreDamaged(err) != nil:
			return journal.IgnoreDamaged(err)
		case !done:
			return tx.Put(e)
		case e.Number == 0: // it was never written
			return nil
		}
		return tx.Delete(e)
	}
	var err error
	if snapshot := w.Node.Journal.Snapshot(ctx); done && e.Number == 0 && snapshot.Err == nil {
		err = change(snapshot.Tx)
	} else {
		err = w.Node.Journal.Update(context.WithoutCancel(ctx), change)
	}
	w.Node.Journal.Invalidate() // the snapshot lacks this change
	if err == nil && last && request.Mode != Superseding {
		err = request.Lock.Remove()
	}
	return err
}

// undoing is one pass over the steps of a record, with the facts that it gathered at the beginning.
type undoing struct {
	*Worker
	Request
	Log *slog.Logger // adds the record's attachment to each line
	// place is the namespace of the ADD. It is empty unless state == there. It stays open until the
	// pass ends, so that its inode cannot be reused during the pass.
	place facts.Place
	state located
	// byAddress contains the indexes of the steps that may remove rules by address alone, including
	// steps that this pass has completed.
	byAddress []int
	// env contains the search paths of the ADD's process. If it is nil, the DELs get the search paths
	// of this process. It is nil if the runtime's verb names the attachment, if the ADD may be from an
	// earlier boot, or if a recorded directory no longer exists.
	env   map[string]string
	ran   int      // number of delegates that ran
	tried []string // types of the steps that the pass has tried
}

// Run runs the DELs of a record that are due, and removes the undone steps from the record. It
// returns the failures, and how many delegates ran. A step that remains without a failure waits
// (see journal.Next). The caller holds the attachment's lock and writes the record.
//
//  1. Load: the caller has read or created the record.
//  2. Gather: find the namespace of the ADD, and open it.
//  3. For each step, fewest tries first: decide whether its DEL is due, and which namespace and
//     addresses it gets; run it; decide whether the step is done. If the step's DEL fails during
//     the runtime's DEL, and its plugin has left the chain, add steps for the plugins that may have
//     replaced that plugin.
//  4. Remove the host-local reservations that the DELs left behind.
//  5. Save: the caller calls Finish.
//
// A step gets the time that is left in ctx, minus a reserve for the steps after it. The pass ends
// when there is no time for the next step. A crash leaves the record as it was before the pass (but
// see markStarted and markSlow), so the next pass runs the DELs again.
func (w *Worker) Run(ctx context.Context, request Request) (failures []*delegate.Failure, ran int) {
	u := &undoing{Worker: w, Request: request,
		Log: w.Node.Log.With("attachment", request.Record.Key.String())}
	u.place, u.state = u.locate(ctx)
	defer u.place.Close()
	if !u.Mode.ofVerb() && w.Node.SameBoot(u.Record) == decide.True &&
		facts.SearchPathsThere(u.Record.Added.Env) {
		u.env = u.Record.Added.Env
	}
	for i := range u.Record.Steps {
		if s := &u.Record.Steps[i]; decide.ByAddress(s) {
			u.byAddress = append(u.byAddress, s.Index)
		}
	}
	deadline, bounded := ctx.Deadline()
	if !bounded {
		deadline = time.Now().Add(u.Env.Budgets.Undo)
	}
	order := decide.Order(u.pass(ctx, true))
	for n := 0; n < len(order); n++ {
		index := order[n]
		at := func(s journal.Step) bool { return s.Index == index }
		s := &u.Record.Steps[slices.IndexFunc(u.Record.Steps, at)]
		left := time.Until(deadline)
		if left < u.Env.Budgets.Step || ctx.Err() != nil {
			return append(failures, &delegate.Failure{Plugin: s.Type, Command: "DEL", Unstarted: true,
				Code: types.ErrTryAgainLater, Msg: "not attempted: interrupted or out of time",
				Unreported: u.HasLeft(u.Record, s) == decide.True}), u.ran
		}
		stepCtx, cancel := context.WithTimeout(ctx,
			timeFor(left, len(order)-n-1+request.Later, u.Env.Budgets.Step))
		u.tried = append(u.tried, s.Type)
		done, f := u.try(stepCtx, s)
		cancel()
		if done {
			u.Record.Steps = slices.DeleteFunc(u.Record.Steps, at)
		}
		if f != nil {
			failures = append(failures, f)
			if !done && u.Mode == Requested && f.Unreported {
				order = slices.Insert(order, n+1, u.addSuccessors(s)...)
			}
		}
		u.Env.At("undone")
	}
	if u.Mode != Reconstructed {
		u.releaseHeld(ctx)
	}
	return failures, u.ran
}

// timeFor returns the time for one DEL: the time that is left, minus a reserve for each later DEL,
// but at least the minimum for one DEL. The reserve is a fifth more than that minimum. Otherwise,
// no DEL could start after one that was killed, because killing a process takes some time, too.
func timeFor(left time.Duration, later int, minimum time.Duration) time.Duration {
	return max(left-time.Duration(later)*(minimum+minimum/5), minimum)
}

// releaseHeld releases addresses that host-local still reserves for the attachment. Not every DEL
// releases its address: host-device does not call its IPAM plugin if the device is gone, and
// neither does a plugin that fails early. An address is released only if the step that claimed it
// is undone or the namespace is proven gone, if no other ADD of the attachment claims it, and if no
// pending DEL needs it (see decide.Reserved).
func (u *undoing) releaseHeld(ctx context.Context) {
	p, own := u.pass(ctx, true), ownerOf(u.Record.Key)
	for _, c := range u.Record.Got.Claims {
		if c.Pool == "" || !u.Record.Freed(c) && u.state != gone {
			continue
		}
		// left is also true if a power loss truncated the file
		left, err := ipam.HasFileOf(c.Pool, own, c.Address)
		if err != nil || !left || u.claimedAgain(ctx, c) || decide.Reserved(c.Step, p) {
			continue
		}
		released, err := ipam.Release(ctx, c.Pool, own, c.Address)
		if err != nil {
			u.Log.Warn("cannot release an address that the DEL left behind", "address", c.Address,
				"err", err)
		}
		if len(released) > 0 {
			u.Log.Info("released an address that the DEL left behind", "address", c.Address)
		}
	}
}

// claimedAgain reports whether another ADD of the attachment has the same address, or may have it.
// A running or live ADD may have the address even if its record does not claim it, because an ADD
// writes a claim only after the delegate has run.
func (u *undoing) claimedAgain(ctx context.Context, c journal.Claim) bool {
	others, err := u.Node.Journal.Snapshot(ctx).AddedAgain(u.Record)
	return err != nil || slices.ContainsFunc(others, func(e *journal.Record) bool {
		return e.ClaimsAddress(c.Address) || decide.KeepsContainer(e.State)
	})
}

// ClaimHeld adds claims on addresses that host-local's files assign to the attachment, for
// delegates that were interrupted before their result was written. It reports whether it added any.
// The caller must write the claims to the journal before the first DEL: that DEL may release the
// addresses, and the DELs after it must still know them.
func (w *Worker) ClaimHeld(e *journal.Record) (found bool) {
	for _, step := range e.Steps {
		pool := ipam.Pool(known.IPAMOf(step.Config).Name, step.Config, e.Network)
		if pool == "" || slices.ContainsFunc(e.Got.Claims,
			func(c journal.Claim) bool { return c.Step == step.Index }) {
			continue
		}
		held, err := ipam.HeldBy(pool, e.ContainerID, e.IfName)
		if err != nil {
			w.Node.Log.Warn("cannot list the addresses of the container", "attachment", e.Key.String(),
				"pool", pool, "err", err)
		}
		for _, a := range held {
			e.Got.Claims = append(e.Got.Claims, journal.Claim{Address: a, Step: step.Index, Pool: pool})
			found = true
		}
	}
	return found
}

// Ready reports whether a record has a step whose DEL is due. If ignorePause is set, the pause
// after a failed try does not count.
func (w *Worker) Ready(ctx context.Context, e *journal.Record, ignorePause bool) bool {
	return slices.Contains(w.Due(ctx, e, ignorePause), journal.Next{})
}

// Due returns, for each step of a record, what its DEL waits for (see decide.Due).
func (w *Worker) Due(
	ctx context.Context, e *journal.Record, ignorePause bool,
) (next []journal.Next) {
	u := &undoing{Worker: w, Request: Request{Record: e}, Log: w.Node.Log}
	p := u.pass(ctx, ignorePause)
	others, _ := w.Node.Journal.Snapshot(ctx).AddedAgain(e)
	p.NewerLives = slices.ContainsFunc(others, func(o *journal.Record) bool {
		return o.Number > e.Number && decide.KeepsContainer(o.State)
	})
	for i := range e.Steps {
		next = append(next, decide.Due(&e.Steps[i], p))
	}
	return next
}

// FailedTries returns the lowest number of tries among a record's pending DELs if all of them have
// failed, and otherwise 0. It ignores a DEL that waits for a later plugin's DEL (see
// decide.Reserved).
func FailedTries(e *journal.Record) (tries int) {
	for i := range e.Steps {
		switch s := &e.Steps[i]; {
		case s.Next.Why == journal.ForRules:
		case !decide.Failing(s):
			return 0
		case tries == 0 || s.Tries < tries:
			tries = s.Tries
		}
	}
	return tries
}

// PendingSteps names the delegates with a pending DEL, each with its state in words.
func PendingSteps(e *journal.Record) []string {
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
