package journal

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime/debug"
	"syscall"
	"time"

	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"
)

// Store is a node's journal: a directory with the journal file, the queue file and a lock file for
// each attachment. Only Dir must be set. A Store keeps no file open. The steps of a transaction:
//
//  1. Open the queue file and acquire its flock. Readers do this too, so that they cannot starve a
//     writer.
//  2. A writer creates the journal file if it is missing (see replace). Open the file and acquire
//     its flock, which readers share. Verify the file; a writer may have to replace it with a copy
//     (see trust). In steps 1 and 2, if another file is at the path by now, begin the step again.
//  3. A reader unlocks the queue file. A writer keeps it locked, so that no reader starts.
//  4. Run one bbolt transaction. Before the commit, make room in the journal file (see makeRoom).
//     Record in the queue file that the commit begins, and afterwards that it succeeded.
//  5. Close the journal file and unlock the queue file.
//
// A panic or a SIGBUS in bbolt becomes an error. If the file proves to be damaged, a writer sets it
// aside, and runs the transaction again in a new file. So a function passed to Update may run
// twice. A reader records the damage in the queue file, so that the next writer verifies the
// journal file.
type Store struct {
	Dir    string
	Logger *slog.Logger // nil: no log
	// Trusting saves most verifications (see trust). The plugin, which runs for every pod, sets it.
	Trusting bool
	Point    func(name string) // called after a change on disk, where a test can kill this process

	wait time.Duration // replaces maxWait in tests
	boot string        // replaces bootID in tests
}

const (
	fileName  = "journal.db"
	queueName = "journal.lock"
	locksName = "locks"
)

// ErrDamaged is View's error for a damaged file. The next Update sets the file aside.
var ErrDamaged = errors.New("journal: journal.db is damaged")

var errAgain = errors.New("journal: journal.db was replaced while it was being opened; try again")

func (s *Store) Path() string { return filepath.Join(s.Dir, fileName) }

// Update runs fn in one read-write transaction. Once Update returns nil, all that fn wrote survives
// a crash and a power loss. If fn wrote nothing or returns an error, Update commits nothing. If the
// commit fails, the file contains either all of fn's changes or none.
func (s *Store) Update(ctx context.Context, fn func(*Tx) error) error {
	if err := s.makeDir(); err != nil {
		return err
	}
	return s.run(ctx, true, fn)
}

// View runs fn in one read-only transaction. If no journal exists, fn sees an empty one.
func (s *Store) View(ctx context.Context, fn func(*Tx) error) error {
	if _, err := os.Lstat(s.Path()); errors.Is(err, fs.ErrNotExist) {
		return fn(&Tx{})
	}
	if err := checkDir(s.Dir); err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	return s.run(ctx, false, fn)
}

func (s *Store) run(ctx context.Context, write bool, fn func(*Tx) error) error {
	ctx, cancel := context.WithTimeout(ctx, 3*cmp.Or(s.wait, maxWait))
	defer cancel()
	queue, err := s.queue(ctx, write)
	if err != nil {
		return err
	}
	defer queue.Close()
	for try, aside := 0, false; ; try++ {
		err := s.transact(ctx, queue, write, fn)
		switch {
		case errors.Is(err, errAgain) && try < 3:
		case errors.Is(err, ErrDamaged) && write && !aside:
			aside = true
			if err := s.setAside(err); err != nil {
				return err
			}
		case errors.Is(err, ErrDamaged) && !write:
			// make the next writer verify the file, if this process may write the queue file
			if queue, err := openFile(filepath.Join(s.Dir, queueName), os.O_WRONLY); err == nil {
				_ = errors.Join(s.setCommit(queue, began), queue.Close())
			}
			return err
		default:
			return err
		}
	}
}

// transact runs a transaction. The caller has locked the queue file, which is the first step of the
// list at Store. transact does the others.
func (s *Store) transact(
	ctx context.Context, queue *os.File, write bool, fn func(*Tx) error,
) (err error) {
	var file *os.File
	debug.SetPanicOnFault(true)
	defer debug.SetPanicOnFault(false)
	defer func() {
		if r := recover(); r != nil {
			_, cause := verify(s.Path())
			err = cmp.Or(cause, fmt.Errorf("journal: %s: bbolt panicked: %v", s.Path(), r))
			// bbolt may hold its mutexes, so db.Close could hang. Without db.Close, the file stays mapped,
			// and the mapping would keep the flock. So unlock the file.
			_ = syscall.Flock(int(file.Fd()), syscall.LOCK_UN)
			_ = file.Close()
		}
	}()
	if _, err := os.Lstat(s.Path()); write && errors.Is(err, fs.ErrNotExist) {
		if err := s.replace(queue, fill); err != nil {
			return err
		}
	}
	if file, err = s.open(ctx, queue, write); err != nil {
		return err
	}
	db, err := bolt.Open(s.Path(), 0o600, &bolt.Options{
		ReadOnly:     !write,
		NoStatistics: true,
		OpenFile:     func(string, int, os.FileMode) (*os.File, error) { return file, nil },
	})
	if err != nil {
		return s.blame(err)
	}
	if !write {
		_ = queue.Close()
	}
	btx, err := db.Begin(write)
	if err == nil {
		err = s.inTx(&Tx{btx: btx}, file, queue, fn)
		_ = btx.Rollback() // after a commit, this does nothing
	}
	return errors.Join(err, db.Close())
}

// open opens, locks and verifies the journal file.
func (s *Store) open(ctx context.Context, queue *os.File, write bool) (f *os.File, err error) {
	flag, how := os.O_RDONLY, unix.LOCK_SH
	if write {
		flag, how = os.O_RDWR, unix.LOCK_EX
	}
	if f, err = openFile(s.Path(), flag); err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	err = s.flock(ctx, f, how)
	switch info, statErr := f.Stat(); {
	case cmp.Or(err, statErr) != nil:
		err = fmt.Errorf("journal: %s: %w", s.Path(), cmp.Or(err, statErr))
	case !samePath(s.Path(), f):
		err = errAgain
	case info.Size() == 0: // bbolt would begin a new journal in it
		err = fmt.Errorf("%w: empty file", ErrDamaged)
	default:
		err = s.trust(queue, write)
	}
	if err != nil {
		_ = f.Close()
	}
	return f, err
}

// trust verifies the journal file, unless the store is trusting and the last commit succeeded. If
// the last commit was in this boot and may have failed, a writer replaces the file with a copy:
// after a failed sync, the kernel treats pages that are not on disk as written.
func (s *Store) trust(queue *os.File, write bool) error {
	last := s.lastCommit(queue)
	if last == succeeded && s.Trusting {
		return nil
	}
	data, err := verify(s.Path())
	if err != nil || !write || last != began {
		return err
	}
	err = s.replace(queue, func(path string) error { return os.WriteFile(path, data, 0o600) })
	return cmp.Or(err, errAgain)
}

// inTx runs fn, and commits what it wrote.
func (s *Store) inTx(tx *Tx, file, queue *os.File, fn func(*Tx) error) error {
	if meta := tx.btx.Bucket(bucketMeta); meta != nil {
		if err := s.checkFormat(meta.Get(keyFormat)); err != nil {
			return err
		}
	}
	for _, name := range buckets {
		if tx.btx.Bucket(name) == nil {
			return fmt.Errorf("%w: no bucket %q", ErrDamaged, name)
		}
	}
	if err := fn(tx); err != nil || tx.size == 0 {
		return err
	}
	if err := tx.makeRoom(file); err != nil {
		return fmt.Errorf("journal: %s: %w", s.Path(), err)
	}
	err := s.setCommit(queue, began)
	s.at("commit")
	if err == nil {
		err = tx.btx.Commit()
	}
	if err == nil {
		s.at("committed")
		_ = s.setCommit(queue, succeeded)
	}
	return err
}

// blame decides whether bbolt's error means that the file is damaged. A kernel error, such as EIO,
// may be temporary, and does not count as damage. bbolt also reports damage if the kernel cannot
// read a meta page, so blame reads the whole file itself.
func (s *Store) blame(err error) error {
	var errno syscall.Errno
	switch {
	case errors.As(err, &errno):
		return fmt.Errorf("journal: %w", err)
	}
	data, cause := verify(s.Path())
	if m, ok := newestMeta(data); ok && m.version > bboltVersion { // its checksum is right
		return s.newer("bbolt's format", int(m.version), bboltVersion)
	}
	return cmp.Or(cause, fmt.Errorf("%w: %w", ErrDamaged, err))
}

func (s *Store) at(point string) {
	if s.Point != nil {
		s.Point(point)
	}
}

// chunk is the unit, in bytes, by which the file grows.
const chunk = 64 << 10

// makeRoom allocates disk space after the pages in use, so that the disk cannot run full during the
// commit. bbolt only sets the file's size, which allocates nothing. For an ADD's intent, makeRoom
// also allocates space for the ADD's later commits. If one of these failed, the journal would have
// to be copied (see trust), which needs even more space. makeRoom does nothing on a file system
// that cannot allocate in advance. On a copy-on-write file system (btrfs, ZFS), a commit can still
// run out of space.
func (tx *Tx) makeRoom(file *os.File) error {
	var info unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &info); err != nil {
		return err
	}
	size := tx.pages() * pageSize
	if tx.begins {
		size *= 3
	}
	end := tx.btx.Size() + size
	// a sparse file has fewer blocks, of 512 bytes each, than its size needs
	if info.Size >= end && info.Blocks >= end/512 {
		return nil
	}
	end = (end + chunk - 1) / chunk * chunk
	err := error(unix.EINTR)
	for errors.Is(err, unix.EINTR) {
		err = unix.Fallocate(int(file.Fd()), 0, 0, end)
	}
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("cannot allocate %d KiB: %w", (end-tx.btx.Size())/1024, err)
	}
	return nil
}

// pages returns the maximum number of pages that the commit writes. bbolt never overwrites a page:
// it copies each changed page, and the pages above it, into unused pages. For a changed record, it
// copies the whole leaf. A leaf is less than five times as large as the record: all records of a
// network have about the same size, and bbolt splits a leaf of five records that are each larger
// than a page. Another 12 pages are for two leaves that are split or merged, the branches, the list
// of buckets, and the page that remains free at the end. In addition, the freelist takes 8 bytes
// for each free page.
func (tx *Tx) pages() int64 {
	return int64(5*(tx.size/pageSize+1)) + 12 + tx.btx.Size()/pageSize*8/pageSize
}
