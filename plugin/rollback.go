package plugin

import (
	"context"
	"strings"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/record"
	"cni-unwind/plugin/undo"
)

// rollBack undoes the ADD and returns the error for the runtime. It needs nothing from the journal.
func (a *adding) rollBack(ctx context.Context, f *delegate.Failure) error {
	said := netconf.Shorten(f.Said(), 500)
	a.log.Warn("ADD failed; rolling it back", "plugin", f.Plugin, "code", f.Code, "err", said)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), a.Budgets.Undo)
	defer cancel()
	a.Journal.Forget() // the ADD may have taken long
	a.entry.Undo.State = journal.RollingBack
	a.entry.Undo.Steps, a.entry.Undo.Failed = a.entry.Undo.Steps[:a.started], true
	a.entry.Undo.Cause = decide.FailedADD.Code
	a.entry.Undo.Reason = decide.FailedADD.Text + ": " + f.Plugin + ": " + said
	if a.ClaimHeld(a.entry) && !a.Journal.Unwritable {
		if err := a.Journal.Save(ctx, a.entry); err != nil {
			a.log.Error("cannot write the journal after a failed ADD", "err", err)
		}
	}
	job := undo.Job{Entry: a.entry, Mode: undo.Rollback, Lock: a.lock, Netns: a.args.Netns}
	event, result := record.EventOf(journal.RolledBack, a.entry), "complete"
	a.Run(ctx, job)
	if len(a.entry.Undo.Steps) > 0 {
		result = "pending"
	}
	event.Reason, event.Plugins = said, []string{f.Plugin}
	a.Journal.Event(event, record.CountRollbacks, f.Plugin, result)
	switch {
	case !a.Journal.Unwritable:
		if err := a.Finish(ctx, job); err != nil {
			a.lost = err
			a.log.Error("cannot write the journal after a failed ADD", "err", err)
		}
	case len(a.entry.Undo.Steps) > 0:
		a.log.Error("pending DELs are lost: the journal cannot be written",
			"plugins", strings.Join(undo.PendingSteps(a.entry), ", "))
	}
	err := addError(f, a.entry, a.lost)
	a.makeRoom(ctx)
	return err
}

// makeRoom releases the network's dead attachments after a failed ADD, so that the runtime's next
// ADD finds a free address in a pool that was full.
func (a *adding) makeRoom(ctx context.Context) {
	if a.Conf.Observes() {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), a.Budgets.Release)
	defer cancel()
	a.sweepBriefly(ctx, a.Key.Network, a.chain)
}
