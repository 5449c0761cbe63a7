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

// MaxWait limits the wait for a queue that does not progress, unless the caller's context has an
// earlier deadline. While others write, the wait may be up to three times as long: on a disk with
// 45 ms per sync, 250 pods that end at the same time succeed, with one transaction each.
const MaxWait = 10 * time.Second

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
		return nil, fmt.Errorf("journal: lock file %s: %w", path, err)
	}
	return f, nil
}

// whileItMoves returns a context that ends when no process has written for MaxWait, but not before
// MaxWait has passed.
func (s *Store) whileItMoves(ctx context.Context) (context.Context, context.CancelFunc) {
	still := s.still()
	ctx, cancel := context.WithTimeout(ctx, 3*still)
	look := s.lookAfter(ctx, still, still, cancel)
	return ctx, func() {
		look.Stop()
		cancel()
	}
}

func (s *Store) still() time.Duration { return cmp.Or(s.wait, MaxWait) }

// lookAfter ends a wait for the queue if, after d, its stamp is at least as old as still: see
// stamp.
func (s *Store) lookAfter(ctx context.Context, d, still time.Duration, end func()) *time.Timer {
	return time.AfterFunc(d, func() {
		info, err := os.Stat(filepath.Join(s.Dir, queueName))
		switch {
		case ctx.Err() != nil:
		case err != nil || time.Since(info.ModTime()) >= still:
			end()
		default:
			s.lookAfter(ctx, min(still, still-time.Since(info.ModTime())), still, end)
		}
	})
}

// stampSize is the size of all stamps, in bytes.
const stampSize = 160

// stamp records in the queue's file how a transaction leaves the journal. The next transaction that
// finds the file so neither verifies it, which reads all of it and costs more than the transaction,
// nor syncs it and its directories. The stamp is not synced and counts for one boot. After a loss
// of power, or if a process died in a transaction, no stamp fits: unstamp has removed it. If the
// file system went away and came back within one boot, an older stamp may be there again. It does
// not fit a file with a newer transaction, whole or not. All stamps have one length: when a
// truncated file is closed, ext4 allocates its blocks and begins to write them (auto_da_alloc,
// ext4(5)).
func (s *Store) stamp(queue, file *os.File) {
	if text := s.stampOf(file); text != "" {
		_, _ = queue.WriteAt([]byte(text), 0)
	}
}

// unstamp removes the stamp before a transaction changes the file: within one tick of the clock,
// the file's times would not tell.
func (s *Store) unstamp(queue *os.File) error {
	_, err := queue.WriteAt(make([]byte, stampSize), 0)
	return err
}

// stamped reports whether the file is as the last stamp says.
func (s *Store) stamped(queue, file *os.File) bool {
	if queue == nil {
		return false
	}
	text := make([]byte, 256)
	n, _ := queue.ReadAt(text, 0)
	return n > 0 && string(text[:n]) == s.stampOf(file)
}

func (s *Store) stampOf(file *os.File) string {
	var st unix.Stat_t
	boot, newest := s.bootID(), newestIn(file)
	if boot == "" || newest == 0 || unix.Fstat(int(file.Fd()), &st) != nil {
		return ""
	}
	return fmt.Sprintf("%-*s\n", stampSize-1, fmt.Sprintf("%s %d %d %d %d %d %d", boot, st.Dev,
		st.Ino, st.Size, st.Mtim.Nano(), st.Ctim.Nano(), newest))
}

// bootID returns the boot's ID, or "" if it cannot be read. It reads it once: opening a file of
// /proc is slow.
func (s *Store) bootID() string {
	s.bootOnce.Do(func() {
		data, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
		s.boot = string(bytes.TrimSpace(data))
	})
	return s.boot
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

// flock takes the lock of an open file, LOCK_SH or LOCK_EX. It waits as long as ctx allows, then
// returns ErrBusy. On an error it closes the file, at the latest when the kernel gives up the wait.
func flock(ctx context.Context, f *os.File, how int) error {
	for {
		err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = ErrBusy
		}
		if !errors.Is(err, ErrBusy) || ctx.Err() != nil {
			if err != nil {
				_ = f.Close()
			}
			return err
		}
		over, end := waitAt(f)
		if end != nil {
			return flockInThread(ctx, f, how, end)
		}
		select {
		case <-over:
		case <-ctx.Done():
		}
	}
}

// fileID identifies a file that is open.
type fileID struct{ dev, ino uint64 }

// waits has the files for whose flock a thread of this process waits. Only the lock ends such a
// wait. So there is one thread for a file, however many callers begin to wait and give up.
var waits = struct {
	sync.Mutex
	over map[fileID]chan struct{} // closed at the end of the wait
}{over: map[fileID]chan struct{}{}}

// waitAt returns the end of the wait for a file's flock that another thread is in. If there is
// none, the caller is to wait in a thread, and to call end.
func waitAt(f *os.File) (over <-chan struct{}, end func()) {
	var st unix.Stat_t
	_ = unix.Fstat(int(f.Fd()), &st) // cannot fail on a descriptor that flock takes
	id := fileID{st.Dev, st.Ino}
	waits.Lock()
	defer waits.Unlock()
	if over, waiting := waits.over[id]; waiting {
		return over, nil
	}
	mine := make(chan struct{})
	waits.over[id] = mine
	return mine, func() {
		waits.Lock()
		defer waits.Unlock()
		delete(waits.over, id)
		close(mine)
	}
}

// flockInThread waits in a thread for a file's flock. If ctx ends first, the thread gives the lock
// back as soon as it has it.
func flockInThread(ctx context.Context, f *os.File, how int, end func()) error {
	taken := make(chan error)
	go func() {
		err := unix.Flock(int(f.Fd()), how)
		for errors.Is(err, unix.EINTR) {
			err = unix.Flock(int(f.Fd()), how)
		}
		select {
		case taken <- err:
		case <-ctx.Done():
			_ = f.Close()
		}
		end()
	}()
	select {
	case err := <-taken:
		if err != nil {
			_ = f.Close()
		}
		return err
	case <-ctx.Done():
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
