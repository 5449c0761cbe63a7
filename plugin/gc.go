package plugin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/internal/delegate"
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
	chain, err := o.conf.LoadChain()
	if err != nil {
		return badConfig(err)
	}
	if o.conf.DisableGC || chain.DisableGC {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, o.Budgets.GC)
	defer cancel()
	failures, believed := o.sweepForGC(ctx, chain)
	if believed {
		failures = append(failures, o.passOn(ctx, chain, "GC")...)
	}
	return gcError(failures)
}

// sweepForGC sweeps in at most two thirds of the time; the delegates have the rest. It reports
// whether the list can be trusted.
func (o *op) sweepForGC(
	ctx context.Context, chain *netconf.Chain,
) (failures []*delegate.Failure, believed bool) {
	ctx, cancel := context.WithTimeout(ctx, o.Budgets.GC*2/3)
	defer cancel()
	job := sweep.Job{Pools: sweep.PoolsOf(chain, o.conf)}
	if o.conf.Valid != nil {
		job.List = alive.NewList(o.conf.Name, o.conf.Valid)
	}
	findings, err := sweep.New(o.w, job).Run(ctx)
	if err != nil {
		failures = append(failures,
			&delegate.Failure{Plugin: netconf.Name, Command: "GC", Code: types.ErrTryAgainLater,
				Msg: err.Error()})
	}
	var guarded *sweep.MassReleaseError
	believed = !errors.As(err, &guarded)
	for _, f := range findings {
		if f.Err == nil || errors.As(f.Err, &guarded) {
			continue
		}
		failure := &delegate.Failure{Plugin: netconf.Name, Command: "GC", Code: types.ErrTryAgainLater,
			Msg: fmt.Sprintf("%s: %v", f.Key, f.Err)}
		failures = append(failures, failure)
	}
	return failures, believed
}

// passOn runs STATUS or GC of all delegates in parallel, if the chain's version has these verbs.
// The plain chain would not call them otherwise.
func (o *op) passOn(ctx context.Context, chain *netconf.Chain, command string) []*delegate.Failure {
	if has, err := version.GreaterThanOrEqualTo(chain.CNIVersion, "1.1.0"); err != nil || !has {
		return nil
	}
	if command == "GC" && o.conf.Valid == nil {
		o.log.Debug("GC not passed on: the runtime gave no list", "network", o.conf.Name)
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
			_, failures[i] = o.w.Runner.Run(ctx, c, nil, o.Stderr)
		})
	}
	running.Wait()
	var failed []*delegate.Failure
	for _, f := range failures {
		if f != nil {
			failed = append(failed, f)
		}
	}
	return failed
}

// gcError joins all failures into one error.
func gcError(failures []*delegate.Failure) error {
	if len(failures) == 0 {
		return nil
	}
	var words []string
	for _, f := range failures {
		if f.Plugin == netconf.Name {
			words = append(words, f.Msg)
		} else {
			words = append(words, f.Error())
		}
	}
	return cniError(failures[0].Code,
		fmt.Sprintf("unwind: GC incomplete, %d failed: %s", len(failures), strings.Join(words, "; ")), "")
}
