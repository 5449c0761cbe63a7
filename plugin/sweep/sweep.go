// Package sweep finds the dead attachments of the journal, and what host-local keeps for unknown
// owners, and releases them.
package sweep

import (
	"context"
	"errors"
	"slices"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/record"
	"cni-unwind/plugin/undo"
)

// Job says what a sweep searches.
type Job struct {
	Network    string       // only this network; "" for all
	Attachment *journal.Key // only this attachment; nil for all
	List       *alive.List  // the runtime's list of attachments; nil if there is none
	Pools      []Pool       // pools of host-local to compare with the journal
	Cache      bool         // undo also what libcni's cache has and the journal does not; needs a List
	Path       string       // CNI_PATH for that
	DryRun     bool         // decide, but release nothing
	Force      bool         // release also what the guard keeps, see MassReleaseError
	Periodic   bool         // neither the runtime nor a person asked: keep the pauses between DELs
	Quick      bool         // within a STATUS or an ADD: no time for all pools and lock files
	// Progress, if set, is called after each attachment that was tried, by one goroutine at a time.
	Progress func(done, of int)
}

// ErrNotTried means that the sweep was interrupted, or its time was over, before it came to an
// attachment.
var ErrNotTried = errors.New("not attempted: out of time")

// Sweep is one running sweep.
//
//  1. Plan: read the journal and judge every entry, without taking locks. Keep the entries if too
//     many live ones would go: see MassReleaseError.
//  2. Apply: release the dead ones, those longest untouched first, some in parallel. Each is
//     released under its lock, without waiting for it, and judged again by what the journal says
//     then. Then release those whose DELs were parked for an attachment that is released now.
//  3. With the journal's, judge and release the attachments that libcni's cache alone has: see
//     planCached.
//  4. Compare the pools of host-local with what the journal says after that.
//  5. Name what else the dead have left: see addLeft.
type Sweep struct {
	Job
	w    *undo.Worker
	last uint64 // end of the last sweep of all networks, in Unix seconds
}

// New returns a sweep by a worker like w.
func New(w *undo.Worker, job Job) *Sweep {
	w = w.Fork()
	w.Node.List = job.List
	if job.Path != "" {
		w.Verb.Path = job.Path
	}
	return &Sweep{w: w, Job: job}
}

// Run sweeps the journal. It returns a finding for every attachment, and an error if the journal
// could not be read or the mass-release guard kept something. It judges by what this process sees
// in the namespaces of the ADDs: from other namespaces an attachment is Unknown, and kept.
func (s *Sweep) Run(ctx context.Context) ([]Finding, error) {
	findings, err := s.Plan(ctx)
	var guarded *MassReleaseError
	if err != nil && !errors.As(err, &guarded) {
		return findings, err
	}
	if guarded == nil {
		cached, cacheErr := s.planCached(ctx)
		findings, err = append(findings, cached...), errors.Join(err, cacheErr)
	}
	if !s.DryRun {
		s.Apply(ctx, findings)
		if !s.Quick || s.stale() {
			err = errors.Join(err, s.w.Journal.Store.RemoveStrayLocks(ctx))
		}
	}
	if guarded != nil {
		s.w.Node.List = nil // the list is not to be trusted
	}
	for _, pool := range s.Pools {
		if s.Quick && !pool.Full(s.w.Log) {
			continue
		}
		more, poolErr := s.reconcile(ctx, pool, findings)
		findings, err = append(findings, more...), errors.Join(err, poolErr)
	}
	findings, leftErr := s.addLeft(ctx, findings)
	err = errors.Join(err, leftErr)
	if err == nil && (len(findings) == 0 ||
		slices.ContainsFunc(findings, func(f Finding) bool { return f.Fate != alive.Unknown })) {
		s.noteEnd(ctx) // a sweep that can tell nothing, as from a container, does not count
	}
	if s.w.Node.Invoked || s.hasJournal() { // a person's sweep creates none for its history
		s.w.Journal.Flush(ctx)
	}
	return findings, err
}

// stale says whether this sweep covers all networks and the last such one ended a minute ago or
// more.
func (s *Sweep) stale() bool {
	now := uint64(time.Now().Unix())
	lately := s.last <= now && now-s.last < 60 // a later s.last is of a clock that was wrong then
	return s.Network == "" && s.Attachment == nil && !lately
}

// noteEnd stores the end of a sweep of all networks, at most once a minute: a STATUS comes every
// few seconds.
func (s *Sweep) noteEnd(ctx context.Context) {
	if s.DryRun || !s.stale() || ctx.Err() != nil {
		return
	}
	if !s.hasJournal() { // do not create one for this
		return
	}
	if err := s.w.Journal.Update(ctx, func(tx *journal.Tx) error {
		return tx.SetCounter(uint64(time.Now().Unix()), record.LastSweep)
	}); err != nil {
		s.w.Log.Debug("cannot record the time of the sweep", "err", err)
	}
}
