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
	"syscall"

	"golang.org/x/sys/unix"
)

// ErrBusy is returned when a lock was not free in time.
var ErrBusy = errors.New("busy")

// Lock is the lock of an attachment: an flock on a file of its own.
//
// Delegates inherit the descriptor, so the lock stays held while any of them lives, even if this
// process is killed. To tell the two apart, the process that took the lock also holds a record lock
// (fcntl) on the file, which no child inherits: see Owner. Closing any descriptor of the file drops
// its process's record lock, so a process never opens the file of a lock that it holds again.
type Lock struct {
	store *Store
	key   Key
	file  *os.File
	made  bool
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
	if !s.hold(k) {
		return nil, fmt.Errorf("journal: lock of %s: %w", k, ErrBusy)
	}
	f, err := lockFile(ctx, s.LockPath(k), os.O_RDWR, unix.LOCK_EX)
	made := errors.Is(err, fs.ErrNotExist)
	if made {
		f, err = lockFile(ctx, s.LockPath(k), os.O_RDWR|os.O_CREATE, unix.LOCK_EX)
	}
	if err == nil {
		record := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart}
		if err = unix.FcntlFlock(f.Fd(), unix.F_SETLK, &record); err != nil {
			_ = f.Close()
		}
		// Another process has the record lock.
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
			err = ErrBusy
		}
	}
	if err != nil {
		s.unhold(k)
		return nil, fmt.Errorf("journal: lock of %s: %w", k, err)
	}
	return &Lock{store: s, key: k, file: f, made: made}, nil
}

// Share takes the lock of an attachment to look at it, beside others that do so. While Acquire has
// the lock, Share waits as long as ctx allows, then returns ErrBusy. It creates no file: if there
// is none, it returns fs.ErrNotExist.
//
// Delegates inherit the descriptor as they do from Acquire. There is no record lock, so no Owner: a
// process that wants to acquire the lock may kill these delegates, whether this process lives or
// not.
func (s *Store) Share(ctx context.Context, k Key) (*Lock, error) {
	for _, dir := range []string{s.Dir, filepath.Join(s.Dir, locksName)} {
		if err := checkDir(dir); err != nil {
			return nil, err
		}
	}
	if !s.hold(k) {
		return nil, fmt.Errorf("journal: lock of %s: %w", k, ErrBusy)
	}
	f, err := lockFile(ctx, s.LockPath(k), os.O_RDONLY, unix.LOCK_SH)
	if err != nil {
		s.unhold(k)
		return nil, fmt.Errorf("journal: lock of %s: %w", k, err)
	}
	return &Lock{store: s, key: k, file: f}, nil
}

// hold marks an attachment as locked by this process. It returns false if it was marked already.
func (s *Store) hold(k Key) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held[k] {
		return false
	}
	if s.held == nil {
		s.held = map[Key]bool{}
	}
	s.held[k] = true
	return true
}

func (s *Store) unhold(k Key) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.held, k)
}

// TryAcquire takes the lock of an attachment if it is free, and otherwise returns ErrBusy at once.
// The holder of one lock takes others only this way.
func (s *Store) TryAcquire(k Key) (*Lock, error) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return s.Acquire(ctx, k)
}

// LockPath returns the path of an attachment's lock file. The name is a hash, since container IDs
// may have any length.
func (s *Store) LockPath(k Key) string {
	return filepath.Join(s.Dir, locksName, hashOf(encodeKey(k)))
}

// hashOf returns the file name of an attachment, by its key as encodeKey makes it.
func hashOf(key []byte) string {
	sum := sha256.Sum256(key)
	return hex.EncodeToString(sum[:16])
}

// Locked reports whether the lock of an attachment is held, not counting those that share it, and
// whether its lock file exists.
func (s *Store) Locked(k Key) (locked, exists bool, err error) {
	if !s.hold(k) {
		return true, true, nil
	}
	defer s.unhold(k)
	f, err := openFile(s.LockPath(k), os.O_RDONLY)
	if errors.Is(err, fs.ErrNotExist) {
		return false, false, nil
	}
	if err != nil {
		return false, false, fmt.Errorf("journal: lock of %s: %w", k, err)
	}
	defer f.Close()
	err = unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB)
	if err != nil && !errors.Is(err, unix.EWOULDBLOCK) {
		return false, true, fmt.Errorf("journal: lock of %s: %w", k, err)
	}
	return errors.Is(err, unix.EWOULDBLOCK), true, nil
}

// Owner returns the living process that acquired an attachment's lock, or 0. With 0 the lock is
// free, or held only by delegates that outlived their unwind, or by those that share it. Owner
// returns 1 for a process in another PID namespace.
func (s *Store) Owner(k Key) (pid int, err error) {
	if !s.hold(k) {
		return os.Getpid(), nil
	}
	defer s.unhold(k)
	f, err := openFile(s.LockPath(k), os.O_RDWR)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("journal: lock of %s: %w", k, err)
	}
	defer f.Close()
	record := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart}
	if err := unix.FcntlFlock(f.Fd(), unix.F_GETLK, &record); err != nil {
		return 0, fmt.Errorf("journal: lock of %s: %w", k, err)
	}
	if record.Type == unix.F_UNLCK {
		return 0, nil
	}
	return max(1, int(record.Pid)), nil
}

// Made reports whether taking the lock created its file.
func (l *Lock) Made() bool { return l.made }

// File returns the locked file for delegates to inherit.
func (l *Lock) File() *os.File { return l.file }

// Remove removes the lock's file. Only the holder calls it: when the attachment is gone, or when
// success is about to be printed though the journal still says Adding. An Adding entry without a
// lock file is not known to be dead. Another file at the path, as after a removal of the whole
// directory, stays.
func (l *Lock) Remove() error {
	path := l.store.LockPath(l.key)
	if !samePath(l.file, path) {
		return nil
	}
	return os.Remove(path)
}

// Release gives the lock back, even if delegates inherited the descriptor and left a daemon that
// holds it. It drops the record lock first, so that the next holder of the flock gets the record
// lock without waiting.
func (l *Lock) Release() {
	record := unix.Flock_t{Type: unix.F_UNLCK, Whence: io.SeekStart}
	_ = unix.FcntlFlock(l.file.Fd(), unix.F_SETLK, &record)
	_ = unix.Flock(int(l.file.Fd()), unix.LOCK_UN)
	_ = l.file.Close()
	l.store.unhold(l.key)
}

// RemoveStrayLocks removes the lock files, and the files of the log, that no entry has. A process
// that was killed between the end of an attachment and Remove leaves them. The caller holds no lock.
// A held lock file stays: it belongs to an ADD or DEL that begins. A process that has the file open
// and waits for it finds it gone, and starts again.
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

// removeStrayLock reads the journal again under the lock, since an ADD may have come and gone.
func (s *Store) removeStrayLock(ctx context.Context, name string) error {
	now, cancel := context.WithCancel(ctx)
	cancel()
	path := filepath.Join(s.Dir, locksName, name)
	f, err := lockFile(now, path, os.O_RDWR, unix.LOCK_EX)
	if err != nil {
		return nil // held, or gone
	}
	defer f.Close()
	if known, err := s.lockNames(ctx); err != nil || known[name] {
		return err
	}
	return os.Remove(path)
}

// lockNames returns the names of the files that belong to entries, and removes those of the log that
// belong to none: no entry can come while the transaction has the queue.
func (s *Store) lockNames(ctx context.Context) (map[string]bool, error) {
	known := map[string]bool{}
	err := s.View(ctx, func(tx *Tx) error {
		err := tx.Outlines(func(o Outline, _ error) error {
			known[hashOf(encodeKey(o.Key))] = true
			return nil
		})
		for _, name := range tx.names {
			if err == nil && !known[name] {
				_ = os.Remove(filepath.Join(s.walDir(), name))
			}
		}
		return err
	})
	return known, err
}

// queue takes the queue of the journal. A reader changes nothing on the disk and creates no file:
// if there is no queue file, it reads without one and gets nil.
func (s *Store) queue(ctx context.Context, write bool) (*os.File, error) {
	path := filepath.Join(s.Dir, queueName)
	flag := os.O_RDWR | os.O_CREATE
	if !write {
		flag = os.O_RDONLY
	}
	f, err := lockFile(ctx, path, flag, unix.LOCK_EX)
	if !write && errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("journal: queue %s: %w", path, err)
	}
	return f, nil
}

var errNotRegular = errors.New("not a regular file")

// openFile opens a file of the journal. It follows no link, does not wait at a pipe and refuses
// one.
func openFile(path string, flag int) (*os.File, error) {
	f, err := os.OpenFile(path, flag|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	if errors.Is(err, syscall.ELOOP) {
		return nil, fmt.Errorf("%s is a symbolic link; remove it: %w", path, syscall.ELOOP)
	}
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is %w; move it away", path, errNotRegular)
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// lockFile opens a file, takes its flock (LOCK_SH or LOCK_EX) and checks that it is still the file
// at its path.
func lockFile(ctx context.Context, path string, flag, how int) (*os.File, error) {
	for {
		f, err := openFile(path, flag)
		if err != nil {
			return nil, err
		}
		if err := flock(ctx, f, how); err != nil {
			return nil, err
		}
		if samePath(f, path) {
			return f, nil
		}
		_ = f.Close()
	}
}

// flock takes the lock of an open file, LOCK_SH or LOCK_EX. On an error it closes the file, at the
// latest when the kernel gives up the wait.
func flock(ctx context.Context, f *os.File, how int) error {
	fd := int(f.Fd())
	switch err := unix.Flock(fd, how|unix.LOCK_NB); {
	case err == nil:
		return nil
	case !errors.Is(err, unix.EWOULDBLOCK):
		_ = f.Close()
		return err
	case ctx.Err() != nil:
		_ = f.Close()
		return ErrBusy
	}
	done := make(chan error, 1)
	go func() {
		err := unix.Flock(fd, how)
		for errors.Is(err, unix.EINTR) {
			err = unix.Flock(fd, how)
		}
		done <- err
	}()
	select {
	case err := <-done:
		if err != nil {
			_ = f.Close()
		}
		return err
	case <-ctx.Done():
		go func() {
			<-done
			_ = f.Close()
		}()
		return ErrBusy
	}
}

// samePath reports whether an open file is the one at the path.
func samePath(f *os.File, path string) bool {
	opened, err := f.Stat()
	if err != nil {
		return false
	}
	there, err := os.Lstat(path)
	return err == nil && os.SameFile(opened, there)
}
