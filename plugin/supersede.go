package plugin

import (
	"context"
	"errors"
	"slices"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/internal/tristate"
	"cni-unwind/plugin/internal/verdict"
	"cni-unwind/plugin/netconf"
)

// open undoes what is left of earlier ADDs and writes the intent. killed names
// delegates of an earlier ADD of this attachment that unwind had to kill.
func (a *adding) open(ctx context.Context, killed []string) error {
	a.newEntry()
	if a.unwritable {
		return a.refuseAgain()
	}
	var kin []*journal.Entry
	errLeft, refused := errors.New("something is left"), error(nil)
	err := a.update(ctx, func(tx *journal.Tx) (err error) {
		if err := a.findPrior(tx); err != nil {
			return err
		}
		if kin, err = a.samePod(tx); err != nil {
			return err
		}
		if a.prior == nil {
			if refused = a.refuseAgain(); refused != nil {
				return refused
			}
		}
		if a.prior != nil || len(kin) > 0 {
			return errLeft
		}
		return tx.Put(a.entry)
	})
	if refused != nil {
		if a.lock.Made() {
			_ = a.lock.Remove() // restores the state before this ADD
		}
		return refused
	}
	if errors.Is(err, errLeft) {
		a.releaseSamePod(ctx, kin)
		if err := a.supersede(ctx, killed); err != nil || a.unwritable {
			return err
		}
		if err = a.update(ctx, func(tx *journal.Tx) error { return tx.Put(a.entry) }); err != nil {
			a.events = nil // the earlier ADD is still on record as it was
		}
	}
	if err != nil {
		return a.journalFailed(ctx, err)
	}
	return nil
}

// samePod returns the other attachments of the same pod that may be dead: a new sandbox first frees
// what the old one left (Azure CNS #4350). Live attachments of the same container in other networks
// are left out.
func (a *adding) samePod(tx *journal.Tx) ([]*journal.Entry, error) {
	entries, err := tx.ByPod(a.entry.Pod)
	return slices.DeleteFunc(entries, func(e *journal.Entry) bool {
		return e.Key == a.key || e.State == journal.Live && e.ContainerID == a.key.ContainerID
	}), err
}

// releaseSamePod divides its time over the attachments. It leaves the rest for later rather than
// give a healthy delegate so little time that it would be killed.
func (a *adding) releaseSamePod(ctx context.Context, kin []*journal.Entry) {
	if a.conf.Observes() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, a.Budgets.Release)
	defer cancel()
	kin = slices.DeleteFunc(kin, func(e *journal.Entry) bool { return !a.readyToRetry(ctx, e, false) })
	deadline, _ := ctx.Deadline()
	for i, e := range kin {
		left := time.Until(deadline)
		if left < a.Budgets.Release/5 {
			a.log.Debug("left for later: no time", "attachments", len(kin)-i)
			return
		}
		one, cancelOne := context.WithTimeout(ctx, max(left/time.Duration(len(kin)-i), a.Budgets.Release/5))
		if err := a.releaseIfDead(one, e.Key); err != nil {
			a.log.Debug("left for later", "attachment", e.Key.String(), "err", err)
		}
		cancelOne()
	}
}

// supersede undoes the earlier ADDs of this attachment. Steps that cannot be undone now become part
// of the new entry and run at its DEL: such a DEL may remove things keyed by the container ID,
// which is about to be used again.
func (a *adding) supersede(ctx context.Context, killed []string) error {
	prior := a.prior
	if prior == nil {
		return nil
	}
	if prior.State == journal.Live || prior.State == journal.Adding && a.lock.Made() {
		if err := a.refuseLive(prior); err != nil {
			if a.lock.Made() {
				_ = a.lock.Remove() // restores the state before this ADD
			}
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, a.Budgets.Release)
	defer cancel()
	if again, _ := a.later(ctx, prior); again == tristate.Yes {
		return a.addedAlready("by an ADD that the journal did not see, in a network namespace that is there")
	}
	if v := verdict.Decide(a.gather(ctx, prior, a.lock)); v.Fate == verdict.Foreign {
		if err := a.purge(ctx, nil, prior, v.Reason); err != nil { // without the lock, whose file this ADD keeps
			return a.journalFailed(ctx, err)
		}
		return nil
	}
	markKilled(prior, killed, a.conf.GracePeriod)
	if err := a.begin(ctx, prior, verdict.Superseded); err != nil {
		return a.journalFailed(ctx, err)
	}
	event := eventOf(journal.Superseded, prior)
	a.undo(ctx, a.lock, prior, "")
	event.Reason, event.Plugins = prior.Reason, pendingSteps(prior)
	a.recordEvent(event)
	a.entry.Generations = append(prior.Generations, *a.gen)
	a.gen = a.entry.Newest()
	return nil
}

// refuseLive returns an error if the attachment of an earlier ADD is still in use: SPEC 1.1 §2
// forbids an ADD over it.
func (a *adding) refuseLive(prior *journal.Entry) error {
	old := prior.Newest()
	switch {
	case a.sameBoot(old) == tristate.No || a.isOver(prior):
		return nil
	case old.NetNS.Same(a.gen.NetNS), !old.NetNS.Known() && old.NetNS.Path == a.args.Netns:
		return a.addedAlready("in the same network namespace")
	}
	if pid, err := a.view.ProcessIn(old.NetNS, len(old.HostLinks) == 0); pid != 0 || err != nil {
		return a.addedAlready("in a network namespace that a process is in")
	}
	return nil
}

// refuseAgain returns an error if the attachment was added past unwind in this same namespace. The
// ADD would fail, and its rollback would take, by container ID, what belongs to the other ADD.
func (a *adding) refuseAgain() error {
	if a.gen.Occupant == "" {
		return nil
	}
	c, err := a.cachedADD(a.key)
	if c == nil || err != nil {
		return nil //nolint:nilerr // nothing says that it is the attachment's
	}
	seen, err := host.Look(a.args.Netns, a.args.IfName)
	if err == nil && seen.Is(netconf.InterfaceOf(c.Result, a.key.IfName)) {
		return a.addedAlready("in the same network namespace")
	}
	return nil
}
