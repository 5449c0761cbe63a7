// Package sweep finds and releases dead attachments in the journal, and dead host-local
// reservations whose owners are not in the journal.
package sweep

import (
	"context"
	"errors"
	"slices"
	"time"

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
	Quick    bool // part of a STATUS or an ADD (see inFull)
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
	w    *undo.Worker
	last time.Time // end of the last sweep of all networks
}

// New returns a sweep that works with a fork of w.
func New(w *undo.Worker, job Job) *Sweep {
	w = w.Fork()
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
	findings, err := s.Plan(ctx)
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
		if s.inFull() {
			add(nil, s.w.Journal.Store.RemoveStrayLocks(ctx))
		}
	}
	for _, pool := range s.Pools {
		if s.inFull() || s.Network != "" {
			add(s.freeEmpty(ctx, pool))
		}
	}
	if err == nil && (len(findings) == 0 ||
		slices.ContainsFunc(findings, func(f Finding) bool { return f.Fate != decide.Unknown })) {
		s.noteEnd(ctx) // a sweep that cannot judge anything, such as in a container, does not count
	}
	if s.w.Node.Invoked || s.hasJournal() { // an operator's sweep does not create a journal
		s.w.Journal.Flush()
	}
	return findings, err
}

// inFull reports whether the sweep also checks lock files without an entry, and the pools of all
// networks. A Quick sweep checks them at most once a minute.
func (s *Sweep) inFull() bool { return !s.Quick || s.stale() }

// stale reports whether this sweep covers all networks, and the last such sweep ended at least a
// minute ago.
func (s *Sweep) stale() bool {
	age := time.Since(s.last)
	lately := age >= 0 && age < time.Minute // if s.last is in the future, the clock was wrong
	return s.Network == "" && s.Attachment == nil && !lately
}

// noteEnd stores the end of a sweep of all networks, at most once a minute: a STATUS comes every
// few seconds.
func (s *Sweep) noteEnd(ctx context.Context) {
	if s.DryRun || !s.stale() || ctx.Err() != nil || !s.hasJournal() { // a sweep creates no journal
		return
	}
	if err := s.w.Journal.Store.NoteSweep(); err != nil {
		s.w.Log.Debug("cannot record the time of the sweep", "err", err)
	}
}
