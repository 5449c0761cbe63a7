package undo

import (
	"context"
	"errors"
	"os"
	"slices"
	"syscall"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/facts"
)

// lockPoll is the interval at which Lock checks whether the lock is free.
const lockPoll = 10 * time.Millisecond

// Owned decides what Lock does while a live unwind holds the lock: if skip is true, Lock returns
// journal.ErrBusy, otherwise it waits. With a nil Owned, Lock always waits.
type Owned func(owner int) (skip bool)

// Skip makes Lock return without waiting.
func Skip(int) (skip bool) { return true }

// Lock takes the lock of an attachment. While a live unwind holds it, owned decides whether Lock
// waits as long as ctx allows. If only orphaned delegates of a killed unwind hold it, Lock waits
// for up to Budgets.Orphans or half of ctx's remaining time, whichever is shorter. Then it kills
// them and returns the names of their programs. That wait begins when Lock sees that the lock has
// no owner, so delegates whose unwind dies while Lock waits get their own time.
func (w *Worker) Lock(
	ctx context.Context, key journal.Key, owned Owned,
) (lock *journal.Lock, killed []string, err error) {
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
			if patience = (time.Time{}); owned != nil && owned(state.Owner) {
				return nil, killed, err
			}
		case patience.IsZero():
			wait := w.Budgets.Orphans
			if deadline, ok := ctx.Deadline(); ok {
				wait = min(wait, time.Until(deadline)/2)
			}
			patience = time.Now().Add(wait)
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

// Stop ends an ADD of the attachment that still runs, for the runtime's DEL. Runtimes do not run
// two verbs for one container at a time, so the runtime that started the ADD is dead or has
// abandoned the ADD:
//
//  1. SIGTERM: the unwind that runs the ADD ends its delegate and rolls the ADD back.
//  2. SIGKILL, Budgets.Stop after the SIGTERM. Its delegates then still hold the lock, and Lock
//     ends them like the delegates of any dead unwind.
//
// An ADD of another attachment also holds this lock while it releases this attachment. So Stop
// signals only an unwind that runs the ADD of this container and interface, and is older than this
// process. It opens a handle of the process before it reads the lock's owner again, so a reused
// process ID does no harm. Lock waits for any other owner. That includes an owner in another PID
// namespace, whose process ID belongs to a different process here.
func (w *Worker) Stop(key journal.Key) Owned {
	var signaled int // the process that got SIGTERM
	var looked, limit time.Time
	return func(owner int) (skip bool) {
		now := time.Now()
		if owner == 1 || now.Sub(looked) < 10*lockPoll {
			return false
		}
		looked = now
		switch {
		case signaled != owner && w.signal(key, owner, syscall.SIGTERM):
			signaled, limit = owner, now.Add(w.Budgets.Stop)
		case signaled == owner && now.After(limit):
			w.signal(key, owner, syscall.SIGKILL)
		}
		return false
	}
}

// signal sends a signal to the owner of an attachment's lock, if that is an ADD that Stop may end.
func (w *Worker) signal(key journal.Key, owner int, sig syscall.Signal) (sent bool) {
	p, err := os.FindProcess(owner)
	if err != nil {
		return false
	}
	defer func() { _ = p.Release() }()
	again, err := w.Journal.Store.LookAtLock(key)
	env := facts.Environ(owner)
	if err != nil || again.Owner != owner || !slices.Contains(env, "CNI_COMMAND=ADD") ||
		!slices.Contains(env, "CNI_CONTAINERID="+key.ContainerID) ||
		!slices.Contains(env, "CNI_IFNAME="+key.IfName) || !facts.Older(owner, os.Getpid()) {
		return false
	}
	w.Log.Warn("stopping an ADD that is still running, because the runtime sent the DEL of its "+
		"attachment", "attachment", key.String(), "pid", owner, "signal", sig.String())
	return p.Signal(sig) == nil
}
