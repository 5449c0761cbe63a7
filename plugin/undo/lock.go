package undo

import (
	"context"
	"errors"
	"os"
	"syscall"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/facts"
)

// lockPoll is the interval at which Lock checks whether the lock is free.
const lockPoll = 10 * time.Millisecond

// Lock takes the lock of an attachment. If a live unwind holds it, Lock waits as long as ctx
// allows. For a DEL of the runtime, it ends that unwind (see stopping). If only orphaned delegates
// of a killed unwind hold it, Lock waits for up to Budgets.Orphans, or half of the time that is
// left. Then it kills them and returns the names of their programs. That wait begins when Lock sees
// that the lock has no owner, so delegates whose unwind dies during the wait get their own time.
func (w *Worker) Lock(
	ctx context.Context, key journal.Key, mode Mode,
) (lock *journal.Lock, killed []string, err error) {
	stop := stopping{Worker: w, key: key}
	return w.lockOr(ctx, key, func(owner int) (skip bool) {
		if mode == Requested {
			stop.look(owner)
		}
		return false
	})
}

// LockOrphaned does the work of Lock, but returns journal.ErrBusy if a live unwind holds the lock.
func (w *Worker) LockOrphaned(
	ctx context.Context, key journal.Key,
) (lock *journal.Lock, killed []string, err error) {
	return w.lockOr(ctx, key, func(int) (skip bool) { return true })
}

// lockOr takes the lock of an attachment. It calls owned repeatedly while a live unwind holds the
// lock, and gives up if owned returns true.
func (w *Worker) lockOr(ctx context.Context, key journal.Key, owned func(owner int) (skip bool)) (
	lock *journal.Lock, killed []string, err error,
) {
	var patience time.Time // zero while the lock has an owner
	for ; ; time.Sleep(lockPoll) {
		lock, err = w.Journal.Store.TryAcquire(key)
		if !errors.Is(err, journal.ErrBusy) || ctx.Err() != nil {
			return lock, killed, err
		}
		state, lookErr := w.Journal.Store.LookAtLock(key)
		switch {
		case lookErr != nil:
			return nil, killed, lookErr
		case state.Owner != 0:
			if patience = (time.Time{}); owned(state.Owner) {
				return nil, killed, err
			}
		case patience.IsZero():
			patience = time.Now().Add(w.patience(ctx))
		case time.Now().Before(patience):
		default:
			var names []string
			lock, names, err = w.takeOver(key)
			if killed = append(killed, names...); !errors.Is(err, journal.ErrBusy) {
				return lock, killed, err
			}
		}
	}
}

// patience returns how long orphaned delegates may still run.
func (w *Worker) patience(ctx context.Context) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		return min(w.Budgets.Orphans, time.Until(deadline)/2)
	}
	return w.Budgets.Orphans
}

// takeOver takes the lock of an attachment from the delegates of a dead unwind. It kills the
// delegates that hold the lock, waits up to delegate.GroupDelay for them to end, and returns
// the names of their programs. It never kills an unwind, or a daemon (a process that created its
// own session). A daemon keeps its file descriptor, but loses the lock.
func (w *Worker) takeOver(key journal.Key) (lock *journal.Lock, killed []string, err error) {
	lock, err = w.Journal.Store.TakeOver(key, func() (onlyDaemons bool) {
		ended := map[int]bool{}
		for end := time.Now().Add(delegate.GroupDelay); ; time.Sleep(lockPoll) {
			holders, err := facts.HoldersOf(w.Journal.Store.LockPath(key), delegate.LockFD)
			if err != nil {
				w.Log.Warn("cannot list orphaned plugins", "attachment", key.String(), "err", err)
			}
			daemons, delegates := facts.SplitDaemons(holders)
			if len(delegates) == 0 || time.Now().After(end) {
				return len(delegates) == 0 && len(daemons) > 0 && err == nil
			}
			for _, pid := range delegates {
				if ended[pid] {
					continue
				}
				ended[pid] = true
				w.Log.Warn("killing orphaned plugin", "attachment", key.String(), "pid", pid)
				programs := facts.ProgramsOf(pid)
				if syscall.Kill(pid, syscall.SIGKILL) == nil {
					killed = append(killed, programs...)
				}
			}
		}
	})
	return lock, killed, err
}

// The problem: a runtime's DEL waits for its attachment's lock while an ADD of the same attachment
// holds that lock. Runtimes do not run two verbs for one container at a time, so the runtime that
// started the ADD is dead or has abandoned the ADD. stopping ends the ADD:
//
//  1. SIGTERM: the unwind that runs the ADD ends its delegate and rolls the ADD back.
//  2. SIGKILL, Budgets.Stop after the SIGTERM. Its delegates then still hold the lock, and Lock
//     ends them like the delegates of any dead unwind.
//
// An ADD of another attachment also holds this lock while it releases this attachment. So stopping
// signals only an unwind that runs the ADD of this container and interface, and is older than this
// process. It opens a handle of the process before it reads the lock's owner again, so a reused
// process ID does no harm. Lock waits for any other owner. That includes an owner in another PID
// namespace, whose process ID belongs to a different process here.
type stopping struct {
	*Worker
	key    journal.Key
	owner  int // the process that got SIGTERM
	looked time.Time
	limit  time.Time
}

// look checks the lock's owner, and signals it if necessary. Lock calls it repeatedly while a
// process owns the lock.
func (s *stopping) look(owner int) {
	now := time.Now()
	if owner == 1 || now.Sub(s.looked) < 10*lockPoll {
		return
	}
	s.looked = now
	switch {
	case s.owner != owner && s.signal(owner, syscall.SIGTERM):
		s.owner, s.limit = owner, now.Add(s.Budgets.Stop)
	case s.owner == owner && now.After(s.limit):
		s.signal(owner, syscall.SIGKILL)
	}
}

// signal sends a signal to the lock's owner, if that is an ADD that stopping may end.
func (s *stopping) signal(owner int, sig syscall.Signal) (sent bool) {
	p, err := os.FindProcess(owner)
	if err != nil {
		return false
	}
	defer func() { _ = p.Release() }()
	again, err := s.Journal.Store.LookAtLock(s.key)
	if err != nil || again.Owner != owner || facts.Environ(owner, "CNI_COMMAND") != "ADD" ||
		facts.Environ(owner, "CNI_CONTAINERID") != s.key.ContainerID ||
		facts.Environ(owner, "CNI_IFNAME") != s.key.IfName || !facts.Older(owner, os.Getpid()) {
		return false
	}
	s.Log.Warn("stopping an ADD that is still running, because the runtime sent the DEL of its "+
		"attachment", "attachment", s.key.String(), "pid", owner, "signal", sig.String())
	return p.Signal(sig) == nil
}
