package journal

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// maxWait limits a wait for the queue. A caller gives up if it has waited for maxWait and nobody
// has written for maxWait, and in any case after three times maxWait. On a disk with 45 ms per
// sync, that is enough for 250 pods that end at the same time, with one transaction each.
const maxWait = 10 * time.Second

// poll is the mean time between two tries to take a lock. It is random, so that no waiter always
// comes second.
const poll = 2 * time.Millisecond

// queue takes the queue of the journal: the flock of the queue file. A reader changes nothing on
// the disk: if the queue file does not exist, queue returns nil, and the reader goes on without
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

// The states of the last commit. The queue file contains the state, followed by the boot ID. If a
// commit failed or its process died, its changes may or may not be in the file, and after a failed
// sync the kernel treats pages as written that are not on the disk. So nobody may rely on the file
// in memory. After a reboot only the disk counts, so the queue file need not be synced.
const (
	began     = 'b'
	succeeded = 's'
)

func (s *Store) setCommit(queue *os.File, state byte) error {
	_, err := queue.WriteAt(append([]byte{state, ' '}, s.bootID()...), 0)
	return err
}

// lastCommit returns the state of the last commit, and whether that commit was in an earlier boot.
// If the queue file has no state, lastCommit returns that the commit began in this boot.
func (s *Store) lastCommit(queue *os.File) (state byte, earlier bool) {
	boot := s.bootID()
	found := make([]byte, 2+len(boot))
	if _, err := queue.ReadAt(found, 0); err != nil {
		return began, false
	}
	return found[0], string(found[2:]) != boot
}

func (s *Store) bootID() string { return cmp.Or(s.boot, bootID()) }

// bootID returns the boot's ID, or "" if it cannot be read.
var bootID = sync.OnceValue(func() string {
	data, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return string(bytes.TrimSpace(data))
})

// openFile opens a file of the journal. It follows no link, and rejects a pipe without waiting for
// it.
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
		err = fmt.Errorf("%s is not a regular file; move it away", path)
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// flock takes the lock of an open file, LOCK_SH or LOCK_EX. It polls, because nothing can cancel a
// blocking flock: its thread would stay until it has the lock. It returns ErrBusy if ctx ends, or
// if nobody has written to the queue file for maxWait.
func (s *Store) flock(ctx context.Context, f *os.File, how int) error {
	for still, start := cmp.Or(s.wait, maxWait), time.Now(); ; {
		err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return err
		}
		if time.Since(start) >= still {
			queue, err := os.Stat(filepath.Join(s.Dir, queueName))
			if err != nil || time.Since(queue.ModTime()) >= still {
				return ErrBusy
			}
		}
		select {
		case <-ctx.Done():
			return ErrBusy
		case <-time.After(poll/2 + rand.N(poll)):
		}
	}
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
