package plugin

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/record"
	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/undo"
)

// adding is one run of ADD.
type adding struct {
	*op
	chain   *netconf.Chain
	record  *journal.Record
	started int               // number of delegates that were started
	prior   []*journal.Record // earlier ADDs of the attachment in the journal, newest first
	samePod []*journal.Record // the pod's other attachments that may be dead
}

// add runs an ADD.
//
//  1. Read the configuration and find every binary. If that fails, nothing has been allocated.
//  2. Acquire the attachment's lock.
//  3. Undo earlier ADDs of this attachment, and release dead attachments of its pod. Write the
//     intent: the record in state adding, with the whole chain.
//  4. Run each delegate. After each one that changes the result, not only after the last, write the
//     record in state live, with the result and claims on the new addresses.
//  5. Print the result.
//  6. If step 4 or 5 fails, or nobody waits for the ADD any more (see watched), undo the ADD, even
//     if the journal cannot be read or written.
//
// If the intent cannot be written, the ADD continues without the journal, or fails (see
// journalFailed). After the intent is written, any write that fails makes the ADD fail. So if a
// record is in state adding and its lock is free, unwind never printed success, and the attachment
// is dead.
//
// The journal does not record which delegates were started. So after a crash during the ADD, every
// delegate of the chain gets a DEL, as after a failed ADD without unwind.
func (o *op) add(ctx context.Context) error {
	a := &adding{op: o}
	if err := a.prepare(ctx); err != nil {
		return err
	}
	if err := a.takeLock(ctx, journal.Patience{}, a.journalFailed); err != nil {
		return err
	}
	defer a.lock.Release()
	ctx, cancel := a.watched(ctx, 0, a.Env.Budgets.Unread)
	defer cancel(nil)
	if err := a.open(ctx); err != nil {
		return err
	}
	if f := a.carryOut(ctx); f != nil {
		return a.rollBack(ctx, f)
	}
	return nil
}

// The reasons to end an ADD early (see watched).
var (
	errAwaited = errors.New("the runtime has sent the DEL of this attachment")
	errUnread  = errors.New("the runtime has closed the pipe for the result")
)

// watched returns a context that ends once nobody waits for the ADD any more. This is the case once
// a DEL has waited for the attachment's lock as long as the parameter awaited says: a runtime runs
// one verb for a container at a time, so the ADD's runtime is dead or has abandoned the ADD. It is
// also the case once nobody has been able to read stdout for as long as the parameter unread says.
// Both are checked only while a delegate runs. A DEL that waits for another attachment's lock does
// not count, even if this ADD holds that lock.
func (a *adding) watched(
	ctx context.Context, awaited, unread time.Duration,
) (context.Context, context.CancelCauseFunc) {
	ctx, end := context.WithCancelCause(ctx)
	isAwaited, isUnread := lasting(awaited, a.lock.Awaited), lasting(unread, a.plugin.Unread)
	a.Verb.Watch = func() {
		switch {
		case isAwaited():
			end(errAwaited)
		case isUnread():
			end(errUnread)
		}
	}
	return ctx, end
}

// lasting returns a function that reports whether at least d has passed since the first call in
// which the condition was true. A nil condition is never true.
func lasting(d time.Duration, condition func() bool) func() bool {
	var since time.Time
	return func() bool {
		if since.IsZero() && condition != nil && condition() {
			since = time.Now()
		}
		return !since.IsZero() && time.Since(since) >= d
	}
}

// carryOut runs the delegates, and prints the last one's result.
func (a *adding) carryOut(ctx context.Context) *delegate.Failure {
	for i := range a.chain.Delegates {
		result, f := a.runDelegate(ctx, i)
		if f == nil && !bytes.Equal(result, a.record.Got.Result) {
			f = a.commit(ctx, i, result)
		}
		if f != nil {
			return f
		}
	}
	return a.printResult()
}

// callOf returns the ADD call of a delegate, without its configuration.
func (a *adding) callOf(i int) *delegate.Call {
	return a.call("ADD", a.chain.Delegates[i].Type)
}

func (a *adding) runDelegate(
	ctx context.Context, i int,
) (result json.RawMessage, f *delegate.Failure) {
	step := &a.record.Steps[i]
	a.started = i + 1
	c := a.callOf(i)
	c.Stdin = netconf.WithPrevResult(step.Config, a.record.Got.Result)
	if limit := a.Verb.Conf.DelegateTimeout; limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, limit,
			fmt.Errorf("delegateTimeout (%s) has passed", limit))
		defer cancel()
	}
	stdout, f := a.Env.Runner.Run(ctx, c, a.Env.Stderr)
	a.Env.At("added")
	if f != nil {
		undo.Failed(step, f)
		if f.Unstarted {
			a.started = i
		}
		return nil, f
	}
	result, err := netconf.ReadResult(stdout, a.chain.CNIVersion)
	if err != nil {
		f = c.Failed(types.ErrDecodingFailure, err.Error())
	}
	return result, f
}

// setResult stores a result and its host links in a record. It returns a claim on each address of
// the result that the record does not claim yet. The parameter by is the step that the claims name,
// and ipamPlugin is the IPAM plugin of that step's delegate.
func setResult(
	e *journal.Record, raw json.RawMessage, by journal.Step, ipamPlugin string,
) (claims []journal.Claim, err error) {
	r, err := netconf.ParseResult(raw)
	if err != nil {
		return nil, err
	}
	e.Got.Result, e.Got.HostLinks = raw, facts.HostLinks(r)
	pool := ipam.Pool(ipamPlugin, by.Config, e.Network)
	for _, address := range r.Addresses() {
		if !e.ClaimsAddress(address) {
			claims = append(claims, journal.Claim{Address: address, Step: by.Index, Pool: pool})
		}
	}
	return claims, nil
}

// commit writes the record as live, with a delegate's result and claims. While other processes keep
// writing to the journal, commit waits. If the result cannot be written, the ADD fails, because the
// record of a live attachment must not lack the result or stay in state adding.
//
// In the transaction that writes the claims, commit searches for other claims on the new addresses.
// So if two ADDs get the same address at the same time, the second to commit detects the duplicate.
func (a *adding) commit(ctx context.Context, i int, result json.RawMessage) *delegate.Failure {
	claims, err := setResult(a.record, result, a.record.Steps[i], a.chain.Delegates[i].IPAM)
	if err != nil {
		return a.callOf(i).Failed(types.ErrDecodingFailure, err.Error())
	}
	a.record.Got.Claims = append(a.record.Got.Claims, claims...)
	if a.Node.Journal.Lost != nil {
		return nil //nolint:nilerr // the ADD goes on without the journal
	}
	addresses := (&journal.Record{Got: journal.Got{Claims: claims}}).Addresses()
	var others []*journal.Record
	write := func(tx *journal.Tx) (err error) {
		if others, err = (&record.Snapshot{Tx: tx}).Others(a.Verb.Key, addresses); err != nil {
			return err
		}
		a.record.State = journal.Live
		return tx.Put(a.record)
	}
	err = a.Node.Journal.Update(ctx, write)
	for errors.Is(err, journal.ErrQueued) && ctx.Err() == nil {
		a.log.Warn("other processes keep writing to the journal; the ADD is still waiting")
		err = a.Node.Journal.Update(ctx, write)
	}
	if err != nil {
		return a.callOf(i).Failed(types.ErrTryAgainLater,
			"unwind: cannot record the result: "+err.Error())
	}
	return a.refuseDuplicates(ctx, i, addresses, others)
}

// refuseDuplicates returns a failure if another attachment of the same network uses one of the
// addresses that a delegate has just added. It also counts duplicates in other networks, but
// accepts them.
func (a *adding) refuseDuplicates(
	ctx context.Context, i int, addresses []netip.Addr, others []*journal.Record,
) *delegate.Failure {
	for _, other := range others {
		for _, address := range a.duplicates(ctx, addresses, other) {
			a.Node.Journal.Count(record.CountDuplicates)
			if other.Network == a.Node.Network {
				return a.callOf(i).Failed(types.ErrInternal,
					fmt.Sprintf("duplicate address %s: already in use by %s; see unwindctl show %s", address,
						other.Key, other.Key))
			}
		}
	}
	return nil
}

// duplicates returns those of the given addresses that another attachment certainly uses: both ADDs
// got the address from the same pool (see netconf.SharedAddresses), the other attachment is not
// dead, and its interface has the address.
func (a *adding) duplicates(
	ctx context.Context, addresses []netip.Addr, other *journal.Record,
) []netip.Addr {
	used := slices.DeleteFunc(netconf.SharedAddresses(a.record, other),
		func(address netip.Addr) bool { return !slices.Contains(addresses, address) })
	if len(used) == 0 || a.Node.Judge(ctx, other).Verdict == decide.Dead {
		return nil
	}
	has, err := facts.AddressesOf(other)
	if err != nil {
		a.log.Warn("cannot check for a duplicate address", "addresses", used, "other",
			other.Key.String(), "err", err)
	}
	return slices.DeleteFunc(used,
		func(address netip.Addr) bool { return !slices.Contains(has, address) })
}

// printResult prints the result in the CNI version of unwind's own configuration. If the chain has
// that version, printResult does not convert the result, because libcni would not either.
func (a *adding) printResult() *delegate.Failure {
	last := a.callOf(len(a.chain.Delegates) - 1)
	printed := a.record.Got.Result
	if !netconf.SameVersion(a.Verb.Conf.CNIVersion, a.chain.CNIVersion) {
		var err error
		if printed, err = netconf.ConvertResult(printed, a.Verb.Conf.CNIVersion); err != nil {
			return last.Failed(types.ErrDecodingFailure, err.Error())
		}
	}
	a.Env.At("print")
	if _, err := a.plugin.Stdout.Write(append(bytes.TrimSpace(printed), '\n')); err != nil {
		return last.Failed(types.ErrIOFailure, "unwind: cannot print the result: "+err.Error())
	}
	return nil
}

// rollBack undoes the ADD and returns the error for the runtime. It does so even if the journal
// cannot be read or written.
func (a *adding) rollBack(ctx context.Context, f *delegate.Failure) error {
	said := netconf.Shorten(f.Said(), 500)
	a.log.Warn("ADD failed; rolling it back", "plugin", f.Plugin, "code", f.Code, "err", said)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), a.Env.Budgets.Undo)
	defer cancel()
	ctx, end := a.watched(ctx, a.Env.Budgets.Stop, a.Env.Budgets.Undo)
	defer end(nil)
	a.Node.Journal.Invalidate() // the snapshot may be outdated
	reason := decide.FailedADD
	a.record.Steps = a.record.Steps[:a.started]
	reason.Text += ": " + f.Plugin + ": " + said
	request := undo.Request{Record: a.record, Mode: undo.Rollback, Lock: a.lock, Netns: a.args.Netns}
	event := record.EventOf(journal.RolledBack, a.record)
	_, _, err := a.Undo(ctx, request, reason)
	lost := cmp.Or(err, a.Node.Journal.Lost)
	event.Reason, event.Plugins = said, []string{f.Plugin}
	a.Node.Journal.Event(event, record.CountRollbacks, f.Plugin, undo.Result(a.record))
	if lost != nil {
		a.log.Error("cannot write the journal after a failed ADD", "err", lost, "pending",
			strings.Join(undo.PendingSteps(a.record), ", "))
	}
	err = addError(f, a.record, lost)
	if !a.lock.Awaited() {
		a.makeRoom(ctx)
	}
	return err
}

// addError returns the failed delegate's message, followed by the pending DELs. If the journal
// cannot record these DELs, lost is the reason; otherwise, lost is nil.
func addError(f *delegate.Failure, e *journal.Record, lost error) *types.Error {
	pending := ""
	if len(e.Steps) > 0 {
		pending = fmt.Sprintf("; unwind: pending DEL: %s", strings.Join(undo.PendingSteps(e), ", "))
		if lost != nil {
			pending += ", not recorded in the journal: " + netconf.Shorten(lost.Error(), 200)
		}
	}
	room := max(maxMessage/2, maxMessage-len(pending))
	return cniError(f.Code, netconf.Shorten(f.Error(), room)+pending, f.Details)
}

// makeRoom releases the network's dead attachments after a failed ADD, so that the runtime's next
// ADD can find a free address in a pool that was full.
func (a *adding) makeRoom(ctx context.Context) {
	if a.Verb.Conf.Observes() {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), a.Env.Budgets.Release)
	defer cancel()
	opts := sweep.Options{Network: a.Verb.Key.Network, Pools: sweep.PoolsOf(a.chain, a.Verb.Conf)}
	_ = a.sweepBriefly(opts, func(s *sweep.Sweep) error {
		_, err := s.Run(ctx)
		return err
	})
}
