package journal

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// ErrBusy is returned when a lock was not free in time.
var ErrBusy = errors.New("busy")

// Lock is the lock of an attachment, or of the node's agent: an flock on a file of its own.
//
// Delegates inherit the descriptor, so the lock stays held while any of them lives, even if this
// process is killed. To tell the two apart, the process that took the lock also holds a record lock
// (fcntl) on the file, which no child inherits: see Owner. Closing any descriptor of the file drops
// its process's record lock, so a process never opens the file of a lock that it holds again: see
// held.
//
// The methods of a nil Lock do nothing.
type Lock struct {
	path string
	as   lockID
	file *os.File
	made bool
}

// lockID identifies a lock file within the process, whatever path a Store has to its directory.
type lockID struct {
	dir  fileID
	name string
}

// held has the locks that this process holds or waits for. It belongs to the process and not to a
// Store, like record locks. Code that opens a lock file only to inspect it holds the mutex until it
// is closed.
var held = struct {
	sync.Mutex
	locks map[lockID]bool
}{locks: map[lockID]bool{}}

// lockID returns the identity of a lock file, by its name. It returns fs.ErrNotExist if there is no
// directory of lock files.
func (s *Store) lockID(name string) (lockID, error) {
	var st unix.Stat_t
	dir := filepath.Join(s.Dir, locksName)
	if err := unix.Stat(dir, &st); err != nil {
		return lockID{}, fmt.Errorf("journal: %w", &fs.PathError{Op: "stat", Path: dir, Err: err})
	}
	return lockID{fileID{st.Dev, st.Ino}, name}, nil
}

// hold marks a lock as this process's. It returns ErrBusy if it is marked already.
func (s *Store) hold(name string) (lockID, error) {
	id, err := s.lockID(name)
	if err != nil {
		return id, err
	}
	held.Lock()
	defer held.Unlock()
	if held.locks[id] {
		return id, ErrBusy
	}
	held.locks[id] = true
	return id, nil
}

func unhold(id lockID) {
	held.Lock()
	defer held.Unlock()
	delete(held.locks, id)
}

// Acquire takes the lock of an attachment and waits as long as ctx allows, then returns ErrBusy.
//
// It locks in this order, so that the lock is always that of the file at its path:
//
//  1. open, creating the file if there is none
//  2. flock
//  3. if the file at the path is another one by now, start again
//  4. fcntl
func (s *Store) Acquire(ctx context.Context, k Key) (*Lock, error) {
	if err := s.makeDir(); err != nil {
		return nil, err
	}
	l, err := s.take(ctx, lockName(k), os.O_RDWR, unix.LOCK_EX)
	if errors.Is(err, fs.ErrNotExist) {
		if l, err = s.take(ctx, lockName(k), os.O_RDWR|os.O_CREATE, unix.LOCK_EX); err == nil {
			l.made = true
		}
	}
	if err == nil {
		if err = l.record(unix.F_WRLCK); err != nil {
			l.Release()
		}
		// Another process has the record lock.
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
			err = ErrBusy
		}
	}
	if err != nil {
		return nil, fmt.Errorf("journal: lock of %s: %w", k, err)
	}
	return l, nil
}

// take marks a lock as this process's and takes its flock, LOCK_SH or LOCK_EX.
func (s *Store) take(ctx context.Context, name string, flag, how int) (*Lock, error) {
	id, err := s.hold(name)
	if err != nil {
		return nil, err
	}
	path := filepath.Join(s.Dir, locksName, name)
	f, err := lockFile(ctx, path, flag, how)
	if err != nil {
		unhold(id)
		return nil, err
	}
	return &Lock{path: path, as: id, file: f}, nil
}

// record takes or drops the record lock.
func (l *Lock) record(how int16) error {
	return unix.FcntlFlock(l.file.Fd(), unix.F_SETLK, &unix.Flock_t{Type: how, Whence: io.SeekStart})
}

// Share takes the lock of an attachment for reading, together with other processes. While Acquire
// has the lock, Share waits as long as ctx allows, then returns ErrBusy. It creates no file: if
// there is none, it returns fs.ErrNotExist.
//
// Delegates inherit the descriptor as they do from Acquire. There is no record lock, and so no
// Owner: a process that acquires the lock may kill these delegates even while this process lives.
func (s *Store) Share(ctx context.Context, k Key) (*Lock, error) {
	for _, dir := range []string{s.Dir, filepath.Join(s.Dir, locksName)} {
		if err := checkDir(dir); err != nil {
			return nil, err
		}
	}
	l, err := s.take(ctx, lockName(k), os.O_RDONLY, unix.LOCK_SH)
	if err != nil {
		return nil, fmt.Errorf("journal: lock of %s: %w", k, err)
	}
	return l, nil
}

// TryAcquire takes the lock of an attachment if it is free, and otherwise returns ErrBusy
// immediately.
func (s *Store) TryAcquire(k Key) (*Lock, error) {
	return s.Acquire(atOnce(), k)
}

// atOnce returns a context that is already canceled.
func atOnce() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}

// LockPath returns the path of an attachment's lock file.
func (s *Store) LockPath(k Key) string { return filepath.Join(s.Dir, locksName, lockName(k)) }

// lockName returns the name of an attachment's lock file: a hash, since container IDs may have any
// length.
func lockName(k Key) string {
	sum := sha256.Sum256(encodeKey(k))
	return hex.EncodeToString(sum[:16])
}

// Locked reports whether the lock of an attachment is held, not counting those that share it, and
// whether its lock file exists.
func (s *Store) Locked(k Key) (locked, exists bool, err error) {
	ours, err := s.look(k, os.O_RDONLY, func(f *os.File) error {
		exists = true
		err := unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB)
		if errors.Is(err, unix.EWOULDBLOCK) {
			locked, err = true, nil
		}
		return err
	})
	return locked || ours, exists || ours, err
}

// Owner returns the live process that acquired an attachment's lock, or 0. With 0 the lock is free,
// or held only by orphaned delegates or by processes that share it. Owner returns 1 for a process
// in another PID namespace.
func (s *Store) Owner(k Key) (pid int, err error) {
	ours, err := s.look(k, os.O_RDWR, func(f *os.File) error {
		record := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart}
		err := unix.FcntlFlock(f.Fd(), unix.F_GETLK, &record)
		if err == nil && record.Type != unix.F_UNLCK {
			pid = max(1, int(record.Pid))
		}
		return err
	})
	if ours {
		pid = os.Getpid()
	}
	return pid, err
}

// look opens an attachment's lock file, if there is one, and calls fn, which must not block. It
// does not open the file of a lock that this process holds, and returns ours instead.
func (s *Store) look(k Key, flag int, fn func(*os.File) error) (ours bool, err error) {
	held.Lock()
	defer held.Unlock()
	id, err := s.lockID(lockName(k))
	if err == nil {
		if held.locks[id] {
			return true, nil
		}
		var f *os.File
		if f, err = openFile(s.LockPath(k), flag); err == nil {
			defer f.Close()
			err = fn(f)
		}
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, fmt.Errorf("journal: lock of %s: %w", k, err)
	}
	return false, nil
}

// Path returns the path at which the lock was taken.
func (l *Lock) Path() string { return l.path }

// InPlace reports whether the locked file is still at its path. If it is not, another process can
// take the lock there.
func (l *Lock) InPlace() bool { return samePath(l.file, l.path) }

// Made reports whether taking the lock created its file.
func (l *Lock) Made() bool { return l != nil && l.made }

// File returns the locked file for delegates to inherit.
func (l *Lock) File() *os.File {
	if l == nil {
		return nil
	}
	return l.file
}

// BeginPass records in the lock's file that a pass over the attachment's steps begins. It returns
// how many earlier passes began and did not end, up to 255. The number only affects the order of
// the steps: it is not synced, and 0 if it cannot be read.
func (l *Lock) BeginPass() (cutOff int) {
	if l == nil {
		return 0
	}
	var passes [1]byte
	_, _ = l.file.ReadAt(passes[:], 0)
	cutOff = int(passes[0])
	_, _ = l.file.WriteAt([]byte{byte(min(cutOff+1, 255))}, 0)
	return cutOff
}

// EndPass records that the pass has ended.
func (l *Lock) EndPass() {
	if l != nil {
		_, _ = l.file.WriteAt([]byte{0}, 0)
	}
}

// Remove removes the lock's file. Only the holder may call it: when the attachment is gone, or when
// success is about to be printed although the journal still has Adding, because an Adding entry
// without a lock file does not count as dead. If another file is at the path, for example after the
// directory was removed, that file stays.
func (l *Lock) Remove() error {
	if l == nil || !l.InPlace() {
		return nil
	}
	return os.Remove(l.path)
}

// Release gives the lock back, even if delegates inherited the descriptor and left a daemon that
// holds it. It drops the record lock first, so that the next holder of the flock gets the record
// lock without waiting.
func (l *Lock) Release() {
	if l == nil {
		return
	}
	_ = l.record(unix.F_UNLCK)
	_ = unix.Flock(int(l.file.Fd()), unix.LOCK_UN)
	_ = l.file.Close()
	unhold(l.as)
}

// RemoveStrayLocks removes lock files without an entry. A process that was killed between the end
// of an attachment and Remove leaves one. The caller holds no lock. A held lock file stays, because
// it belongs to an ADD or DEL that is starting. A process that is waiting for the file finds it
// gone, and starts again.
func (s *Store) RemoveStrayLocks(ctx context.Context) error {
	files, err := os.ReadDir(filepath.Join(s.Dir, locksName))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("journal: %w", err)
	}
	known, err := s.lockNames(ctx)
	if err != nil {
		return err
	}
	for _, file := range files {
		if known[file.Name()] {
			continue
		}
		if err := s.removeStrayLock(ctx, file.Name()); err != nil {
			return err
		}
	}
	return nil
}

// removeStrayLock reads the journal again under the lock, because an ADD may have run meanwhile.
func (s *Store) removeStrayLock(ctx context.Context, name string) error {
	l, err := s.take(atOnce(), name, os.O_RDWR, unix.LOCK_EX)
	if err != nil {
		return nil // held, or gone
	}
	defer l.Release()
	if known, err := s.lockNames(ctx); err != nil || known[name] {
		return err
	}
	return l.Remove()
}

// lockNames returns the names of the entries' lock files.
func (s *Store) lockNames(ctx context.Context) (map[string]bool, error) {
	known := map[string]bool{}
	err := s.View(ctx, func(tx *Tx) error {
		return tx.Outlines(func(o Outline, _ error) error {
			known[lockName(o.Key)] = true
			return nil
		})
	})
	return known, err
}
