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

// gc releases attachments that the runtime forgot (SPEC 1.1 §2 GC). In its own network it uses the
// runtime's list and evidence; in all others only evidence, because a renamed network never gets a
// GC again. Then it passes the GC, with the runtime's list, to the delegates that support the verb,
// unless the list cannot be trusted (see sweep.MassReleaseError). It runs all delegates and
// collects all errors.
//
// A GC without a list, or with null (cnitool, ocicni), names nothing to release. gc does not pass
// it on: a delegate that treats an absent list as an empty one would release everything.
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
	return ownError(code, "GC incomplete, %d failed: %v", len(errs), errors.Join(errs...))
}

// sweepForGC sweeps in at most two thirds of the time; the delegates have the rest. It reports
// whether the list can be trusted.
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

// sweepBriefly sweeps a network, or all, within a verb whose outcome does not depend on it.
func (o *op) sweepBriefly(ctx context.Context, network string, chain *netconf.Chain) {
	job := sweep.Job{Network: network, Pools: sweep.PoolsOf(chain, o.conf),
		Periodic: true, Quick: true}
	err := o.w.Safely(func() error {
		_, err := sweep.New(o.w, job).Run(ctx)
		return err
	})
	if err != nil {
		o.log.Warn("sweep failed", "err", err)
	}
}

// passOn runs STATUS or GC of all delegates in parallel, if the chain's version has these verbs.
// The plain chain would not call them otherwise.
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
