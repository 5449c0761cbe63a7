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
// releases the others with a pending DEL of that plugin.
func (s *Sweep) Apply(ctx context.Context, findings []Finding) {
	var ready []*Finding
	for i := range findings {
		if f := &findings[i]; f.Releasable() && !f.Deferred && f.Err == nil {
			ready = append(ready, f)
		}
	}
	limit := newThrottle(!s.Periodic)
	s.releaseEach(ctx, ready, limit)
	if ready = limit.ready(findings); len(ready) > 0 {
		s.releaseEach(ctx, ready, limit)
	}
	s.unpark(ctx, findings)
}

// releaseEach releases attachments in parallel.
func (s *Sweep) releaseEach(ctx context.Context, ready []*Finding, limit *throttle) {
	work := make(chan *Finding)
	var workers sync.WaitGroup
	progress := s.progress(len(ready))
	for range min(8, 2*runtime.NumCPU()) {
		w := s.w.Fork()
		workers.Go(func() {
			for f := range work {
				limit.try(f, func() {
					if err := w.Safely(func() error { return s.release(ctx, w, f) }); err != nil {
						f.Err = err
					}
				})
				if !errors.Is(f.Err, ErrNotTried) {
					progress()
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

// progress returns a function that counts an attempt at an attachment.
func (s *Sweep) progress(of int) func() {
	var mu sync.Mutex
	done := 0
	return func() {
		mu.Lock()
		defer mu.Unlock()
		if done++; s.Progress != nil {
			s.Progress(done, of)
		}
	}
}

// unpark releases attachments whose DELs were parked because of an owner that the sweep has
// released.
func (s *Sweep) unpark(ctx context.Context, findings []Finding) {
	if !slices.ContainsFunc(findings, func(f Finding) bool { return f.Released }) {
		return
	}
	for i := range findings {
		f := &findings[i]
		if !f.Releasable() || f.Released || f.throttled || f.Err != nil {
			continue
		}
		var e *journal.Entry
		s.w.Journal.Read(ctx, func(tx *journal.Tx) (err error) {
			e, err = tx.Get(f.Key)
			return err
		})
		// Ready begins its own transaction
		if e == nil || !hasParked(e) || !s.w.Ready(ctx, e, !s.Periodic) {
			continue
		}
		f.Deferred = false
		if err := s.w.Safely(func() error { return s.release(ctx, s.w, f) }); err != nil {
			f.Err = err
		}
	}
}

func hasParked(e *journal.Entry) bool {
	return slices.ContainsFunc(e.Generations, func(g journal.Generation) bool {
		return slices.ContainsFunc(g.Steps,
			func(step journal.Step) bool { return step.State == journal.StepParked })
	})
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
		f.Fate, f.Reason, f.Busy = alive.Locked.Fate, alive.Locked.Reason, true
		return nil
	}
	if err != nil {
		return err
	}
	defer lock.Release()
	out := w.ReleaseLocked(ctx, lock, killed, f.Key)
	if e := out.Entry; e != nil {
		f.Pod, f.State, f.Fate, f.Reason = e.Pod, out.State, out.Verdict.Fate, out.Verdict.Reason
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
