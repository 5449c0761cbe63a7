package journal

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ErrQueued is the ErrBusy of a caller whose turn has not come while other processes write.
var ErrQueued = fmt.Errorf("%w: other processes write the journal", ErrBusy)

// maxWait limits a wait for a lock of the journal. A caller stops waiting if no process has written
// for maxWait, which it checks every maxWait. It never waits longer than three times maxWait, or
// after its context ends. On a disk with 45 ms per sync, that is enough for 250 pods that end at
// the same time, with one transaction each.
const maxWait = 10 * time.Second

// queue opens the queue file and takes its flock. A reader creates no file, so queue does
// not create a missing one for it. queue then returns nil, and the reader continues without
// the flock.
func (s *Store) queue(ctx context.Context, write bool) (*os.File, error) {
	path := filepath.Join(s.Dir, queueName)
	flag := os.O_RDWR | os.O_CREATE
	if !write {
		flag = os.O_RDONLY
	}
	for {
		f, err := openFile(path, flag)
		if !write && errors.Is(err, fs.ErrNotExist) {
			return nil, nil
		}
		if err == nil {
			err = s.flock(ctx, f, unix.LOCK_EX)
		}
		if err == nil && samePath(path, f) {
			return f, nil
		}
		if _ = f.Close(); err != nil {
			return nil, fmt.Errorf("journal: lock file %s: %w", path, err)
		}
	}
}

// The states of the last commit. The queue file contains one of the first two, followed by the boot
// ID. It is not synced, because after a reboot the page cache counts no more.
const (
	began     = 'b' // it failed, or its process died; or a reader found damage
	succeeded = 's'
	rebooted  = 'r' // it was in an earlier boot
)

func (s *Store) setCommit(queue *os.File, state byte) error {
	_, err := queue.WriteAt(append([]byte{state, ' '}, s.bootID()...), 0)
	return err
}

// lastCommit returns the state of the last commit, or began if the queue file contains none.
func (s *Store) lastCommit(queue *os.File) byte {
	boot := s.bootID()
	found := make([]byte, 2+len(boot))
	_, err := queue.ReadAt(found, 0)
	switch {
	case err == nil && string(found[2:]) != boot:
		return rebooted
	case err == nil && found[0] == succeeded:
		return succeeded
	}
	return began
}

func (s *Store) bootID() string { return cmp.Or(s.boot, bootID()) }

// bootID returns the ID of the current boot, or "" if it cannot be read.
var bootID = sync.OnceValue(func() string {
	data, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return string(bytes.TrimSpace(data))
})

// openFile opens a file of the journal. It rejects a symbolic link, and it rejects a pipe without
// waiting for a writer.
func openFile(path string, flag int) (*os.File, error) {
	f, err := os.OpenFile(path, flag|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	if errors.Is(err, syscall.ELOOP) {
		return nil, fmt.Errorf("%s is a symbolic link; remove it", path)
	}
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file; move it out of the way", path)
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// waiters limits the threads of this process that wait for an flock. Such a thread waits until it
// gets the lock, even if its caller has given up.
var waiters = make(chan struct{}, 64)

// flock takes the flock of an open file (LOCK_SH or LOCK_EX). The kernel grants it in the order of
// the requests. flock returns ErrBusy if no process has written to the queue file for maxWait, and
// ErrQueued if ctx ends before that. The caller then closes the file. If the kernel grants the lock
// afterwards, it is released immediately.
func (s *Store) flock(ctx context.Context, f *os.File, how int) error {
	err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
	if !errors.Is(err, unix.EWOULDBLOCK) {
		return err
	}
	select {
	case waiters <- struct{}{}:
	case <-ctx.Done():
		return s.busy()
	}
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0) // the goroutine below closes it
	if err != nil {
		<-waiters
		return err
	}
	taken := make(chan error, 1)
	go func() {
		err := unix.Flock(fd, how)
		for errors.Is(err, unix.EINTR) {
			err = unix.Flock(fd, how)
		}
		_ = unix.Close(fd)
		taken <- err
		<-waiters
	}()
	for still := cmp.Or(s.wait, maxWait); ; {
		select {
		case err := <-taken:
			return err
		case <-ctx.Done():
			return s.busy()
		case <-time.After(still):
			if err := s.busy(); !errors.Is(err, ErrQueued) {
				return err
			}
		}
	}
}

// busy returns ErrQueued if a process has written to the queue file within maxWait, else ErrBusy.
func (s *Store) busy() error {
	queue, err := os.Stat(filepath.Join(s.Dir, queueName))
	if err != nil || time.Since(queue.ModTime()) >= cmp.Or(s.wait, maxWait) {
		return ErrBusy
	}
	return ErrQueued
}

// samePath reports whether all of these open files are the file at the path.
func samePath(path string, files ...*os.File) bool {
	there, err := os.Lstat(path)
	for _, f := range files {
		opened, statErr := f.Stat()
		if err != nil || statErr != nil || !os.SameFile(opened, there) {
			return false
		}
	}
	return true
}
