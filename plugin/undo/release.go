package undo

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/internal/delegate"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/record"
	"cni-unwind/plugin/tristate"
)

// Outcome is the result of releasing an attachment.
type Outcome struct {
	Entry    *journal.Entry // as it is now; nil if the journal had none
	State    journal.State  // before
	Verdict  alive.Verdict  // under the attachment's lock
	Released bool           // nothing is left
	Err      error          // why something is left, other than the verdict
}

// Release undoes another attachment, if it is dead, and writes what is left of it. It returns nil
// if nothing is left. ctx limits the wait for its lock, because the caller holds a lock itself.
func (w *Worker) Release(ctx context.Context, key journal.Key) error {
	lock, killed, err := w.Lock(ctx, key)
	if err != nil {
		return err
	}
	defer lock.Release()
	out := w.ReleaseLocked(ctx, lock, killed, key)
	switch {
	case out.Released:
		return nil
	case out.Err != nil:
		return out.Err
	}
	return errors.New(out.Verdict.Reason.Text)
}

// ReleaseLocked is Release for a caller that holds the attachment's lock. It decides on the current
// content of the journal. killed names the delegates that held the lock and that unwind had to
// kill.
func (w *Worker) ReleaseLocked(
	ctx context.Context, lock *journal.Lock, killed []string, key journal.Key,
) (out Outcome) {
	out.Err = w.Journal.Store.View(ctx, func(tx *journal.Tx) (err error) {
		out.Entry, err = tx.Get(key)
		return err
	})
	e := out.Entry
	switch {
	case out.Err != nil:
		return out
	case e == nil:
		out.Released, out.Err = true, lock.Remove()
		return out
	}
	out.State, out.Verdict = e.State, alive.Decide(w.Node.Gather(ctx, e, lock))
	if !out.Verdict.Releasable() {
		if lock.Made() {
			_ = lock.Remove() // restores the state before
		}
		return out
	}
	MarkKilled(e, killed, w.Node.GraceOf(e))
	reason := out.Verdict.Reason
	if e.State == journal.Live || e.State == journal.Adding {
		w.Log.Info("releasing attachment", "attachment", key.String(),
			"verdict", string(out.Verdict.Fate), "reason", reason.Text)
	}
	end := w.undoDead
	if out.Verdict.Fate == alive.Foreign {
		end = w.Purge
	}
	out.Err = end(ctx, Job{Entry: e, Lock: lock}, reason)
	out.Released = out.Err == nil && e.Pending() == 0
	if out.Released {
		w.Log.Info("released", "attachment", key.String(), "reason", reason.Text)
	}
	return out
}

// undoDead runs the DELs of a dead attachment. It keeps a recorded reason of a failed or
// interrupted ADD.
func (w *Worker) undoDead(ctx context.Context, job Job, reason alive.Reason) error {
	e := job.Entry
	if e.State == journal.Unwinding {
		reason = alive.Recorded(cmp.Or(e.Cause, reason.Code), cmp.Or(e.Reason, reason.Text))
	}
	w.takeCached(e)
	if err := w.Begin(ctx, e, reason); err != nil {
		return err
	}
	return w.finishRelease(ctx, job, reason, w.Run)
}

// Purge releases what host-local keeps for an attachment on this disk, and abandons the rest.
func (w *Worker) Purge(ctx context.Context, job Job, reason alive.Reason) error {
	e := job.Entry
	pools := map[string]bool{}
	for _, g := range e.Generations {
		for _, step := range g.Steps {
			pools[ipam.Pool(step.Config, e.Network)] = true
		}
		for _, c := range g.Claims {
			pools[c.Pool] = true
		}
	}
	delete(pools, "")
	for _, pool := range slices.Sorted(maps.Keys(pools)) {
		if err := ipam.Release(ctx, pool, e.ContainerID, e.IfName); err != nil {
			return fmt.Errorf("pool %s: %w", pool, err)
		}
	}
	e.Cause, e.Reason = reason.Code, reason.Text
	return w.finishRelease(ctx, job, reason, func(context.Context, Job) []*delegate.Failure {
		e.Generations = nil
		return nil
	})
}

// finishRelease undoes an attachment without the runtime's DEL, and writes what is left. It records
// the release if it is complete.
func (w *Worker) finishRelease(
	ctx context.Context, job Job, reason alive.Reason,
	undo func(context.Context, Job) []*delegate.Failure,
) error {
	drop, tomb := w.Journal.Undoable(), w.Tombstone(job.Entry)
	event := record.EventOf(journal.Swept, job.Entry)
	failures := undo(ctx, job)
	if len(job.Entry.Generations) == 0 {
		event.Reason = reason.Text
		w.Journal.Event(event, record.CountSwept, reason.Label())
	}
	if _, err := w.Finish(ctx, job, tomb); err != nil {
		drop() // the journal does not have it as released; the next sweep reports it
		return err
	}
	if len(failures) > 0 {
		return failures[0]
	}
	return nil
}

// ReplayParked runs the parked and the failed DELs of other attachments after addresses have become
// free. others claim one of these addresses.
func (w *Worker) ReplayParked(ctx context.Context, others []*journal.Entry) {
	ctx, cancel := context.WithTimeout(ctx, w.Budgets.Release)
	defer cancel()
	for _, other := range others {
		if other.State == journal.Live || !w.Ready(ctx, other, true) {
			continue
		}
		if other.State == journal.Adding && !w.Node.Judge(ctx, other).Releasable() {
			continue // its ADD may be waiting for this DEL, see claim
		}
		if err := w.Release(ctx, other.Key); err != nil {
			w.Log.Debug("deferred", "attachment", other.Key.String(), "err", err)
		}
	}
}

// ReplayFreed is ReplayParked for a verb that could not write the journal, but may be able to read
// it.
func (w *Worker) ReplayFreed(ctx context.Context, freed []netip.Addr) {
	w.ReplayParked(ctx, w.othersOf(ctx, w.Verb.Key, freed))
}

// takeCached adds the ADD in libcni's cache to the entry, if the journal does not have it, so that
// it is undone as well: it is as dead as the others. The cache also has the chain. For an ADD
// through unwind, takeCached assumes the delegates of the newest ADD, with unknown outcomes.
func (w *Worker) takeCached(e *journal.Entry) {
	newest := e.Newest()
	c, err := w.Node.CachedUnseen(e)
	if c == nil || err != nil || w.Node.SameBoot(newest) != tristate.Yes {
		return
	}
	found := netconf.InterfaceOf(c.Result, e.IfName)
	if !found.Known() || alive.AnySameADD(e.Undone, found) == tristate.Yes {
		return
	}
	gen := journal.Generation{
		NetNS: journal.NetNS{Path: c.NetNS}, Args: newest.Args, Path: newest.Path,
		CNIVersion: newest.CNIVersion, RuntimeConfig: newest.RuntimeConfig,
		Host: newest.Host, Created: journal.Now(), GracePeriod: newest.GracePeriod,
		Stores: newest.Stores,
	}
	if chain, conf, err := c.Chain(); err == nil && chain != nil {
		gen.CNIVersion, gen.Steps = chain.CNIVersion, chain.Steps(conf)
		gen.RuntimeConfig = netconf.Marshal(c.RuntimeConfig)
	} else {
		for _, s := range newest.Steps {
			gen.Steps = append(gen.Steps, journal.Step{
				Index: s.Index, Type: s.Type, Config: s.Config, ADD: journal.AddCutOff,
			})
		}
	}
	if err := addCached(e, gen, c); err != nil {
		w.Log.Warn("cannot use the result in libcni's cache", "attachment", e.Key.String(), "err", err)
	}
}

// OfCache returns the entry that the journal would have of an attachment in libcni's cache, if its
// ADD had been through unwind, in this boot and from these namespaces.
func (w *Worker) OfCache(c *alive.Cached, grace time.Duration) (*journal.Entry, error) {
	chain, conf, err := c.Chain()
	if err != nil {
		return nil, err
	}
	gen := journal.Generation{
		NetNS: journal.NetNS{Path: c.NetNS}, Args: c.CNIArgs(), CNIVersion: chain.CNIVersion,
		Host: w.Node.Host, Created: journal.Now(), GracePeriod: grace, Steps: chain.Steps(conf),
	}
	if len(c.RuntimeConfig) > 0 {
		gen.RuntimeConfig = netconf.Marshal(c.RuntimeConfig)
	}
	e := &journal.Entry{
		Key: c.Key(), Pod: netconf.PodOf(gen.Args), State: journal.Removing,
		Since: gen.Created, Updated: gen.Created,
	}
	if err := addCached(e, gen, c); err != nil {
		return nil, fmt.Errorf("its result: %w", err)
	}
	return e, nil
}

// addCached adds an ADD to an entry, with the result in libcni's cache and a claim on each of its
// addresses, of the delegate that allocates them. If no step does, that delegate's step is already
// undone: it is then the one of the newest ADD, or one before all others.
func addCached(e *journal.Entry, gen journal.Generation, c *alive.Cached) (err error) {
	if gen.Result, err = netconf.ConvertResult(c.Result, gen.CNIVersion); err != nil {
		return err
	}
	claim := journal.Claim{Step: -1}
	if newest := e.Newest(); newest != nil && len(newest.Claims) > 0 {
		claim = newest.Claims[0]
	}
	for _, s := range slices.Backward(gen.Steps) {
		if pool := ipam.Pool(s.Config, e.Network); pool != "" {
			claim = journal.Claim{Step: s.Index, Pool: pool}
		}
	}
	for _, claim.Address = range netconf.InterfaceOf(c.Result, e.IfName).Addresses {
		gen.Claims = append(gen.Claims, claim)
	}
	e.Generations = append(e.Generations, gen)
	return nil
}
