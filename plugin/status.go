package plugin

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/sweep"
)

// The error codes of STATUS (SPEC 1.1 §2 STATUS).
const (
	errNotAvailable        = 50 // the plugin cannot service ADD requests
	errLimitedConnectivity = 51 // the same, and existing containers may have limited connectivity
)

// status reports whether ADDs will work: the chain can be read, its binaries exist, no delegate
// reports a failure, and the journal works if ADDs require it. Without unwind, a runtime sends
// STATUS only to a chain of CNI 1.1.0 or later. So for an older chain, status only logs a missing
// binary: an error would make the node not ready, and the node would lose its running pods.
//
// status also judges the attachments, without a runtime's list, and starts a sweep if something can
// be released, because STATUS is the verb that runtimes call most often.
//
// A runtime calls STATUS without a deadline, while it holds a lock that every pod waits for
// (go-cni). So status returns within Budgets.Status, even if a plugin hangs.
func (o *op) status(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, o.Env.Budgets.Status*3/4)
	defer cancel()
	said := make(chan error, 1)
	go func() {
		said <- o.Safely(func() error { return o.checkAndSweep(ctx) })
	}()
	select {
	case err := <-said:
		return err
	case <-time.After(o.Env.Budgets.Status * 19 / 20):
		return ownError(errNotAvailable, "STATUS timed out: a plugin does not respond, or a "+
			"configuration file cannot be read; check the plugins and the file system")
	}
}

// checkAndSweep checks what an ADD needs, and starts a sweep at the same time if one is due. It
// opens the journal once, both to check that it can be written and to take a snapshot.
func (o *op) checkAndSweep(ctx context.Context) error {
	if o.bad != nil {
		return ownError(errNotAvailable, "%v", o.bad)
	}
	chain, err := o.awaitChain(ctx)
	if err != nil {
		return ownError(errNotAvailable, "%v", err)
	}
	journalErr, swept := make(chan error, 1), make(chan struct{})
	behind, cancel := context.WithTimeout(ctx, o.Env.Budgets.Behind)
	defer cancel()
	go func() {
		defer close(swept)
		err := o.Node.Journal.Store.Update(behind, o.Node.Journal.TakeSnapshot) // writes nothing
		journalErr <- err
		if err == nil && o.Verb.Conf.SweepOnStatus && o.plugin.Behind != nil {
			o.sweepIfDue(behind, chain)
		}
	}()
	answer := o.health(ctx, chain, journalErr)
	select {
	case <-swept:
	case <-behind.Done():
	}
	return answer
}

// sweepIfDue starts a sweep if one would release something, and waits until the sweep or ctx ends.
func (o *op) sweepIfDue(ctx context.Context, chain *netconf.Chain) {
	opts := sweep.Options{Pools: sweep.PoolsOf(chain, o.Verb.Conf)}
	_ = o.sweepBriefly(opts, func(s *sweep.Sweep) error {
		due, err := s.Due(ctx)
		if !due {
			return err
		}
		ended, startErr := o.plugin.Behind(o.args.StdinData)
		if startErr != nil {
			return errors.Join(err, startErr)
		}
		o.log.Debug("started a sweep")
		select {
		case sweepErr := <-ended:
			return errors.Join(err, sweepErr)
		case <-ctx.Done():
			return err
		}
	})
}

// health checks the binaries, the delegates' STATUS, and the journal's error from journaled.
func (o *op) health(
	ctx context.Context, chain *netconf.Chain, journaled <-chan error,
) error {
	var missing []string
	var failures []*delegate.Failure
	o.awaitExchange(ctx, func() bool {
		missing = chain.Missing(o.args.Path)
		return len(missing) == 0
	})
	if len(missing) == 0 {
		failures = o.passOn(ctx, chain, "STATUS", nil)
	}
	if len(missing) > 0 && !hasStatus(chain) {
		o.log.Warn("plugins are missing, so new pods cannot start", "missing",
			strings.Join(missing, ", "), "path", o.args.Path)
	}
	journalErr := <-journaled
	if errors.Is(journalErr, journal.ErrBusy) {
		journalErr = nil
	}
	for _, f := range failures {
		if f.Killed && ctx.Err() != nil { // it hung, so it returned no code
			f.Code = errNotAvailable
		}
	}
	switch {
	case len(missing) > 0 && hasStatus(chain):
		_, err := netconf.FindPlugin(missing[0], o.args.Path)
		return cniError(errNotAvailable, "unwind: "+err.Error(), strings.Join(missing, ", "))
	case len(failures) > 0:
		severity := map[uint]int{errNotAvailable: 1, errLimitedConnectivity: 2}
		gravest := slices.MaxFunc(failures,
			func(a, b *delegate.Failure) int { return cmp.Compare(severity[a.Code], severity[b.Code]) })
		return cniError(gravest.Code, gravest.Error(), gravest.Details)
	case journalErr != nil && o.Verb.Conf.OnJournalFailure == "fail":
		return ownError(errNotAvailable, `%v (onJournalFailure is "fail")`, journalErr)
	case journalErr != nil:
		o.log.Warn("the journal cannot be used; ADDs run without it, and a crash or failed DEL can leak "+
			"addresses", "err", journalErr)
	}
	return nil
}
