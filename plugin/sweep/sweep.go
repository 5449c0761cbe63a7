// Package sweep finds and releases dead attachments in the journal, and dead host-local
// reservations whose owners are not in the journal.
package sweep

import (
	"context"
	"errors"
	"slices"
	"time"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/undo"
)

// Job configures a sweep.
type Job struct {
	Network    string       // only this network; "" for all
	Attachment *journal.Key // only this attachment; nil for all
	List       *facts.List  // the runtime's list of attachments; nil if there is none
	Pools      []Pool       // host-local pools to compare with the journal
	Cache      bool         // also undo attachments that are only in libcni's cache
	Path       string       // CNI_PATH for attachments that are not in the journal
	DryRun     bool         // decide, but release nothing
	// GracePeriod, if not 0, replaces each network's grace period for this sweep.
	GracePeriod time.Duration
	// Force also releases attachments that the guard keeps (see MassReleaseError). Even if List is
	// empty, it releases attachments that are not in the journal.
	Force    bool
	Periodic bool // no runtime or person requested it: respect the backoff of DELs
	Quick    bool // part of an ADD, or behind a STATUS: log no warnings that each would repeat
	// Stops is set if the end of Run's context also ends the DELs that run.
	Stops bool
	// Progress, if set, is called after each attempt to release an attachment, by one goroutine at
	// a time.
	Progress func(done, of int)
}

// ErrNotTried means that the sweep was interrupted or out of time before it reached an attachment.
var ErrNotTried = errors.New("not attempted: out of time")

// Sweep is one running sweep. Its steps:
//
//  1. Plan: read the journal and judge every entry, without taking locks. Keep all live entries if
//     too many of them seem dead (see MassReleaseError).
//  2. Apply: release the dead attachments, the longest untouched first, some in parallel. Release
//     each under its lock, without waiting for the lock, and judge it again by its current entry.
//  3. Given the runtime's list, judge and release the attachments that are not in the journal, in
//     the same two steps (see undoOwner).
//  4. Release host-local addresses that have no owner at all.
type Sweep struct {
	Job
	w *undo.Worker
}

// New returns a sweep that works with a fork of w. If w has a snapshot of the journal, the sweep
// plans by it.
func New(w *undo.Worker, job Job) *Sweep {
	snapshot := w.Journal.Snapshot
	w = w.Fork()
	w.Journal.Snapshot = snapshot
	w.Node.List, w.Node.ListGrace = job.List, job.GracePeriod
	if job.Path != "" {
		w.Verb.Path = job.Path
	}
	w.ChainOf = job.chainOf
	return &Sweep{w: w, Job: job}
}

// chainOf returns the chain of a network in which unwind runs, from the network's pools. It returns
// nil if there is none, or two.
func (j Job) chainOf(network string) (chain *netconf.Chain, conf *netconf.Conf) {
	for _, p := range j.Pools {
		switch {
		case p.Network != network || p.Plain || p.chain == chain:
		case chain != nil:
			return nil, nil
		default:
			chain, conf = p.chain, p.conf
		}
	}
	return chain, conf
}

// Run sweeps the journal. It returns a finding for every attachment, and an error if the journal
// cannot be read or the mass-release guard kept attachments. It keeps an attachment whose ADD ran
// in other namespaces than this process, with the verdict Unknown.
func (s *Sweep) Run(ctx context.Context) ([]Finding, error) {
	findings, err := s.Plan(ctx, nil)
	var guarded *MassReleaseError
	if err != nil && !errors.As(err, &guarded) {
		return findings, err
	}
	add := func(more []Finding, moreErr error) {
		findings, err = append(findings, more...), errors.Join(err, moreErr)
	}
	if guarded == nil {
		add(s.planOwners(ctx))
	}
	if !s.DryRun {
		s.Apply(ctx, findings)
		if s.Network == "" {
			add(nil, s.w.Journal.Store.RemoveFreeLocks())
		}
	}
	for _, pool := range s.Pools {
		add(s.freeEmpty(ctx, pool))
	}
	if err == nil && !s.DryRun {
		s.noteEnd(ctx, findings)
	}
	if s.w.Node.Invoked || s.hasJournal() { // an operator's sweep does not create a journal
		s.w.Journal.Flush()
	}
	return findings, err
}

// Due reports whether a sweep would release something now. It releases nothing. If nothing is due,
// it counts as a sweep (see noteEnd).
func (s *Sweep) Due(ctx context.Context) (due bool, err error) {
	findings, err := s.Plan(ctx, func(f *Finding) bool { return f.ready() && !f.guarded() })
	due = slices.ContainsFunc(findings, func(f Finding) bool { return f.ready() })
	for _, pool := range s.Pools {
		if due || err != nil {
			break
		}
		var empty []ipam.Reservation
		empty, err = s.findEmpty(ctx, pool)
		due = len(empty) > 0
	}
	if !due && err == nil {
		s.noteEnd(ctx, findings)
	}
	return due, err
}

// noteEnd stores the end of a sweep of all networks, at most once a minute: a STATUS comes every
// few seconds. A sweep that can judge nothing, such as one in a container, does not count.
func (s *Sweep) noteEnd(ctx context.Context, findings []Finding) {
	judged := len(findings) == 0 ||
		slices.ContainsFunc(findings, func(f Finding) bool { return f.Fate != decide.Unknown })
	age := time.Since(s.w.Journal.Store.LastSweep())
	lately := age >= 0 && age < time.Minute // a time in the future means that the clock was wrong
	if !judged || lately || s.Network != "" || s.Attachment != nil || ctx.Err() != nil ||
		!s.hasJournal() { // a sweep creates no journal
		return
	}
	if err := s.w.Journal.Store.NoteSweep(); err != nil {
		s.w.Log.Debug("cannot record the time of the sweep", "err", err)
	}
}
