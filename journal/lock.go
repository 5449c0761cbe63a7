package journal

import (
	"encoding/hex"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// ErrBusy is returned when a lock was not free in time.
var ErrBusy = errors.New("in use by another process")

// Lock is an attachment's lock: record locks on two bytes of the attachment's lock file.
//
//	held    by a descriptor that delegates inherit, so it stays locked while one of them lives
//	owned   by a descriptor that no child inherits, so it stays locked while this process lives
//
// Both belong to an open file (F_OFD_SETLK), so they exclude the workers of one process, too. The
// file contains the owner's process ID. The methods of a nil Lock do nothing.
type Lock struct {
	path string
	held *os.File
	own  *os.File
}

const (
	heldByte = iota
	ownedByte
)

// TryAcquire takes the lock of an attachment without waiting, or returns ErrBusy. It creates the
// lock file if it is missing.
func (s *Store) TryAcquire(k Key) (*Lock, error) {
	if err := s.makeDir(); err != nil {
		return nil, err
	}
	l, err := take(s.LockPath(k), false)
	return l, lockError(k, err)
}

// TakeOver takes an attachment's lock from processes that inherited it from a dead owner. It locks
// the owned byte, calls end, which ends these processes, and locks the held byte. end reports
// whether only daemons are left. They would hold the lock as long as they live, so TakeOver then
// replaces the lock file with one that it has locked. A crash may leave the new file next to the
// old one, until RemoveFreeLocks removes it.
func (s *Store) TakeOver(k Key, end func() (onlyDaemons bool)) (*Lock, error) {
	l, err := take(s.LockPath(k), true)
	if err == nil {
		free := end()
		if err = setLock(l.held, heldByte); errors.Is(err, ErrBusy) && free {
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
	next, err := take(l.path+".next", false)
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

// take locks the file at a path without waiting, or returns ErrBusy. It creates a missing file. If
// over is set, it locks only the owned byte.
func take(path string, over bool) (*Lock, error) {
	for {
		l := &Lock{path: path}
		var err error
		if l.held, err = openFile(path, os.O_RDWR|os.O_CREATE); err != nil {
			return nil, err
		}
		if !over {
			err = setLock(l.held, heldByte)
		}
		if err == nil {
			l.own, err = openFile(path, os.O_RDWR)
		}
		if err == nil {
			err = setLock(l.own, ownedByte)
		}
		if err == nil && l.inPlace() {
			// this fails on a full disk; the process ID then stays unknown
			_, _ = l.own.WriteAt(fmt.Appendf(nil, "%-10d\n", os.Getpid()), 0)
			return l, nil
		}
		if l.close(); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
}

// setLock locks a byte of a file, or returns ErrBusy.
func setLock(f *os.File, at int64) error {
	err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK,
		&unix.Flock_t{Type: unix.F_WRLCK, Start: at, Len: 1})
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

// LockPath returns the path of an attachment's lock file. A container ID may be longer than a file
// name, so the name is a hash. Two attachments with one hash would wait for each other, and lose
// nothing.
func (s *Store) LockPath(k Key) string {
	h := fnv.New128a()
	_, _ = h.Write(encodeKey(k))
	return filepath.Join(s.Dir, locksName, hex.EncodeToString(h.Sum(nil)))
}

// LockState is the state of an attachment's lock. Owner is the process ID of its living owner, as
// that process itself sees it, or 1 if the ID is unknown. If it is 0, the lock is free, or only
// orphaned delegates hold it.
type LockState struct {
	Held  bool
	Owner int
}

func (s *Store) LookAtLock(k Key) (state LockState, err error) {
	f, err := openFile(s.LockPath(k), os.O_RDONLY)
	if errors.Is(err, fs.ErrNotExist) {
		return state, nil
	}
	if err != nil {
		return state, lockError(k, err)
	}
	defer f.Close()
	state.Held, err = isLocked(f, heldByte)
	owned, ownErr := isLocked(f, ownedByte)
	if owned {
		var pid int // stays 0 if the owner could not write it
		_, _ = fmt.Fscan(f, &pid)
		state.Owner = max(1, pid)
	}
	return state, lockError(k, errors.Join(err, ownErr))
}

// inPlace reports whether the locked file is still at its path, where others lock it.
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

// RemoveFreeLocks removes the files of all free locks. Whoever takes such a lock creates its file
// again.
func (s *Store) RemoveFreeLocks() error {
	dir := filepath.Join(s.Dir, locksName)
	files, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, file := range files {
		if l, _ := take(filepath.Join(dir, file.Name()), false); l != nil {
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
	sweepTime = 5 * time.Minute // how long a running sweep keeps others from starting
)

// LockSweep takes the lock of the sweep behind a STATUS, or returns ErrBusy if another such sweep
// holds it. If that one has run for sweepTime, it may hang: LockSweep then returns nil, because
// attachments have locks of their own, and sweepTime begins again.
func (s *Store) LockSweep() (*Lock, error) {
	if err := s.makeDir(); err != nil {
		return nil, err
	}
	path, now := filepath.Join(s.Dir, sweepName), time.Now()
	l, err := take(path, false)
	if info, statErr := os.Lstat(path); errors.Is(err, ErrBusy) && statErr == nil {
		// an age of less than 0 means that the clock was set back
		if age := now.Sub(info.ModTime()); age < 0 || age >= sweepTime {
			err = os.Chtimes(path, now, now)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("journal: %s: %w", path, err)
	}
	return l, nil
}
