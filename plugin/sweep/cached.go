package sweep

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/record"
	"cni-unwind/plugin/undo"
)

// A runtime that never sends a DEL leaks the plugins' resources and leaves a file in libcni's
// cache. The file has everything that the DEL needs: the chain, the result and the capability
// arguments. It serves as the record of an attachment that is not in the journal:
//
//  1. planCached judges the attachment by the same evidence as a reservation whose owner is not in
//     the journal.
//  2. undoCached takes the lock of the cache file, which excludes other sweeps, and of the
//     attachment if there is a journal, and judges the attachment again.
//  3. It runs the chain's DELs in reverse order. A DEL with an address runs under host-local's
//     lock, see undo.Job.Unrecorded.
//  4. If all DELs pass, it removes the cache file, as libcni does. Otherwise, or after SIGKILL, the
//     next sweep runs all DELs again.
//
// It creates no journal.

// planCached returns the verdict on each attachment that libcni's cache has and the journal does
// not. It leaves out
//
//   - attachments of an earlier boot: their rules and interfaces are gone, and the disk may be a
//     copy of another machine's, whose pod a DEL could reach through a cluster-wide IPAM plugin;
//   - attachments without an address, because they cannot be judged;
//   - attachments of unwind's own chains: the journal or a tombstone decides on them.
func (s *Sweep) planCached(ctx context.Context) (findings []Finding, err error) {
	if !s.Cache || s.w.Node.List == nil || s.Attachment != nil {
		return nil, nil
	}
	all, err := s.w.Node.Cache()
	if len(all) == 0 {
		return nil, err
	}
	inJournal, journalErr := s.containers(ctx)
	if journalErr != nil {
		return nil, errors.Join(err, journalErr)
	}
	booted := time.Now().Add(-time.Duration(journal.BootNanos()))
	for i := range all {
		c := &all[i]
		if c.Written.Before(booted) || inJournal[c.ContainerID] ||
			s.Network != "" && s.Network != c.Network ||
			len(netconf.InterfaceOf(c.Result, c.IfName).Addresses) == 0 {
			continue
		}
		chain, _, chainErr := c.Chain()
		if chainErr != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", c.Path, chainErr))
			continue
		}
		if chain == nil || !slices.ContainsFunc(chain.Delegates,
			func(d netconf.Delegate) bool { return !known.Of(d.Type).LeavesNothing }) {
			continue
		}
		f := Finding{Key: c.Key(), Pod: netconf.PodOf(c.CNIArgs()), cached: c,
			Verdict: s.w.Node.JudgeCached(c, s.graceOf(c.Network))}
		if f.Releasable() {
			for _, d := range slices.Backward(chain.Delegates) {
				f.Pending = append(f.Pending, d.Type)
			}
		}
		findings = append(findings, f)
	}
	return findings, err
}

// graceOf returns the grace period of a network, from its conflist if it has a pool, else the
// default.
func (s *Sweep) graceOf(network string) time.Duration {
	for _, p := range s.Pools {
		if p.Network == network {
			return p.GracePeriod
		}
	}
	return s.w.Node.GracePeriod
}

// undoCached runs the DELs of an attachment in libcni's cache, and removes the cache file.
func (s *Sweep) undoCached(ctx context.Context, w *undo.Worker, f *Finding) error {
	unlock, err := lockFile(f.cached.Path)
	if err == nil && s.hasJournal() {
		var lock *journal.Lock
		if lock, err = w.Journal.Store.TryAcquire(f.Key); err == nil {
			defer lock.Release()
			if lock.Made() {
				defer func() { _ = lock.Remove() }()
			}
		}
	}
	defer unlock()
	if errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, journal.ErrBusy) {
		f.Verdict, f.Busy = alive.Locked, true
		return nil
	}
	if errors.Is(err, os.ErrNotExist) { // the runtime's DEL has just run
		f.Released, f.Pending = true, nil
		return nil
	}
	inJournal, journalErr := s.containers(ctx)
	if err = errors.Join(err, journalErr); err != nil {
		return err
	}
	grace := s.graceOf(f.Network)
	if f.Verdict = s.w.Node.JudgeCached(f.cached, grace); f.Fate != alive.Dead ||
		inJournal[f.ContainerID] {
		return nil
	}
	e, err := w.OfCache(f.cached, grace)
	if err != nil {
		return err
	}
	event := record.EventOf(journal.Swept, e)
	failures := w.Run(ctx, undo.Job{Entry: e, Unrecorded: true})
	f.Pending = undo.PendingSteps(e)
	if len(failures) > 0 {
		return failures[0]
	}
	// A DEL to be repeated later counts as passed, because nothing records when to repeat it.
	if anyStep(e, func(s journal.Step) bool { return s.State != journal.StepRepeat }) {
		return nil
	}
	if err := os.Remove(f.cached.Path); err != nil {
		return err
	}
	f.Released, f.Pending = true, nil
	w.Log.Info("released", "attachment", f.Key.String(), "reason", f.Reason.Text)
	if event.Reason = f.Reason.Text; s.hasJournal() {
		w.Journal.Event(event, record.CountSwept, f.Reason.Label())
		w.Journal.Flush(ctx)
	}
	return nil
}

// lockFile takes the flock of a file, if it is free. A crash releases it.
func lockFile(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return func() {}, err
	}
	if err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
		opened, openedErr := f.Stat()
		there, thereErr := os.Lstat(path)
		if err = errors.Join(openedErr, thereErr); err == nil && !os.SameFile(opened, there) {
			err = unix.EWOULDBLOCK // an ADD has replaced it
		}
	}
	return func() { _ = f.Close() }, err
}

// hasJournal reports whether a journal exists. A sweep does not create one.
func (s *Sweep) hasJournal() bool {
	_, err := os.Lstat(s.w.Journal.Store.Path())
	return err == nil
}
