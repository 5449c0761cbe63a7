package plugin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/sweep"
)

// gc releases attachments that the runtime forgot (SPEC 1.1 §2 GC). In its own network, it uses the
// runtime's list of valid attachments and evidence. It also sweeps all other networks, by evidence
// alone, because a renamed network never gets a GC again. Then gc passes the GC, with the list, to
// the delegates that support the verb, unless the list cannot be trusted (see
// sweep.MassReleaseError). It runs all delegates and collects all errors.
//
// A GC without a list, or with null (cnitool, ocicni), says nothing about which attachments are
// valid. gc does not pass it on, because a delegate that treats an absent list as an empty one
// would release everything.
func (o *op) gc(ctx context.Context) error {
	if o.bad != nil {
		return badConfig(o.bad)
	}
	chain, err := o.w.Verb.Chain()
	if err != nil {
		return badConfig(err)
	}
	if o.conf.DisableGC || chain.DisableGC {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, o.Budgets.GC)
	defer cancel()
	errs, believed := o.sweepForGC(ctx, chain)
	code := types.ErrTryAgainLater
	if believed {
		for _, f := range o.passOn(ctx, chain, "GC") {
			if len(errs) == 0 {
				code = f.Code
			}
			errs = append(errs, f)
		}
	}
	if len(errs) == 0 {
		return nil
	}
	noun := "errors"
	if len(errs) == 1 {
		noun = "error"
	}
	return ownError(code, "GC incomplete with %d %s: %v", len(errs), noun, errors.Join(errs...))
}

// sweepForGC sweeps in at most two thirds of GC's time, and leaves the rest to the delegates. It
// reports whether the list can be trusted.
func (o *op) sweepForGC(
	ctx context.Context, chain *netconf.Chain,
) (errs []error, believed bool) {
	ctx, cancel := context.WithTimeout(ctx, o.Budgets.GC*2/3)
	defer cancel()
	job := sweep.Job{Pools: sweep.PoolsOf(chain, o.conf)}
	if o.conf.Valid != nil {
		job.List = facts.NewList(o.conf.Name, o.conf.Valid)
	}
	findings, err := sweep.New(o.w, job).Run(ctx)
	if err != nil {
		errs = append(errs, err)
	}
	var guarded *sweep.MassReleaseError
	believed = !errors.As(err, &guarded)
	for _, f := range findings {
		if f.Err != nil && !errors.As(f.Err, &guarded) {
			errs = append(errs, fmt.Errorf("%s: %w", f.Key, f.Err))
		}
	}
	return errs, believed
}

// sweepBriefly sweeps one network within an ADD. An error of the sweep does not fail the ADD.
func (o *op) sweepBriefly(ctx context.Context, network string, chain *netconf.Chain) {
	job := sweep.Job{Network: network, Pools: sweep.PoolsOf(chain, o.conf),
		Periodic: true, Quick: true}
	err := o.w.Safely(func() error {
		_, err := sweep.New(o.w, job).Run(ctx)
		return err
	})
	if err != nil {
		o.log.Warn("the sweep failed; the next sweep retries it", "err", err)
	}
}

// passOn runs STATUS or GC of all delegates in parallel, if the chain's CNI version has these
// verbs. Without unwind, the runtime would not call them in an older version either.
func (o *op) passOn(ctx context.Context, chain *netconf.Chain, command string) []*delegate.Failure {
	if has, err := version.GreaterThanOrEqualTo(chain.CNIVersion, "1.1.0"); err != nil || !has {
		return nil
	}
	if command == "GC" && o.conf.Valid == nil {
		o.log.Debug("GC not forwarded to the plugins: the runtime sent no list", "network", o.conf.Name)
		return nil
	}
	failures := make([]*delegate.Failure, len(chain.Delegates))
	var running sync.WaitGroup
	for i, d := range chain.Delegates {
		config := netconf.ObjectOf(chain.Config(i, o.conf))
		if command == "GC" {
			maps.Copy(config, o.conf.ValidRaw)
		}
		c := &delegate.Call{Command: command, Plugin: d.Type, Path: o.args.Path,
			Stdin: netconf.Marshal(config)}
		running.Go(func() {
			_, failures[i] = o.w.Runner.Run(ctx, c, o.Stderr)
		})
	}
	running.Wait()
	return slices.DeleteFunc(failures, func(f *delegate.Failure) bool { return f == nil })
}
