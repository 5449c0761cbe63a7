package journal

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"
)

// replace creates or replaces the journal. The function write writes the new file. The caller has
// locked the queue file. A crash leaves the old journal, if any, or the new one. It may also leave
// journal.db.new, which the next call removes.
//
//	pwrite   journal.lock: a commit began
//	unlink   journal.db.new
//	open     journal.db.new, mode 0600
//	pwrite   meta pages, buckets, format
//	fsync    journal.db.new
//	rename   journal.db.new → journal.db
//	fsync    the directory and its parents
//	pwrite   journal.lock: the commit succeeded
func (s *Store) replace(queue *os.File, write func(path string) error) error {
	tmp := s.Path() + ".new"
	defer func() { _ = os.Remove(tmp) }() // after the rename, this does nothing
	for _, step := range []func() error{
		func() error { return s.setCommit(queue, began) },
		func() error { return os.RemoveAll(tmp) },
		func() error { return write(tmp) },
		func() error { return syncPath(tmp) },
		func() error { s.at("created"); return os.Rename(tmp, s.Path()) },
		func() error { s.at("renamed"); return s.syncFolders() },
		func() error { return s.setCommit(queue, succeeded) },
	} {
		if err := step(); err != nil {
			return fmt.Errorf("journal: %w", err)
		}
	}
	return nil
}

// syncFolders syncs the directory and its parents on the same file system. A parent may be new, and
// its creator may have been killed before syncing it.
func (s *Store) syncFolders() error {
	var own, above unix.Stat_t
	err := errors.Join(unix.Stat(s.Dir, &own), syncPath(s.Dir))
	for dir := s.Dir; err == nil && dir != "/"; {
		dir = filepath.Dir(dir)
		if unix.Stat(dir, &above) != nil || above.Dev != own.Dev {
			break
		}
		err = syncPath(dir)
	}
	return err
}

// Version is the version of journal.db's format that this code writes, and the newest that it can
// read. No release wrote versions 1 and 2; this code cannot read them.
const Version = 3

// format says which releases can read a journal file: writer is the Version of the release that
// created it, and oldestReader is the lowest Version that can read it. A release that changes the
// format raises only writer. The next release raises oldestReader, so users can go back by one
// release.
var format = fmt.Appendf(nil, `{"writer":%d,"oldestReader":%[1]d}`, Version)

// ErrNewer is returned for a file that only a newer release can read. The file stays unchanged. The
// returned error adds the file's path in front of this text, and the two format versions behind it.
var ErrNewer = errors.New("was written by a newer release of unwind")

func (s *Store) newer(format string, found, newest int) error {
	return fmt.Errorf("%s %w (%s %d; this release reads up to %d)", s.Path(), ErrNewer, format, found,
		newest)
}

func (s *Store) checkFormat(value []byte) error {
	var f struct{ OldestReader int }
	data, err := unseal(keyFormat, value)
	if err == nil {
		err = json.Unmarshal(data, &f)
	}
	if err != nil {
		return fmt.Errorf("%w, or from before the first release: format: %w", ErrDamaged, err)
	}
	if f.OldestReader > Version {
		return s.newer("format", f.OldestReader, Version)
	}
	return nil
}

// fill writes an empty journal.
func fill(path string) error {
	db, err := bolt.Open(path, 0o600, &bolt.Options{PageSize: pageSize, NoStatistics: true})
	if err != nil {
		return err
	}
	err = db.Update(func(tx *bolt.Tx) error {
		for _, name := range buckets {
			if _, err := tx.CreateBucket(name); err != nil {
				return err
			}
		}
		return tx.Bucket(bucketMeta).Put(keyFormat, Seal(keyFormat, format))
	})
	return errors.Join(err, db.Close())
}

// setAside renames a damaged journal file. The caller has locked the queue file.
func (s *Store) setAside(cause error) error {
	aside := fmt.Sprintf("%s.damaged-%s", s.Path(),
		time.Now().UTC().Format("20060102T150405.000000000Z"))
	if err := os.Rename(s.Path(), aside); err != nil {
		return fmt.Errorf("%w; cannot set it aside: %w", cause, err)
	}
	cmp.Or(s.Logger, slog.New(slog.DiscardHandler)).Error("unwind set aside the damaged journal to "+
		"start a new one; DELs of earlier attachments use the configuration that the runtime sends",
		"file", aside, "err", cause)
	if err := syncPath(s.Dir); err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	return nil
}

// makeDir creates the state directory and its directory of lock files (mode 0700). It checks each
// directory before creating anything in it.
func (s *Store) makeDir() error {
	if !filepath.IsAbs(s.Dir) {
		return fmt.Errorf("journal: stateDir %q is not an absolute path", s.Dir)
	}
	for _, dir := range []string{s.Dir, filepath.Join(s.Dir, locksName)} {
		if err := cmp.Or(os.MkdirAll(dir, 0o700), checkDir(dir)); err != nil {
			return fmt.Errorf("journal: %w", err)
		}
	}
	return nil
}

// checkDir rejects a path that is not a directory, such as a symbolic link. It also rejects a
// directory that a user other than root and this process's user can change, because that user could
// make root run any DEL.
func checkDir(dir string) error {
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return &fs.PathError{Op: "lstat", Path: dir, Err: err}
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return fmt.Errorf("%s is not a directory; move it out of the way", dir)
	case st.Uid != 0 && int(st.Uid) != os.Geteuid():
		return fmt.Errorf("%s belongs to user %d; chown it to root", dir, st.Uid)
	case st.Mode&0o022 != 0:
		return fmt.Errorf("%s is writable by others (mode %04o); chmod it to 0700", dir,
			st.Mode&0o7777)
	}
	return nil
}

func syncPath(path string) error {
	f, err := os.Open(path)
	if err == nil {
		err = errors.Join(f.Sync(), f.Close())
	}
	return err
}

// ErrQueued is an ErrBusy: the caller got no lock in time, because other processes kept writing.
var ErrQueued = fmt.Errorf("%w: other processes keep writing to the journal", ErrBusy)

// maxWait limits the wait for a lock of the journal. Every maxWait, a caller checks whether any
// process has written in that time, and stops waiting if none has. After three times maxWait, it
// always stops.
const maxWait = 10 * time.Second

// queue opens the queue file and acquires its flock. If the file is missing, a writer creates it,
// and a reader gets nil.
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
		_ = f.Close()
		if err != nil {
			return nil, fmt.Errorf("journal: lock file %s: %w", path, err)
		}
	}
}

// The states of the last commit. The queue file contains one of the first two, and the boot ID. The
// file needs no fsync, because after a reboot, the boot ID differs and the state is not used.
const (
	began     = 'b' // the commit failed, its process died, or a reader found damage
	succeeded = 's'
	rebooted  = 'r' // the commit was in an earlier boot
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

// openFile opens a regular file of the journal. It doesn't follow links, and doesn't block on a
// pipe without a writer.
func openFile(path string, flag int) (*os.File, error) {
	f, err := os.OpenFile(path, flag|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	switch {
	case errors.Is(err, syscall.ELOOP):
		return nil, fmt.Errorf("%s is a symbolic link; remove it", path)
	case err != nil:
		return nil, err
	}
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		_ = f.Close()
		return nil, cmp.Or(err, fmt.Errorf("%s is not a regular file; move it out of the way", path))
	}
	return f, nil
}

// waiters limits the threads of this process that wait for an flock. Such a thread always waits
// until it gets the lock, and releases it immediately if its caller no longer wants it.
var waiters = make(chan struct{}, 64)

// flock acquires the flock of an open file, either LOCK_SH or LOCK_EX. The kernel grants the flock
// in the order of the requests. flock returns ErrBusy if no process has written to the queue file
// for maxWait, and ErrQueued if ctx ends before that.
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

func samePath(path string, f *os.File) bool {
	there, err := os.Lstat(path)
	opened, openedErr := f.Stat()
	return err == nil && openedErr == nil && os.SameFile(opened, there)
}

// OpenIn opens a file in a state directory to read and write it. It creates what is missing: the
// directory (0700), and the file (0600). It rejects a directory that others can write to, and a
// file that is not a regular one, such as a symbolic link.
func OpenIn(stateDir, name string) (*os.File, error) {
	if err := cmp.Or(os.MkdirAll(stateDir, 0o700), checkDir(stateDir)); err != nil {
		return nil, err
	}
	return openFile(filepath.Join(stateDir, name), os.O_RDWR|os.O_CREATE)
}

// CheckDir returns an error if makeDir would reject an existing directory as the state directory.
// For a missing directory, the error is fs.ErrNotExist.
func CheckDir(stateDir string) error { return checkDir(stateDir) }
