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
)

// gc releases what the runtime forgot (SPEC 1.1 §2 GC): in its own network by the runtime's list and by evidence, in all
// others by evidence, since a network that was renamed never gets a GC again. Then the delegates that know the verb get
// it, with the list as the runtime gave it, unless it is not to be believed (see BrakeError). All are tried, all errors are
// collected.
//
// A GC without a list, or with null (cnitool, ocicni), names nothing that could be released. It is not passed on: a delegate
// that takes an absent list for an empty one would release everything.
func (o *op) gc() error {
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
	ctx, cancel := context.WithTimeout(o.ctx, o.Budgets.GC)
	defer cancel()
	failures, believed := o.sweepForGC(ctx, chain)
	if believed {
		failures = append(failures, o.passOn(ctx, chain, "GC")...)
	}
	return gcError(failures)
}

// sweepForGC takes at most two thirds of the time, the delegates have the rest. It says whether the list is to be believed.
func (o *op) sweepForGC(ctx context.Context, chain *Chain) (failures []*failure, believed bool) {
	ctx, cancel := context.WithTimeout(ctx, o.Budgets.GC*2/3)
	defer cancel()
	s := &sweeping{op: o, Sweep: Sweep{Pools: chain.Pools(o.conf)}, eager: true}
	if o.conf.Valid != nil {
		s.List = NewList(o.conf.Name, o.conf.Valid)
	}
	findings, err := s.run(ctx)
	if err != nil {
		failures = append(failures, &failure{plugin: Name, command: "GC", code: types.ErrTryAgainLater, msg: err.Error()})
	}
	var brake *BrakeError
	believed = !errors.As(err, &brake)
	for _, f := range findings {
		if f.Err == nil || errors.As(f.Err, &brake) {
			continue
		}
		failure := &failure{plugin: Name, command: "GC", code: types.ErrTryAgainLater, msg: fmt.Sprintf("%s: %v", f.Key, f.Err)}
		failures = append(failures, failure)
	}
	return failures, believed
}

// passOn runs STATUS or GC of all delegates at once, if the chain is of a version that has these verbs: what the plain
// chain would not ask is not asked.
func (o *op) passOn(ctx context.Context, chain *Chain, command string) []*failure {
	if has, err := version.GreaterThanOrEqualTo(chain.CNIVersion, "1.1.0"); err != nil || !has {
		return nil
	}
	if command == "GC" && o.conf.Valid == nil {
		o.log.Debug("the GC is not passed on: it has no list", "network", o.conf.Name)
		return nil
	}
	failures := make([]*failure, len(chain.Delegates))
	var running sync.WaitGroup
	for i, d := range chain.Delegates {
		config := objectOf(chain.Config(i, o.conf))
		if command == "GC" {
			maps.Copy(config, o.conf.ValidRaw)
		}
		c := &call{command: command, plugin: d.Type, path: o.args.Path, stdin: marshal(config)}
		running.Go(func() {
			_, failures[i] = c.run(ctx, o.Stderr)
		})
	}
	running.Wait()
	var failed []*failure
	for _, f := range failures {
		if f != nil {
			failed = append(failed, f)
		}
	}
	return failed
}

// gcError makes one error out of all.
func gcError(failures []*failure) error {
	if len(failures) == 0 {
		return nil
	}
	var words []string
	for _, f := range failures {
		if f.plugin == Name {
			words = append(words, f.msg)
		} else {
			words = append(words, f.Error())
		}
	}
	return cniError(failures[0].code, fmt.Sprintf("unwind: GC incomplete, %d failed: %s", len(failures), strings.Join(words, "; ")), "")
}
