package sweep

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/undo"
)

// Apply releases the dead attachments that are ready to retry. Then it releases those whose plugins
// work again, as this sweep has shown.
func (s *Sweep) Apply(ctx context.Context, findings []Finding) {
	if s.Periodic {
		deferFailing(findings)
	}
	works := s.releaseEach(ctx, findings, func(f *Finding) bool { return !f.Deferred })
	s.releaseEach(ctx, findings, func(f *Finding) bool {
		return f.Deferred &&
			slices.ContainsFunc(f.failing, func(plugin string) bool { return works[plugin] })
	})
}

// probes is the number of attachments that a sweep tries for each plugin whose DELs fail.
const probes = 3

// deferFailing defers most attachments whose pending DELs have all failed before. For each plugin
// with such a DEL, it leaves a few of these attachments to this sweep (see probes). It chooses
// those that were untried for longest, so each gets its turn.
func deferFailing(findings []Finding) {
	tries := map[string]int{}
	for i := range findings {
		f := &findings[i]
		if !f.Releasable() || f.Deferred || f.Err != nil || len(f.failing) == 0 {
			continue
		}
		f.Deferred = !slices.ContainsFunc(f.failing,
			func(plugin string) bool { return tries[plugin] < probes })
		for _, plugin := range f.failing {
			if !f.Deferred {
				tries[plugin]++
			}
		}
	}
}

// releaseEach releases the dead attachments that match, in parallel. It returns the plugins with a
// DEL that failed before and has succeeded now.
func (s *Sweep) releaseEach(
	ctx context.Context, findings []Finding, matches func(*Finding) bool,
) (works map[string]bool) {
	var ready []*Finding
	for i := range findings {
		f := &findings[i]
		if f.Releasable() && !f.Released && f.Err == nil && matches(f) {
			f.Deferred = false
			ready = append(ready, f)
		}
	}
	works = map[string]bool{}
	work := make(chan *Finding)
	var workers sync.WaitGroup
	var mu sync.Mutex
	tried := 0
	for range min(8, 2*runtime.NumCPU(), len(ready)) {
		w := s.w.Fork()
		workers.Go(func() {
			for f := range work {
				before := f.failing
				if err := w.Safely(func() error { return s.release(ctx, w, f) }); err != nil {
					f.Err = err
				}
				mu.Lock()
				for _, plugin := range before {
					works[plugin] = works[plugin] || !slices.Contains(f.failing, plugin)
				}
				if s.Progress != nil && !errors.Is(f.Err, ErrNotTried) {
					tried++
					s.Progress(tried, len(ready))
				}
				mu.Unlock()
			}
		})
	}
	for _, f := range ready {
		work <- f
	}
	close(work)
	workers.Wait()
	return works
}

// release releases one attachment if its lock is free and time is left. If only orphaned delegates
// hold the lock, it kills them first. Unless s.Stops, a signal does not interrupt it, because a
// killed DEL would stay pending.
func (s *Sweep) release(ctx context.Context, w *undo.Worker, f *Finding) error {
	if ctx.Err() != nil {
		return ErrNotTried
	}
	end := time.Now().Add(w.Budgets.Undo)
	if deadline, ok := ctx.Deadline(); ok && deadline.Before(end) {
		end = deadline
	}
	if !s.Stops {
		ctx = context.WithoutCancel(ctx)
	}
	ctx, cancel := context.WithDeadline(ctx, end)
	defer cancel()
	if f.owner != nil {
		return s.undoOwner(ctx, w, f)
	}
	var killed []string
	lock, err := w.Journal.Store.TryAcquire(f.Key)
	if f.orphaned && errors.Is(err, journal.ErrBusy) {
		lock, killed, err = w.LockOrphaned(ctx, f.Key)
	}
	switch {
	case errors.Is(err, journal.ErrBusy): // another unwind process holds the lock
		f.Verdict, f.Busy = decide.Locked, true
		return nil
	case err != nil:
		return err
	}
	defer lock.Release()
	out := w.ReleaseLocked(ctx, lock, killed, f.Key)
	if e := out.Entry; e != nil {
		f.Pod, f.State, f.Verdict = e.Added.Pod, out.State, out.Verdict
		f.Pending, f.failing = undo.PendingSteps(e), undo.FailingPlugins(e)
	}
	f.Released = out.Released
	return out.Err
}
