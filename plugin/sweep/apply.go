package sweep

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/internal/delegate"
	"cni-unwind/plugin/undo"
)

// Apply releases the dead attachments that are ready to retry. Once a plugin works again, it also
// releases the others with a pending DEL of that plugin; then those whose DELs were parked because
// of an owner that it has released.
func (s *Sweep) Apply(ctx context.Context, findings []Finding) {
	limit := &throttle{ignoreBackoff: !s.Periodic, tries: map[string]int{}, passed: map[string]bool{}}
	s.releaseEach(ctx, findings, limit, func(f *Finding) bool { return !f.Deferred })
	s.releaseEach(ctx, findings, limit, limit.worksAgain)
	if slices.ContainsFunc(findings, func(f Finding) bool { return f.Released }) {
		s.releaseEach(ctx, findings, limit,
			func(f *Finding) bool { return s.unparked(ctx, f.Key) })
	}
}

// releaseEach releases in parallel the dead attachments for which now returns true.
func (s *Sweep) releaseEach(
	ctx context.Context, findings []Finding, limit *throttle, now func(*Finding) bool,
) {
	var ready []*Finding
	for i := range findings {
		f := &findings[i]
		if f.Releasable() && !f.Released && f.Err == nil && now(f) {
			f.Deferred = false
			ready = append(ready, f)
		}
	}
	work := make(chan *Finding)
	var workers sync.WaitGroup
	var mu sync.Mutex
	tried := 0
	for range min(8, 2*runtime.NumCPU(), len(ready)) {
		w := s.w.Fork()
		workers.Go(func() {
			for f := range work {
				limit.try(f, func() {
					if err := w.Safely(func() error { return s.release(ctx, w, f) }); err != nil {
						f.Err = err
					}
				})
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

// unparked reports whether an attachment has a parked DEL and can be tried again now.
func (s *Sweep) unparked(ctx context.Context, key journal.Key) bool {
	var e *journal.Entry
	s.w.Journal.Read(ctx, func(tx *journal.Tx) (err error) {
		e, err = tx.Get(key)
		return err
	})
	return e != nil && s.w.Ready(ctx, e, !s.Periodic) &&
		anyStep(e, func(step journal.Step) bool { return step.State == journal.StepParked })
}

// anyStep reports whether is returns true for a step of an entry.
func anyStep(e *journal.Entry, is func(journal.Step) bool) bool {
	return slices.ContainsFunc(e.Generations,
		func(g journal.Generation) bool { return slices.ContainsFunc(g.Steps, is) })
}

// release releases one attachment if its lock is free and time is left. A signal does not interrupt
// it, because a killed DEL would stay pending.
func (s *Sweep) release(ctx context.Context, w *undo.Worker, f *Finding) error {
	if ctx.Err() != nil {
		return ErrNotTried
	}
	end := time.Now().Add(w.Budgets.Undo)
	if deadline, ok := ctx.Deadline(); ok && deadline.Before(end) {
		end = deadline
	}
	ctx, cancel := context.WithDeadline(context.WithoutCancel(ctx), end)
	defer cancel()
	if f.cached != nil {
		return s.undoCached(ctx, w, f)
	}
	lock, killed, err := tryLock(ctx, w, f)
	if errors.Is(err, journal.ErrBusy) && !f.orphaned { // another unwind is working on it
		f.Verdict, f.Busy = alive.Locked, true
		return nil
	}
	if err != nil {
		return err
	}
	defer lock.Release()
	out := w.ReleaseLocked(ctx, lock, killed, f.Key)
	if e := out.Entry; e != nil {
		f.Pod, f.State, f.Verdict = e.Pod, out.State, out.Verdict
		f.Pending, f.failing = undo.PendingSteps(e), undo.FailingPlugins(e)
	}
	f.Released = out.Released
	return out.Err
}

// tryLock takes the lock of a dead attachment if it is free. It kills orphaned delegates and those
// of a CHECK that hold it, and returns their names.
func tryLock(
	ctx context.Context, w *undo.Worker, f *Finding,
) (lock *journal.Lock, killed []string, err error) {
	lock, err = w.Journal.Store.TryAcquire(f.Key)
	if !errors.Is(err, journal.ErrBusy) || !f.orphaned && !w.Checked(f.Key) {
		return lock, nil, err
	}
	if owner, ownerErr := w.Journal.Store.Owner(f.Key); owner != 0 || ownerErr != nil {
		return nil, nil, err
	}
	killed = w.EndOrphans(f.Key)
	ctx, cancel := context.WithTimeout(ctx, delegate.GroupDelay)
	defer cancel()
	lock, err = w.Journal.Store.Acquire(ctx, f.Key)
	return lock, killed, err
}

// throttle limits the retries of failing DELs in a periodic sweep. It tries only a few of the
// attachments whose pending DELs have all failed before, per plugin. The sweep begins with the
// longest untried ones, so each gets its turn. Once a DEL of a plugin has passed, all attachments
// with a pending DEL of that plugin are ready to retry.
type throttle struct {
	ignoreBackoff bool // try all

	mu     sync.Mutex
	tries  map[string]int  // by plugin
	passed map[string]bool // plugins with a DEL that failed before and has passed now
}

// probes is the number of attachments to try for each plugin whose DELs fail.
const probes = 3

// try releases an attachment with settle, unless each of its failing plugins was tried often
// enough.
func (p *throttle) try(f *Finding, settle func()) {
	before := f.failing
	if f.Deferred = !p.admits(before); f.Deferred {
		return
	}
	settle()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, plugin := range before {
		if !slices.Contains(f.failing, plugin) {
			p.passed[plugin] = true
		}
	}
}

func (p *throttle) admits(plugins []string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.ignoreBackoff && len(plugins) > 0 && !slices.ContainsFunc(plugins, func(plugin string) bool {
		return p.passed[plugin] || p.tries[plugin] < probes
	}) {
		return false
	}
	for _, plugin := range plugins {
		p.tries[plugin]++
	}
	return true
}

// worksAgain reports whether an attachment waits for a plugin that works again.
func (p *throttle) worksAgain(f *Finding) bool {
	return f.Deferred &&
		slices.ContainsFunc(f.failing, func(plugin string) bool { return p.passed[plugin] })
}
