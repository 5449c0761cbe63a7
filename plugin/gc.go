package plugin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"cni-unwind/journal"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/sweep"
)

// gc releases the attachments that no longer exist (SPEC 1.1 §2 GC):
//
//  1. Sweep the GC's own network, by the runtime's list of valid attachments and by evidence on the
//     node (see decide.Evidence). Sweep all other networks by evidence alone: the old name of a
//     renamed network never gets a GC again. In those networks, a failure is only logged.
//  2. If the chain's CNI version has GC, run it on all delegates. They get the runtime's list, and
//     the attachments that unwind keeps (see listKept). Skip this step if the list cannot be
//     trusted (see sweep.MassReleaseError) or a record is damaged.
//
// gc continues after an error, and returns the errors of its own network.
//
// Without a list, or with null (cnitool, ocicni), nothing says which attachments are valid. gc does
// not pass such a GC to the delegates, because a delegate that treats an absent list as an empty
// one would release everything.
func (o *op) gc(ctx context.Context) error {
	if o.bad != nil {
		return badConfig(o.bad)
	}
	chain, err := o.Verb.Chain()
	if err != nil {
		return badConfig(err)
	}
	if o.Verb.Conf.DisableGC || chain.DisableGC {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, o.Env.Budgets.GC)
	defer cancel()
	errs, believed := o.sweepForGC(ctx, chain)
	code := types.ErrTryAgainLater
	if believed && o.Verb.Conf.Valid != nil {
		lists, err := o.listKept(ctx)
		if err != nil {
			errs = append(errs, err)
		} else {
			for _, f := range o.passOn(ctx, chain, "GC", lists) {
				if len(errs) == 0 {
					code = f.Code
				}
				errs = append(errs, f)
			}
		}
	}
	// without a journal, sweepForGC and listKept return the same error
	errs = slices.CompactFunc(errs, func(a, b error) bool { return a.Error() == b.Error() })
	switch len(errs) {
	case 0:
		return nil
	case 1:
		return ownError(code, "GC incomplete with 1 error: %v", errs[0])
	}
	return ownError(code, "GC incomplete with %d errors: %v", len(errs), errors.Join(errs...))
}

// sweepForGC sweeps in at most two thirds of the GC's time, and leaves the rest for the delegates.
// believed reports whether the list can be trusted.
func (o *op) sweepForGC(
	ctx context.Context, chain *netconf.Chain,
) (errs []error, believed bool) {
	ctx, cancel := context.WithTimeout(ctx, o.Env.Budgets.GC*2/3)
	defer cancel()
	opts := sweep.Options{Pools: sweep.PoolsOf(chain, o.Verb.Conf)}
	if o.Verb.Conf.Valid != nil {
		opts.List = facts.NewList(o.Verb.Conf.Name, o.Verb.Conf.Valid)
	}
	findings, err := sweep.New(o.Worker, opts).Run(ctx)
	var guarded *sweep.MassReleaseError
	believed = !errors.As(err, &guarded) || !guarded.Fresh
	switch {
	case !believed || err != nil && guarded == nil:
		errs = append(errs, err)
	case err != nil:
		o.log.Warn("keeping attachments that seem dead", "why", err)
	}
	for _, f := range findings {
		var failure *delegate.Failure
		unreported := errors.As(f.Err, &failure) && failure.Unreported
		switch {
		case f.Err == nil, unreported, errors.As(f.Err, &guarded):
		case f.Key.Network != o.Verb.Conf.Name:
			o.log.Warn("cannot release an attachment of another network", "attachment", f.Key.String(),
				"err", f.Err)
		default:
			errs = append(errs, fmt.Errorf("%s: %w", f.Key, f.Err))
		}
	}
	return errs, believed
}

// sweepBriefly calls run with a sweep that serves an ADD or a STATUS. It logs the sweep's error,
// which is no reason for that verb to fail.
func (o *op) sweepBriefly(opts sweep.Options, run func(*sweep.Sweep) error) error {
	opts.Periodic, opts.Quick = true, true
	err := o.Safely(func() error { return run(sweep.New(o.Worker, opts)) })
	if err != nil {
		o.log.Warn("the sweep failed; the next one tries again", "err", err)
	}
	return err
}

// listKept returns the runtime's list of valid attachments, extended by all attachments of the
// network that are in the journal. The map has the keys under which the runtime sent the list. A
// delegate may release whatever is not on the list (host-local since 1.10). The runtime's list may
// lack a pod that is starting, and it lacks a dead pod whose DELs are pending.
func (o *op) listKept(ctx context.Context) (map[string]json.RawMessage, error) {
	var kept []json.RawMessage
	err := o.Node.Journal.Store.View(ctx, func(tx *journal.Tx) error {
		kept = nil
		// a damaged record is an error, because it may belong to any attachment
		return tx.Outlines(func(e journal.Outline, err error) error {
			a := netconf.Attachment{ContainerID: e.ContainerID, IfName: e.IfName}
			if e.Network == o.Verb.Conf.Name && !slices.Contains(o.Verb.Conf.Valid, a) {
				kept = append(kept, netconf.Marshal(a))
			}
			return err
		})
	})
	if err != nil || len(kept) == 0 {
		return o.Verb.Conf.ValidRaw, err
	}
	lists := map[string]json.RawMessage{}
	for key, raw := range o.Verb.Conf.ValidRaw {
		var list []json.RawMessage
		if err := json.Unmarshal(raw, &list); err != nil {
			return nil, err
		}
		lists[key] = netconf.Marshal(append(list, kept...))
	}
	return lists, nil
}

// hasStatus reports whether the chain's CNI version has STATUS and GC. A runtime does not call
// these verbs on a chain of an older version.
func hasStatus(chain *netconf.Chain) bool {
	has, err := version.GreaterThanOrEqualTo(chain.CNIVersion, "1.1.0")
	return err == nil && has
}

// passOn runs STATUS or GC of all delegates in parallel, if the chain has these verbs. The
// delegates get the given keys in addition to their configurations.
func (o *op) passOn(
	ctx context.Context, chain *netconf.Chain, command string, keys map[string]json.RawMessage,
) []*delegate.Failure {
	if !hasStatus(chain) {
		return nil
	}
	failures := make([]*delegate.Failure, len(chain.Delegates))
	var running sync.WaitGroup
	for i, d := range chain.Delegates {
		config := netconf.ObjectOf(chain.Config(i, o.Verb.Conf))
		maps.Copy(config, keys)
		c := &delegate.Call{Command: command, Plugin: d.Type, Path: o.args.Path,
			Stdin: netconf.Marshal(config)}
		running.Go(func() {
			_, failures[i] = o.Env.Runner.Run(ctx, c, o.Env.Stderr)
		})
	}
	running.Wait()
	return slices.DeleteFunc(failures, func(f *delegate.Failure) bool { return f == nil })
}
