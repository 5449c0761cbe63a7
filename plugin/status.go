package plugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/journal"
)

// The codes of a STATUS (SPEC 1.1 §2 STATUS).
const (
	errNotAvailable        = 50 // the plugin cannot service ADD requests
	errLimitedConnectivity = 51 // … and attached containers may have limited connectivity
)

// status says whether ADDs will work: the chain can be read, its binaries are there, its delegates say so, and the journal
// can be had where no ADD goes on without it. Besides, it sweeps, by evidence alone: of all that a runtime asks, this is
// what it asks most often.
//
// A runtime calls it without a deadline, and under a lock that every pod waits for (go-cni), so it ends in its time
// whatever hangs: what is in the middle of something then is cut off as by a crash. A sweep that is cut off says nothing
// about the network.
func (o *op) status() error {
	ctx, cancel := context.WithTimeout(o.ctx, o.Budgets.Status*3/4)
	defer cancel()
	said := make(chan error, 1)
	go func() {
		said <- o.safely(func() error { return o.look(ctx) })
	}()
	select {
	case err := <-said:
		return err
	case <-time.After(o.Budgets.Status * 19 / 20):
		return notAvailable("unwind: STATUS did not end in time: a delegate, or a file of the configuration, hangs", "")
	}
}

// look sweeps while it looks for what an ADD needs.
func (o *op) look(ctx context.Context) error {
	if o.bad != nil {
		return notAvailable(badConfig(o.bad).Msg, "")
	}
	chain, err := o.conf.LoadChain()
	if err != nil {
		return notAvailable(badConfig(err).Msg, "")
	}
	swept := make(chan struct{})
	go func() {
		defer close(swept)
		o.sweepForStatus(ctx, chain)
	}()
	answer := o.health(ctx, chain)
	select {
	case <-swept:
	case <-ctx.Done():
	}
	if answer == nil {
		answer = o.poolStatus(chain)
	}
	return answer
}

// health looks for all that an ADD needs.
func (o *op) health(ctx context.Context, chain *Chain) error {
	var missing []string
	var failures []*failure
	var journalErr error
	var looking sync.WaitGroup
	looking.Go(func() {
		if missing = o.missing(ctx, chain); len(missing) == 0 {
			failures = o.passOn(ctx, chain, "STATUS")
		}
	})
	looking.Go(func() { journalErr = o.probe(ctx) })
	looking.Wait()
	for _, f := range failures {
		if f.killed && ctx.Err() != nil { // it hung, and has given no code
			f.code = errNotAvailable
		}
	}
	switch {
	case len(missing) > 0:
		_, err := findPlugin(missing[0], o.args.Path)
		return notAvailable("unwind: "+err.Error(), strings.Join(missing, ", "))
	case len(failures) > 0:
		// The one that says most comes first.
		f := slices.MaxFunc(failures, func(a, b *failure) int { return cmp.Compare(severity(a), severity(b)) })
		return cniError(f.code, f.Error(), f.details)
	case journalErr != nil && o.conf.OnJournalFailure == "fail":
		return notAvailable("unwind: "+journalErr.Error()+` (onJournalFailure is "fail")`, "")
	case journalErr != nil:
		o.log.Warn("the journal cannot be used; ADDs go on without it, and a crash or a DEL that fails leaks", "err", journalErr)
	}
	return nil
}

func notAvailable(msg, details string) *types.Error { return cniError(errNotAvailable, msg, details) }

// severity orders failures of STATUS.
func severity(f *failure) int {
	if f.code == errLimitedConnectivity || f.code == errNotAvailable {
		return int(f.code)
	}
	return 0
}

// missing looks for the binaries of the chain, for a second: an upgrade may be just exchanging one.
func (o *op) missing(ctx context.Context, chain *Chain) (missing []string) {
	for end := time.Now().Add(time.Second); ; time.Sleep(50 * time.Millisecond) {
		missing = chain.Missing(o.args.Path)
		if len(missing) == 0 || time.Now().After(end) || ctx.Err() != nil {
			return missing
		}
	}
}

// probe begins a transaction and writes nothing. That others use the journal just now is no error.
func (o *op) probe(ctx context.Context) error {
	errDone := errors.New("done")
	err := o.store.Update(ctx, func(*journal.Tx) error { return errDone })
	if errors.Is(err, errDone) || errors.Is(err, journal.ErrBusy) {
		return nil
	}
	return err
}

// sweepForStatus sweeps if it is to. What goes wrong with it is no business of the runtime's.
func (o *op) sweepForStatus(ctx context.Context, chain *Chain) {
	if !o.conf.SweepOnStatus {
		return
	}
	worker := *o
	err := o.safely(func() error {
		_, err := (&sweeping{op: &worker, Sweep: Sweep{Pools: chain.Pools(o.conf)}}).run(ctx)
		return err
	})
	if err != nil {
		o.log.Warn("sweep", "err", err)
	}
}

// poolStatus says whether a pool of host-local has an address left, if the runtime is to know: it then stops all pods of
// the node, also those that run.
func (o *op) poolStatus(chain *Chain) error {
	if o.conf.StatusOnPoolFull != "fail" {
		return nil
	}
	for _, pool := range chain.Pools(o.conf) {
		if pool.full(o) {
			return notAvailable(fmt.Sprintf("unwind: no address is left in %s; unwindctl ipam shows who has them", pool.Dir), "")
		}
	}
	return nil
}
