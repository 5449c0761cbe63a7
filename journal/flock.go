package journal

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

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

// waitAt returns the end of the wait for a file's flock that another thread is in. If there is none,
// the caller is to wait in a thread, and to call end.
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
