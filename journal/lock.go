package journal

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// ErrBusy is returned if a lock was not released in time.
var ErrBusy = errors.New("in use by another process")

// Lock is an attachment's lock: two locked bytes of a file. Without a Release, they stay locked:
//
//	held    until this process, its delegates and their children, which inherit the lock, have ended
//	owned   until this process has ended; no child inherits this lock
//
// Both are open file description locks (F_OFD_SETLK), so they also exclude other goroutines of the
// same process. While a DEL waits for the lock, it holds a shared lock on a third byte (see
// Awaited). The methods of a nil Lock do nothing.
type Lock struct {
	path string
	held *os.File
	own  *os.File
}

const (
	heldByte = iota
	ownedByte
	awaitedByte
)

// lockPoll is the interval at which Acquire checks whether the lock is free.
const lockPoll = 10 * time.Millisecond

// Patience says how Acquire waits for a lock.
type Patience struct {
	Children  time.Duration // the wait for processes that inherited the lock from a dead owner
	SkipOwned bool          // if a living process owns the lock, return ErrBusy at once
	EndADD    bool          // if an ADD owns the lock, make that ADD end (see Lock.Awaited)
}

// Acquire waits for the lock of an attachment, and acquires it. While a living process owns the
// lock, Acquire waits as long as ctx allows, and then returns ErrBusy. If the owner has died, but a
// process that inherited the lock still holds it, Acquire waits for Patience.Children, or for half
// of ctx's remaining time if that is shorter. Then it takes the lock over. This second wait begins
// when Acquire detects that the owner has died.
func (s *Store) Acquire(ctx context.Context, k Key, p Patience) (l *Lock, err error) {
	var limit time.Time // zero while the lock has an owner
	var waiting *os.File
	defer func() { _ = waiting.Close() }() // releases the third byte
	for ; ; time.Sleep(lockPoll) {
		if l, err = s.TryAcquire(k); !errors.Is(err, ErrBusy) || ctx.Err() != nil {
			return l, err
		}
		state, lookErr := s.LookAtLock(k)
		switch {
		case lookErr != nil:
			return nil, lookErr
		case state.Owned && p.SkipOwned:
			return nil, err
		case state.Owned:
			limit = time.Time{}
			if p.EndADD {
				waiting = s.lockThird(k, waiting)
			}
		case limit.IsZero():
			limit = time.Now().Add(p.forChildren(ctx))
		case time.Now().After(limit):
			if l, err = s.TakeOver(k); !errors.Is(err, ErrBusy) {
				return l, err
			}
		}
	}
}

func (p Patience) forChildren(ctx context.Context) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		return min(p.Children, time.Until(deadline)/2)
	}
	return p.Children
}

// TryAcquire acquires the lock of an attachment without waiting, or returns ErrBusy. It creates the
// lock file if it is missing.
func (s *Store) TryAcquire(k Key) (*Lock, error) {
	if err := s.makeDir(); err != nil {
		return nil, err
	}
	l, err := take(s.LockPath(k), heldByte)
	return l, lockError(k, err)
}

// TakeOver takes over an attachment's lock from processes that inherited it from a dead owner. If
// the owner lives, TakeOver returns ErrBusy. It locks the owned byte first, so that no other
// process takes the lock over at the same time. If the held byte is still locked, TakeOver locks a
// new file, and renames it over the lock file. A crash before the rename leaves the new file until
// RemoveFreeLocks removes it.
func (s *Store) TakeOver(k Key) (*Lock, error) {
	l, err := take(s.LockPath(k), ownedByte)
	if err == nil {
		if err = setLock(l.held, unix.F_WRLCK, heldByte); errors.Is(err, ErrBusy) {
			cmp.Or(s.Logger, slog.New(slog.DiscardHandler)).Warn("replacing a lock file: the unwind "+
				"process that ran a plugin was killed, and a child of the plugin still holds the lock",
				"attachment", k.String())
			err = l.replace()
		}
	}
	if err != nil {
		l.Release()
		return nil, lockError(k, err)
	}
	return l, nil
}

func (l *Lock) replace() error {
	next, err := take(l.path+".next", heldByte)
	if err != nil {
		return err
	}
	if err := os.Rename(next.path, l.path); err != nil {
		next.Release()
		return err
	}
	l.close()
	l.held, l.own = next.held, next.own
	return nil
}

// take locks bytes of a lock file without waiting, or returns ErrBusy. With heldByte, it locks both
// bytes. With ownedByte, it locks only the owned byte. It creates a missing file.
func take(path string, from int64) (*Lock, error) {
	for {
		l := &Lock{path: path}
		var err error
		if l.held, err = openFile(path, os.O_RDWR|os.O_CREATE); err != nil {
			return nil, err
		}
		if from == heldByte {
			err = setLock(l.held, unix.F_WRLCK, heldByte)
		}
		if err == nil {
			l.own, err = openFile(path, os.O_RDWR)
		}
		if err == nil {
			err = setLock(l.own, unix.F_WRLCK, ownedByte)
		}
		if err == nil && l.inPlace() {
			return l, nil
		}
		l.close()
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
}

// setLock locks a byte of a file, or returns ErrBusy.
func setLock(f *os.File, how int16, at int64) error {
	err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: how, Start: at, Len: 1})
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return ErrBusy
	}
	return err
}

func isLocked(f *os.File, at int64) (bool, error) {
	lock := unix.Flock_t{Type: unix.F_WRLCK, Start: at, Len: 1}
	err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &lock)
	return lock.Type != unix.F_UNLCK, err
}

func lockError(k Key, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("journal: lock of %s: %w", k, err)
}

// LockPath returns the path of an attachment's lock file. Its name is a hash, because a container
// ID may be too long for a file name. Attachments with the same hash would only wait for each
// other.
func (s *Store) LockPath(k Key) string {
	h := fnv.New128a()
	_, _ = h.Write(encodeKey(k))
	return filepath.Join(s.Dir, locksName, hex.EncodeToString(h.Sum(nil)))
}

// LockState is the state of an attachment's lock. A lock is held but not owned if the unwind
// process that owned it is dead, and a process that inherited it still runs.
type LockState struct{ Held, Owned bool }

func (s *Store) LookAtLock(k Key) (state LockState, err error) {
	f, err := openFile(s.LockPath(k), os.O_RDONLY)
	if errors.Is(err, fs.ErrNotExist) {
		return state, nil
	}
	if err != nil {
		return state, lockError(k, err)
	}
	defer f.Close()
	var ownErr error
	state.Held, err = isLocked(f, heldByte)
	state.Owned, ownErr = isLocked(f, ownedByte)
	return state, lockError(k, errors.Join(err, ownErr))
}

// lockThird locks the third byte of an attachment's lock file, and returns the file. If waiting is
// already that file, lockThird returns it unchanged. It returns nil if the file is missing or
// cannot be locked.
func (s *Store) lockThird(k Key, waiting *os.File) *os.File {
	if waiting != nil && samePath(s.LockPath(k), waiting) {
		return waiting
	}
	_ = waiting.Close()
	f, err := openFile(s.LockPath(k), os.O_RDONLY)
	if err == nil && setLock(f, unix.F_RDLCK, awaitedByte) == nil {
		return f
	}
	_ = f.Close()
	return nil
}

// Awaited reports whether a DEL waits for the lock.
func (l *Lock) Awaited() bool {
	if l == nil {
		return false
	}
	awaited, err := isLocked(l.held, awaitedByte)
	return awaited && err == nil
}

// inPlace reports whether the locked file is still at its path, where other processes lock it.
func (l *Lock) inPlace() bool { return samePath(l.path, l.held) && samePath(l.path, l.own) }

// File returns the locked file, which delegates inherit.
func (l *Lock) File() *os.File {
	if l == nil {
		return nil
	}
	return l.held
}

// Remove removes the lock file, unless another file is at the path. Only the holder may call it.
func (l *Lock) Remove() error {
	if l == nil || !l.inPlace() {
		return nil
	}
	return os.Remove(l.path)
}

// Release releases the lock, even if a daemon has inherited the descriptor. It unlocks the owned
// byte first, so that the next holder finds that byte free.
func (l *Lock) Release() {
	if l == nil {
		return
	}
	for _, f := range []*os.File{l.own, l.held} {
		_ = unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_UNLCK})
	}
	l.close()
}

func (l *Lock) close() {
	_ = l.own.Close()
	_ = l.held.Close()
	l.own, l.held = nil, nil
}

// RemoveFreeLocks removes the files of all free locks. The next process that needs such a lock
// recreates its file.
func (s *Store) RemoveFreeLocks() error {
	dir := filepath.Join(s.Dir, locksName)
	files, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, file := range files {
		if l, _ := take(filepath.Join(dir, file.Name()), heldByte); l != nil {
			err = errors.Join(err, l.Remove())
			l.Release()
		}
	}
	if err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	return nil
}

const (
	sweepName = "sweep.lock"
	sweepTime = 5 * time.Minute // how long a running sweep keeps other sweeps from starting
)

// LockSweep acquires the lock that a sweep started by STATUS needs. If another such sweep holds the
// lock, and has run for less than sweepTime, LockSweep returns ErrBusy. A sweep that has run longer
// counts as hung: LockSweep returns a nil Lock without an error, so that the caller's sweep also
// runs, and sweepTime begins again. Two sweeps at a time are safe, because each attachment has its
// own lock.
func (s *Store) LockSweep() (*Lock, error) {
	if err := s.makeDir(); err != nil {
		return nil, err
	}
	path, now := filepath.Join(s.Dir, sweepName), time.Now()
	l, err := take(path, heldByte)
	if info, statErr := os.Lstat(path); errors.Is(err, ErrBusy) && statErr == nil {
		// an age of less than 0 means that the clock was set back
		if age := now.Sub(info.ModTime()); age < 0 || age >= sweepTime {
			err = os.Chtimes(path, now, now)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("journal: %s: %w", path, err)
	}
	if l != nil { // the PID is for people; writing it restarts sweepTime
		_, _ = l.own.WriteAt(fmt.Appendf(nil, "%-10d\n", os.Getpid()), 0)
	}
	return l, nil
}
