package plugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/record"
	"cni-unwind/plugin/undo"
)

// This file contains the part of an ADD that runs before the first delegate.

// prepare validates the input before any delegate starts.
func (a *adding) prepare(ctx context.Context) (err error) {
	if a.bad != nil {
		return badConfig(a.bad)
	}
	if a.Verb.Conf.PrevResult != nil {
		return badConfig(errors.New("prevResult is set, but unwind must be the first plugin of the " +
			`list; move the plugins before it into "chain"`))
	}
	if err := a.checkText(); err != nil {
		return ownError(types.ErrInvalidEnvironmentVariables, "%v", err)
	}
	if a.chain, err = a.awaitChain(ctx); err != nil {
		return a.refuse(badConfig(err))
	}
	if lost := a.chain.LostCapabilities(a.Verb.Conf); len(lost) > 0 {
		a.log.Warn("plugins need capabilities that unwind's entry does not declare, so the runtime "+
			"drops their arguments; declare them in the entry", "lost", strings.Join(lost, ", "), "declare",
			fmt.Sprintf(`"capabilities": {"%s": true}`,
				strings.Join(a.chain.EntryCapabilities(), `": true, "`)))
	}
	if missing := a.chain.Missing(a.args.Path); len(missing) > 0 {
		_, err := netconf.FindPlugin(missing[0], a.args.Path)
		msg := fmt.Sprintf("plugin type=%q failed (add): %v; unwind: no plugin was started", missing[0],
			err)
		return a.refuse(cniError(types.ErrPluginNotAvailable, msg,
			"missing: "+strings.Join(missing, ", ")), missing...)
	}
	var at unix.Stat_t
	there := !a.overridesNetNS() && unix.Stat(a.args.Netns, &at) == nil
	switch { // skel would check this only after the result is printed
	case !there:
	case a.Node.Host.NetNS == "":
		return ownError(types.ErrInvalidNetNS, "/proc/self/ns/net cannot be read; check that /proc is "+
			"mounted")
	case a.Node.IsHost(journal.NetNS{Ino: at.Ino}):
		return ownError(types.ErrInvalidNetNS, "CNI_NETNS is the runtime's own network namespace; "+
			"set it to the container's")
	}
	return nil
}

// refuse records in the history that an ADD could not start its chain, and returns the error. The
// counter names the first missing plugin, or unwind if the chain cannot be read.
func (a *adding) refuse(err *types.Error, plugins ...string) error {
	event := journal.Event{Key: a.Verb.Key, Kind: journal.RolledBack, Reason: err.Msg,
		Pod: netconf.PodOf(a.args.Args), Plugins: plugins}
	a.Node.Journal.Event(event, record.CountRollbacks, append(plugins, netconf.Name)[0], "complete")
	return err
}

// open undoes earlier ADDs of the attachment, releases dead attachments of its pod, and writes the
// intent (see add). If there is nothing to undo or release, open needs only one transaction.
func (a *adding) open(ctx context.Context) error {
	seen, err := facts.InterfaceAt(a.args.Netns, a.args.IfName)
	if err != nil {
		a.log.Warn("cannot identify the network namespace", "netns", a.args.Netns, "err", err)
	}
	a.record = a.newRecord(journal.Adding, a.chain)
	a.record.Added.NetNS, a.record.Added.Occupant = seen.Netns, seen.Occupant()
	if a.Node.Journal.Lost != nil {
		return a.refuseUnseen()
	}
	err = a.writeIntent(ctx, a.putFirst)
	if err != nil || a.Node.Journal.Lost != nil || len(a.prior)+len(a.samePod) == 0 {
		return err
	}
	a.releaseSamePod(ctx)
	if err := a.supersede(ctx); err != nil || a.Node.Journal.Lost != nil {
		return err
	}
	return a.writeIntent(ctx, a.putIntent)
}

// putFirst writes the intent, unless the journal contains earlier ADDs of the attachment (a.prior),
// or other attachments of its pod that may be dead (a.samePod). The ADD of a pod's new sandbox
// first releases the addresses and resources of the old sandbox (Azure CNS #4350). a.samePod omits
// other attachments of this ADD's own container, unless they are being undone: this ADD may run
// inside one of their ADDs (Multus), and must not wait for it.
func (a *adding) putFirst(tx *journal.Tx) (err error) {
	a.prior, err = tx.Pending(a.Verb.Key)
	if err := journal.IgnoreDamaged(err); err != nil { // the intent replaces a damaged record
		return err
	}
	a.samePod, err = tx.ByPod(a.record.Added.Pod)
	a.samePod = slices.DeleteFunc(a.samePod, func(e *journal.Record) bool {
		return e.Key == a.Verb.Key ||
			decide.KeepsContainer(e.State) && e.ContainerID == a.Verb.Key.ContainerID
	})
	if err != nil || len(a.prior) > 0 {
		return err
	}
	if err := a.refuseUnseen(); err != nil || len(a.samePod) > 0 {
		return err
	}
	return a.putIntent(tx)
}

func (a *adding) putIntent(tx *journal.Tx) error {
	a.record.Number = 0 // the transaction may run twice
	return tx.Put(a.record)
}

// writeIntent runs a transaction that writes the intent. A commit that returned an error may still
// have written the intent, so writeIntent then reads the journal again. If the journal contains the
// intent, the ADD continues. If the journal lacks it or is damaged, journalFailed decides. If the
// journal cannot be read, the ADD fails, because a record in state adding must not belong to an ADD
// that succeeds. If the transaction itself refuses the ADD, writeIntent returns its error.
func (a *adding) writeIntent(ctx context.Context, write func(*journal.Tx) error) error {
	a.record.Number = 0
	err := a.Node.Journal.Update(ctx, write)
	if refused := new(types.Error); err == nil || errors.As(err, &refused) {
		return err
	}
	if a.record.Number != 0 { // otherwise, no commit was tried
		var stored *journal.Record
		unread := a.Node.Journal.Store.View(ctx, func(tx *journal.Tx) (err error) {
			stored, err = tx.Get(a.Verb.Key)
			return journal.IgnoreDamaged(err)
		})
		switch {
		case unread != nil && !errors.Is(unread, journal.ErrDamaged):
			return ownError(types.ErrTryAgainLater, "%v; cannot tell whether the journal contains the "+
				"ADD: %v; retry later", err, unread)
		case stored != nil && stored.Number == a.record.Number:
			a.log.Warn("the journal returned an error, but it contains the ADD; continuing", "err", err)
			return nil
		}
	}
	return a.journalFailed(err)
}

// journalFailed decides whether an ADD whose intent is not in the journal continues or fails.
func (a *adding) journalFailed(err error) error {
	if a.Verb.Conf.OnJournalFailure == "fail" {
		return ownError(types.ErrTryAgainLater, `%v (onJournalFailure is "fail")`, err)
	}
	a.Degrade("ADD", err)
	return nil
}

// releaseSamePod releases dead attachments of the same pod, those with the fewest tries first, so a
// DEL that hangs does not starve the others. It stops when too little time is left for a slow DEL.
// A later verb or sweep releases the rest.
func (a *adding) releaseSamePod(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, a.Env.Budgets.Release)
	defer cancel()
	ready := slices.DeleteFunc(slices.Clone(a.samePod),
		func(e *journal.Record) bool { return a.Spares(e) || !a.Ready(ctx, e, false) })
	slices.SortStableFunc(ready, func(one, other *journal.Record) int {
		return cmp.Compare(undo.FailedTries(one), undo.FailedTries(other))
	})
	deadline, _ := ctx.Deadline()
	for i, e := range ready {
		if time.Until(deadline) < a.Env.Budgets.Step {
			a.log.Debug("out of time; the other attachments of the pod are released later",
				"attachments", len(ready)-i)
			return
		}
		if err := a.Release(ctx, e.Key); err != nil {
			a.Node.Log.Debug("deferred", "attachment", e.Key.String(), "err", err)
		}
	}
}

// supersede undoes the earlier ADDs of this attachment. A DEL that fails stays in the journal, and
// waits while the new ADD's record is in state adding or live. All these ADDs have the same
// container ID, so a DEL that finds resources by container ID would release those of the new ADD.
func (a *adding) supersede(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, a.Env.Budgets.Release)
	defer cancel()
	for _, prior := range a.prior {
		if prior.State == journal.Live {
			if err := a.refuseLive(prior); err != nil {
				return err
			}
		}
		if again, _ := a.Node.Later(ctx, prior); again {
			// prior's DELs would release resources of the later ADD, which has no record
			if err := a.refuseUnseen(); err != nil {
				return err
			}
			continue
		}
		reason := decide.Superseded
		if v := decide.Decide(a.Node.Gather(ctx, prior, a.lock)); v.Verdict == decide.Foreign {
			reason = v.Reason
		}
		request := undo.Request{Record: prior, Mode: undo.Superseding, Lock: a.lock}
		if _, _, err := a.Undo(ctx, request, reason); err != nil {
			return a.journalFailed(err)
		}
	}
	return nil
}

// refuseLive returns an error if the attachment of an earlier ADD may be in use: both ADDs have the
// same namespace, and the interface already exists there; or the earlier ADD has another namespace,
// and a process may be in it. SPEC 1.1 §2 forbids a second ADD without a DEL.
func (a *adding) refuseLive(prior *journal.Record) error {
	was := prior.Added.NetNS
	same := was.Same(a.record.Added.NetNS) || !was.Known() && facts.SamePath(was.Path, a.args.Netns)
	switch {
	case a.Node.SameBoot(prior) == decide.False, same && a.record.Added.Occupant == "":
		return nil
	case same:
		return a.addedAlready("in the same network namespace")
	}
	if inside, err := a.Node.View.ProcessIn(was, len(prior.Got.HostLinks) == 0); inside || err != nil {
		return a.addedAlready("in a network namespace that may be in use")
	}
	return nil
}

// refuseUnseen returns an error if the interface exists in this ADD's namespace, and libcni's cache
// shows that an earlier ADD of the attachment created it. This ADD would fail, and its rollback,
// whose DELs find resources by container ID, would remove the resources of the earlier ADD.
func (a *adding) refuseUnseen() error {
	if a.record.Added.Occupant == "" {
		return nil
	}
	if cached, err := a.Node.CachedInterface(a.Verb.Key); err != nil || !cached.There() ||
		!cached.Netns.Same(a.record.Added.NetNS) {
		return nil //nolint:nilerr // nothing proves such an ADD
	}
	return a.addedAlready("in the same network namespace")
}

// addedAlready returns the error that refuses the ADD.
func (a *adding) addedAlready(why string) error {
	_ = a.lock.Remove() // without a record, nothing else would remove the lock file
	return ownError(types.ErrInternal, "%s is already attached (%s); delete it first", a.Verb.Key, why)
}
