// Package sweep finds and releases dead attachments in the journal, and dead host-local
// reservations whose owners are not in the journal.
package sweep

import (
	"cmp"
	"context"
	"errors"
	"reflect"
	"runtime"
	"slices"
	"sync"
	"time"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/undo"
)

// Options configures a sweep.
type Options struct {
	Network    string       // only this network; "" for all
	Attachment *journal.Key // only this attachment; nil for all
	List       *facts.List  // the runtime's list of attachments; nil if there is none
	Pools      []Pool       // host-local pools to compare with the journal
	Networks   []Network    // networks whose chains unwind runs, except the verb's own network
	Cache      bool         // for a command: also undo attachments that are only in libcni's cache
	Path       string       // CNI_PATH for attachments that are not in the journal
	DryRun     bool         // decide, but release nothing
	// GracePeriod, if not 0, replaces each network's grace period for this sweep.
	GracePeriod time.Duration
	// Force releases even attachments that the guard keeps (see MassReleaseError). It releases
	// attachments that are not in the journal even if List is empty or a record is damaged.
	Force    bool
	Periodic bool // no runtime or person requested it: respect the pauses of DELs
	Quick    bool // part of an ADD or a STATUS: don't repeat warnings each time
	// Stops kills the DELs in progress when Run's context is canceled. Without Stops, they go on.
	Stops bool
	// Progress, if set, is called after each attempt to release an attachment, by one goroutine at
	// a time.
	Progress func(done, of int)
}

// ErrNotTried means that the sweep was interrupted or out of time before it reached an attachment.
var ErrNotTried = errors.New("not attempted: interrupted or out of time")

// Sweep is one running sweep. Its steps:
//
//  1. Plan: read the journal and judge every record, without acquiring locks. If too many records
//     in state live seem dead, keep them (see MassReleaseError).
//  2. Apply: release the dead attachments, the least recently changed first, some in parallel. Lock
//     each, and judge it again by its current record. Skip those that another process has locked.
//  3. Judge and release the attachments that are not in the journal, in the same two steps (see
//     undoOwner). Without the runtime's list, release none.
//  4. Release host-local addresses that have no owner at all.
type Sweep struct {
	Options
	w *undo.Worker
}

// New returns a sweep that uses a copy of a worker, with the same recorder.
func New(own *undo.Worker, opts Options) *Sweep {
	worker, node := *own, *own.Node
	w := &worker
	w.Node = &node
	node.List, node.ListGrace = opts.List, opts.GracePeriod
	if opts.Path != "" {
		w.Verb.Path = opts.Path
	}
	w.ChainOf = opts.chainOf
	return &Sweep{w: w, Options: opts}
}

// chainOf returns the chain that unwind runs for a network. It returns nil if there is none, or if
// two files of the network, such as those of two runtimes, contain different chains.
func (o Options) chainOf(network string) (chain *netconf.Chain, conf *netconf.Conf) {
	for _, n := range o.Networks {
		switch {
		case n.Conf.Name != network:
		case chain != nil && !reflect.DeepEqual(chain, n.Chain):
			return nil, nil
		default:
			chain, conf = n.Chain, n.Conf
		}
	}
	return chain, conf
}

// Run sweeps the journal. It returns a finding for every attachment, and an error if the journal
// cannot be read or the mass-release guard kept attachments. An attachment whose ADD ran in other
// namespaces than this process is kept. Its verdict is Unknown.
func (s *Sweep) Run(ctx context.Context) ([]Finding, error) {
	findings, planErr := s.Plan(ctx)
	var guarded *MassReleaseError
	if planErr != nil && !errors.As(planErr, &guarded) {
		return findings, planErr
	}
	var err error
	add := func(more []Finding, moreErr error) {
		findings, err = append(findings, more...), errors.Join(err, moreErr)
	}
	switch fresh := guarded != nil && guarded.Fresh; {
	case !fresh:
		add(s.planOwners(ctx))
	case !s.DryRun:
		add(nil, s.noteGuarded(ctx, findings))
	}
	if !s.DryRun {
		s.Apply(ctx, findings)
		s.w.Node.Journal.Invalidate()
		if s.Network == "" {
			add(nil, s.w.Node.Journal.Store.RemoveFreeLocks())
		}
	}
	for _, pool := range s.Pools {
		add(s.freeEmpty(ctx, pool))
	}
	if err == nil && !s.DryRun && (guarded == nil || !guarded.Fresh) {
		s.noteEnd(ctx, findings)
	}
	s.w.Node.Journal.Flush()
	return findings, errors.Join(planErr, err)
}

// Due reports from the worker's snapshot whether a sweep would release something now. It releases
// nothing. If nothing is due, the call counts as a sweep (see noteEnd).
func (s *Sweep) Due(ctx context.Context) (due bool, err error) {
	findings, err := s.plan(ctx, func(f *Finding) bool { return f.ready() && !f.counts })
	var guarded *MassReleaseError
	if errors.As(err, &guarded) { // if Fresh is set, Run must record which attachments are kept
		due, err = guarded.Fresh, nil
	}
	due = due || slices.ContainsFunc(findings, func(f Finding) bool { return f.ready() })
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

// noteEnd stores the time at which a sweep of all networks ended. It does so at most once a minute,
// because a STATUS comes every few seconds. It stores no time for a sweep that could not judge any
// attachment in the journal, for example because the sweep ran in a container.
func (s *Sweep) noteEnd(ctx context.Context, findings []Finding) {
	unknown, judged := false, false
	for _, f := range findings {
		unknown = unknown || f.Verdict == decide.Unknown && len(f.Addresses) == 0
		judged = judged || f.Verdict != decide.Unknown
	}
	age := time.Since(s.w.Node.Journal.Store.LastSweep())
	lately := age >= 0 && age < time.Minute // a time in the future means that the clock was wrong
	if unknown && !judged || lately || s.Network != "" || s.Attachment != nil || ctx.Err() != nil ||
		!s.hasJournal() { // a sweep creates no journal
		return
	}
	if err := s.w.Node.Journal.Store.NoteSweep(); err != nil {
		s.w.Node.Log.Debug("cannot record the time of the sweep", "err", err)
	}
}

// maxFailing limits how many attachments a periodic sweep tries to release although all their DELs
// have failed before.
const maxFailing = 20

// Apply releases the dead attachments that are ready: first those with a DEL that has not failed
// yet, and then the others, those with the fewest tries first.
func (s *Sweep) Apply(ctx context.Context, findings []Finding) {
	var ready, failing []*Finding
	for i := range findings {
		switch f := &findings[i]; {
		case !f.ready():
		case f.failed == 0:
			ready = append(ready, f)
		default:
			failing = append(failing, f)
		}
	}
	slices.SortStableFunc(failing, func(a, b *Finding) int {
		return cmp.Compare(a.failed, b.failed)
	})
	if s.Periodic && len(failing) > maxFailing {
		for _, f := range failing[maxFailing:] {
			f.Deferred = true
		}
		failing = failing[:maxFailing]
	}
	s.releaseEach(ctx, append(ready, failing...))
}

// releaseEach releases attachments, in parallel.
func (s *Sweep) releaseEach(ctx context.Context, ready []*Finding) {
	work := make(chan *Finding)
	var workers sync.WaitGroup
	var mu sync.Mutex
	tried := 0
	for range min(8, 2*runtime.NumCPU(), len(ready)) {
		w := s.w.Fork()
		workers.Go(func() {
			for f := range work {
				if err := w.Safely(func() error { return s.release(ctx, w, f) }); err != nil {
					f.Err = err
				}
				if s.Progress != nil && !errors.Is(f.Err, ErrNotTried) {
					mu.Lock()
					tried++
					s.Progress(tried, len(ready))
					mu.Unlock()
				}
			}
		})
	}
	for _, f := range ready {
		work <- f
	}
	close(work)
	workers.Wait()
}

// release releases one attachment, if no other unwind process owns its lock and time remains.
// A signal interrupts the release only if Stops is set, because a killed DEL stays pending.
func (s *Sweep) release(ctx context.Context, w *undo.Worker, f *Finding) error {
	if ctx.Err() != nil {
		return ErrNotTried
	}
	end := time.Now().Add(w.Env.Budgets.Undo)
	if deadline, ok := ctx.Deadline(); ok && deadline.Before(end) {
		end = deadline
	}
	if !s.Stops {
		ctx = context.WithoutCancel(ctx)
	}
	ctx, cancel := context.WithDeadline(ctx, end)
	defer cancel()
	lock, err := w.Node.Journal.Store.Acquire(ctx, f.Key,
		journal.Patience{Children: w.Env.Budgets.Children, SkipOwned: true})
	switch {
	case errors.Is(err, journal.ErrBusy): // another unwind process holds the lock
		f.Judgment, f.Busy = decide.Locked, true
		return nil
	case err != nil:
		return err
	}
	defer lock.Release()
	if f.owner != nil {
		return s.undoOwner(ctx, w, f, lock)
	}
	out := w.ReleaseLocked(ctx, lock, f.Key)
	if e := out.Record; e != nil {
		f.Pod, f.State, f.Judgment = e.Added.Pod, out.State, out.Judgment
		f.Pending = undo.PendingSteps(e)
	}
	f.Released = out.Released
	return out.Err
}
