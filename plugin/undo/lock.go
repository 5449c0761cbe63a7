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

// lockPoll is how often Lock looks whether the lock is free.
const lockPoll = 10 * time.Millisecond

// Lock takes the lock of an attachment. If a living unwind holds it, Lock waits as long as ctx
// allows, but see stopping. If only orphaned delegates of a killed unwind hold it, Lock waits a
// while, then kills them and returns the names of their programs.
func (w *Worker) Lock(
	ctx context.Context, key journal.Key,
) (lock *journal.Lock, killed []string, err error) {
	patience := time.Now().Add(w.Budgets.Orphans)
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline)/2 < w.Budgets.Orphans {
		patience = time.Now().Add(time.Until(deadline) / 2)
	}
	stop := stopping{Worker: w, key: key}
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
			stop.look(state.Owner)
		case time.Now().Before(patience):
		default:
			var names []string
			lock, names, err = w.TakeOver(key)
			if killed = append(killed, names...); !errors.Is(err, journal.ErrBusy) {
				return lock, killed, err
			}
		}
	}
}

// TakeOver takes the lock of an attachment from the delegates of a dead unwind. It kills those that
// hold it, waits up to delegate.GroupDelay for their end, and returns the names of their programs.
// It kills no unwind, and no daemon: a process that made a session of its own. A daemon keeps its
// descriptor, but not the lock.
func (w *Worker) TakeOver(key journal.Key) (lock *journal.Lock, killed []string, err error) {
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

// stopping ends the ADD that holds the lock which a runtime's DEL of the same attachment waits for.
// Runtimes do not run two verbs for one container at a time, so the ADD's runtime is dead or has
// given it up.
//
//  1. SIGTERM: the ADD's unwind ends its delegate and undoes what the others did.
//  2. SIGKILL, once no delegate of it has ended for Budgets.Stop. Its delegates hold the lock on,
//     and Lock ends them as those of any dead unwind.
//
// An ADD of another attachment also holds this lock while it releases this attachment. So a signal
// goes only to an unwind in the ADD of this container and interface that is older than this
// process, by a handle that was opened before the lock's owner was read once more. Lock waits for
// any other owner, also for one in another PID namespace, whose number is another process's here.
type stopping struct {
	*Worker
	key       journal.Key
	owner     int   // that was asked to stop
	delegates []int // of the owner, at the last look
	looked    time.Time
	limit     time.Time
}

// look is called again and again while a process owns the lock.
func (s *stopping) look(owner int) {
	now := time.Now()
	if !s.Verb.DEL || s.key != s.Verb.Key || owner == 1 || now.Sub(s.looked) < 10*lockPoll {
		return
	}
	s.looked = now
	delegates, _ := facts.HoldersOf(s.Journal.Store.LockPath(s.key), delegate.LockFD)
	ended := slices.ContainsFunc(s.delegates,
		func(pid int) bool { return !slices.Contains(delegates, pid) })
	s.delegates = delegates
	switch {
	case s.owner != owner && s.signal(owner, syscall.SIGTERM):
		s.owner, s.limit = owner, now.Add(s.Budgets.Stop)
	case s.owner == owner && ended:
		s.limit = now.Add(s.Budgets.Stop)
	case s.owner == owner && now.After(s.limit):
		s.signal(owner, syscall.SIGKILL)
	}
}

// signal sends a signal to the lock's owner, if it may be signalled.
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
	s.Log.Warn("stopping the ADD that this DEL is for", "attachment", s.key.String(), "pid", owner,
		"signal", sig.String())
	return p.Signal(sig) == nil
}
