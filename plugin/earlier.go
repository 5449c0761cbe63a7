package plugin

import (
	"cmp"
	"context"
	"slices"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/tristate"
	"cni-unwind/plugin/undo"

	"github.com/containernetworking/cni/pkg/types"
)

// open releases what earlier ADDs left, and writes the intent (see add). If they left nothing, this
// takes one transaction. killed names delegates of an earlier ADD of this attachment that unwind
// had to kill.
func (a *adding) open(ctx context.Context, killed []string) error {
	seen, err := facts.Look(a.args.Netns, a.args.IfName)
	if err != nil {
		a.log.Warn("cannot identify the network namespace", "netns", a.args.Netns, "err", err)
	}
	a.entry = a.newEntry(journal.Adding, a.chain)
	a.entry.Added.NetNS, a.entry.Added.Occupant = seen.Netns, seen.Occupant()
	if a.Journal.Unwritable {
		return a.refuseUnseen()
	}
	var samePod []*journal.Entry
	var refused error
	err = a.writeIntent(ctx, func(tx *journal.Tx) (err error) {
		samePod, refused, err = a.intend(tx)
		return err
	})
	if err := cmp.Or(refused, err); err != nil || a.Journal.Unwritable {
		return err
	}
	if len(a.prior) == 0 && len(samePod) == 0 {
		return nil
	}
	a.releaseSamePod(ctx, samePod)
	if err := a.supersede(ctx, killed); err != nil || a.Journal.Unwritable {
		return err
	}
	if err := a.writeIntent(ctx, a.putIntent); err != nil || a.Journal.Unwritable {
		return err
	}
	a.awaitSamePod(ctx, samePod)
	return nil
}

// intend writes the intent. It writes nothing if earlier ADDs of this attachment or its pod have
// left something, or if the ADD must be refused.
func (a *adding) intend(tx *journal.Tx) (samePod []*journal.Entry, refused, err error) {
	if err := a.findPrior(tx); err != nil {
		return nil, nil, err
	}
	if samePod, err = a.samePod(tx); err != nil || len(a.prior) > 0 {
		return samePod, nil, err
	}
	if refused = a.refuseUnseen(); refused == nil && len(samePod) == 0 {
		err = a.putIntent(tx)
	}
	return samePod, refused, err
}

// samePod returns the other attachments of the same pod that may be dead, because a new sandbox
// first frees what the old one left (Azure CNS #4350). It omits live attachments of the same
// container in other networks.
func (a *adding) samePod(tx *journal.Tx) ([]*journal.Entry, error) {
	entries, err := tx.ByPod(a.entry.Added.Pod)
	return slices.DeleteFunc(entries, func(e *journal.Entry) bool {
		return e.Key == a.Key || e.Undo.State == journal.Live && e.ContainerID == a.Key.ContainerID
	}), err
}

// releaseSamePod releases dead attachments of the same pod, and divides its time among them. When
// time is short, it defers the rest. Otherwise a healthy delegate would get too little time and be
// killed.
func (a *adding) releaseSamePod(ctx context.Context, samePod []*journal.Entry) {
	if a.Conf.Observes() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, a.Budgets.Release)
	defer cancel()
	samePod = slices.DeleteFunc(slices.Clone(samePod),
		func(e *journal.Entry) bool { return !a.Ready(ctx, e, false) })
	deadline, _ := ctx.Deadline()
	for i, e := range samePod {
		left := time.Until(deadline)
		if left < a.Budgets.Step {
			a.log.Debug("out of time; a later verb releases the other attachments of the pod",
				"attachments", len(samePod)-i)
			return
		}
		one, cancelOne := context.WithTimeout(ctx,
			max(left/time.Duration(len(samePod)-i), a.Budgets.Step))
		if err := a.Release(one, e.Key); err != nil {
			a.Log.Debug("deferred", "attachment", e.Key.String(), "err", err)
		}
		cancelOne()
	}
}

// awaitSamePod waits for DELs of the pod's other sandboxes that began before the intent was
// written. It waits only for a DEL that frees by pod, which could free this ADD's address.
func (a *adding) awaitSamePod(ctx context.Context, samePod []*journal.Entry) {
	ctx, cancel := context.WithTimeout(ctx, a.Budgets.Release)
	defer cancel()
	byPod := func(s journal.Step) bool { return known.IPAMOf(s.Config).FreesByPod }
	for _, e := range samePod {
		for slices.ContainsFunc(e.Undo.Steps, byPod) && ctx.Err() == nil {
			if state, err := a.Journal.Store.LookAtLock(e.Key); err != nil || !state.Held {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
}

// supersede undoes the earlier ADDs of this attachment. DELs that fail stay in the journal and wait
// until this ADD's attachment is gone. They may remove resources by container ID, and this ADD is
// about to use the same ID.
func (a *adding) supersede(ctx context.Context, killed []string) error {
	ctx, cancel := context.WithTimeout(ctx, a.Budgets.Release)
	defer cancel()
	for _, prior := range a.prior {
		if prior.Undo.State == journal.Live {
			if err := a.refuseLive(prior); err != nil {
				return err
			}
		}
		if again, _ := a.Later(ctx, prior); again {
			// that ADD may still be in use, and the DELs would release its resources
			if err := a.refuseUnseen(); err != nil {
				return err
			}
			continue
		}
		v := decide.Decide(a.Gather(ctx, prior, a.lock))
		if v.Fate != decide.Foreign {
			v.Reason = decide.Superseded
		}
		a.MarkKilled(prior, killed)
		job := undo.Job{Entry: prior, Lock: a.lock, Superseded: true}
		if _, err := a.Undo(ctx, job, v); err != nil {
			return a.journalFailed(err)
		}
	}
	return nil
}

// refuseLive returns an error if the attachment of an earlier ADD is still in use: this ADD's
// namespace is its namespace and has the interface, or a process is in its namespace elsewhere.
// SPEC 1.1 §2 forbids a second ADD without a DEL.
func (a *adding) refuseLive(prior *journal.Entry) error {
	was := prior.Added.NetNS
	same := was.Same(a.entry.Added.NetNS) || !was.Known() && facts.SamePath(was.Path, a.args.Netns)
	switch {
	case a.SameBoot(prior) == tristate.No, same && a.entry.Added.Occupant == "":
		return nil
	case same:
		return a.addedAlready("in the same network namespace")
	}
	if inside, err := a.View.ProcessIn(was, len(prior.Got.HostLinks) == 0); inside || err != nil {
		return a.addedAlready("in a network namespace with a running process")
	}
	return nil
}

// refuseUnseen returns an error if libcni's cache has an ADD of the attachment in this same
// namespace. The current ADD would fail. Its rollback finds resources by the container ID, so it
// would remove those of the first ADD.
func (a *adding) refuseUnseen() error {
	if a.entry.Added.Occupant == "" {
		return nil
	}
	if cached, err := a.CachedInterface(a.Key); err != nil || !cached.There() ||
		!cached.Netns.Same(a.entry.Added.NetNS) {
		return nil //nolint:nilerr // nothing proves such an ADD
	}
	return a.addedAlready("in the same network namespace")
}

// addedAlready returns the error that refuses the ADD.
func (a *adding) addedAlready(why string) error {
	_ = a.lock.Remove() // the attachment may have no entry
	return ownError(types.ErrInternal, "%s is already attached (%s); delete it first", a.Key, why)
}
