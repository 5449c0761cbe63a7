package journal

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	bolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
	"golang.org/x/sys/unix"
)

// Store is the journal of a node: the directory with the file, its queue and the attachments'
// locks. A Store needs only Dir. It opens nothing before it is needed and keeps nothing open.
//
// A transaction:
//
//  1. Take the queue's flock, with a deadline. Readers take it too: bbolt's own lock polls every 50
//     ms, and writers that waited there for readers would starve.
//  2. Check that the queue's file is still the one at its path; otherwise start again.
//  3. Open the file, created if there is none (see create), and take its flock, which readers
//     share. Check that it is the file at its path and whole, and that its name is on the disk (see
//     verify, settle).
//  4. A reader releases the queue. So readers read at once, and none comes between a writer that
//     waits for them and the file.
//  5. Run one bbolt transaction. Its pages and the meta page that makes them count are written
//     together, and one sync makes them durable: see digest for a loss of power before it.
//  6. Close the file and release the queue.
//
// A panic or a SIGBUS in bbolt becomes an error. If the file is then proven to be damaged, the
// store sets it aside, begins a new one and runs the transaction once more. So a function given to
// Update may run twice.
type Store struct {
	Dir    string
	Logger *slog.Logger
	// Point is called with the name of each place at which a crash leaves another state on the
	// disk. Tests set it.
	Point func(name string)

	wait     time.Duration // in place of MaxWait; tests set it
	bootOnce sync.Once
	boot     string // see bootID
}

// strangerWait limits the wait for a file that another program writes. unwind holds the queue, so
// only an unrelated program (bbolt's own tool) can have that lock.
const strangerWait = time.Second

const (
	fileName  = "journal.db"
	queueName = "journal.lock"
	locksName = "locks"
)

// ErrDamaged is returned by a View of a damaged file. The next Update sets the file aside and
// starts a new one.
var ErrDamaged = errors.New("journal: the file is damaged")

var (
	errAgain     = errors.New("journal: the file was replaced")
	errUnchanged = errors.New("journal: nothing to commit")
)

// Holds reports whether the last written version of an entry is in the journal at the path, and not
// in one that was set aside or removed since.
func (s *Store) Holds(e *Entry) bool {
	there, err := os.Lstat(s.Path())
	return e.file != nil && err == nil && os.SameFile(there, e.file)
}

// Path returns the path of the bbolt file.
func (s *Store) Path() string { return filepath.Join(s.Dir, fileName) }

// Update runs fn in one read-write transaction. When it returns nil, what fn wrote survives a crash
// and a loss of power; if fn wrote nothing, nothing is committed. When it returns an error, nothing
// was written, unless the commit's own sync failed and the transaction could not be taken back.
func (s *Store) Update(ctx context.Context, fn func(*Tx) error) error {
	if err := s.makeDir(); err != nil {
		return err
	}
	return s.run(ctx, true, fn)
}

// View runs fn in one read-only transaction and changes nothing on the disk. Without a journal, fn
// sees an empty one. Other Views may run at the same time; an Update waits for fn.
func (s *Store) View(ctx context.Context, fn func(*Tx) error) error {
	if _, err := os.Lstat(s.Path()); errors.Is(err, fs.ErrNotExist) {
		return fn(&Tx{})
	}
	if err := checkDir(s.Dir); err != nil {
		return err
	}
	return s.run(ctx, false, fn)
}

func (s *Store) run(ctx context.Context, write bool, fn func(*Tx) error) error {
	ctx, cancel := s.whileItMoves(ctx)
	defer cancel()
	queue, err := s.queue(ctx, write)
	if err != nil {
		return err
	}
	defer queue.Close()
	for try := 0; ; try++ {
		err := s.transact(ctx, queue, write, fn)
		switch {
		case errors.Is(err, errAgain) && try < 3:
		case errors.Is(err, ErrDamaged) && write && try == 0:
			if err := s.setAside(err); err != nil {
				return err
			}
		default:
			return err
		}
	}
}

// transact opens the file, runs fn and closes it. The caller holds the queue; transact releases it
// for a reader as soon as that has the file.
func (s *Store) transact(
	ctx context.Context, queue *os.File, write bool, fn func(*Tx) error,
) (err error) {
	var file *os.File
	var found *state
	debug.SetPanicOnFault(true)
	defer debug.SetPanicOnFault(false)
	defer func() {
		if r := recover(); r != nil {
			err = s.panicked(r, file)
		}
	}()
	if write {
		if err := s.create(); err != nil {
			return err
		}
	}
	if file, found, err = s.open(ctx, queue, write); err != nil {
		return err
	}
	info, err := file.Stat()
	if err != nil {
		return errors.Join(fmt.Errorf("journal: %w", err), file.Close())
	}
	db, err := bolt.Open(s.Path(), 0o600, &bolt.Options{
		ReadOnly:     !write,
		NoStatistics: true,
		NoSync:       true, // see sync
		OpenFile:     func(string, int, os.FileMode) (*os.File, error) { return file, nil },
	})
	if err != nil {
		return s.confirm(classify(err))
	}
	var transaction uint64
	in := func(btx *bolt.Tx) error {
		transaction = uint64(btx.ID())
		return s.inTx(&Tx{btx: btx, file: info}, queue, found, fn)
	}
	if !write {
		_ = queue.Close()
		return errors.Join(db.View(in), db.Close())
	}
	switch err = db.Update(in); {
	case err == nil:
		if err = s.sync(db, file, transaction); err == nil {
			s.stamp(queue, file)
		}
	case errors.Is(err, errUnchanged):
		err = nil
	}
	return errors.Join(err, db.Close())
}

// sync makes a committed transaction durable. If that fails, it takes the transaction back: pages
// that the disk did not take count as written from then on.
func (s *Store) sync(db *bolt.DB, file *os.File, transaction uint64) error {
	err := db.Sync()
	if err == nil {
		return nil
	}
	err = fmt.Errorf("journal: %s: fdatasync: %w", s.Path(), err)
	return errors.Join(err, takeBack(file, transaction))
}

// takeBack makes the transaction before a given one count, if the file has that one. Some file
// systems have taken its pages back themselves (btrfs, NFS): then the newest one was synced.
func takeBack(file *os.File, transaction uint64) error {
	found, err := verify(file)
	if err != nil {
		return err
	}
	if metas := metasOf(found.data); len(metas) == 0 || metas[0].transaction != transaction {
		return nil
	}
	return found.dropNewest(file)
}

// panicked turns a panic into an error, which is ErrDamaged only if the file is damaged, and gives
// up the file. The state of bbolt's own locks is unknown, so its memory stays mapped. The mapping
// would keep the flock, so panicked unlocks it explicitly.
func (s *Store) panicked(r any, file *os.File) error {
	err := fmt.Errorf("journal: %s: panic: %v", s.Path(), r)
	if file == nil {
		return err
	}
	if _, damage := verify(file); errors.Is(damage, ErrDamaged) {
		err = fmt.Errorf("%w: %w", damage, err)
	}
	_ = syscall.Flock(int(file.Fd()), syscall.LOCK_UN)
	_ = file.Close()
	return err
}

// open opens and locks the file, if it is whole and the one at its path. It returns what it found,
// unless the stamp fits.
func (s *Store) open(
	ctx context.Context, queue *os.File, write bool,
) (f *os.File, found *state, err error) {
	flag := os.O_RDONLY
	if write {
		flag = os.O_RDWR
	}
	if f, err = openFile(s.Path(), flag); err != nil {
		return nil, nil, fmt.Errorf("journal: %w", err)
	}
	if err := lockOpened(ctx, f, write); err != nil {
		return nil, nil, fmt.Errorf("journal: %s is locked by another program: %w", s.Path(), err)
	}
	defer func() {
		if err != nil {
			_ = f.Close()
		}
	}()
	if !samePath(f, s.Path()) {
		return f, nil, errAgain
	}
	if s.stamped(queue, f) {
		return f, nil, nil
	}
	if found, err = verify(f); err != nil {
		return f, nil, err
	}
	if write {
		return f, found, s.settle(f, found)
	}
	if found.torn {
		defer f.Close()
		f, err = found.copyWithoutNewest()
	}
	return f, found, err
}

// settle makes durable what a writer found, before it overwrites what the transaction before needs:
// that transaction counts if the power goes and the one found is not on the disk.
func (s *Store) settle(f *os.File, found *state) error {
	if found.torn {
		s.logger().Warn("dropping the journal's last transaction, "+
			"which was not on the disk when the power failed", "file", s.Path())
		if err := found.dropNewest(f); err != nil {
			return err
		}
	}
	if err := unix.Fdatasync(int(f.Fd())); err != nil {
		return fmt.Errorf("journal: %s: fdatasync: %w", s.Path(), err)
	}
	return s.syncFolders()
}

// lockOpened takes the flock of the bbolt file, and closes the file on an error. A writer waits for
// the readers that have it as long as for the queue, and for a stranger that writes strangerWait.
func lockOpened(ctx context.Context, f *os.File, write bool) error {
	short, cancel := context.WithTimeout(ctx, strangerWait)
	defer cancel()
	if err := flock(short, f, unix.LOCK_SH); err != nil || !write {
		return err
	}
	return flock(ctx, f, unix.LOCK_EX)
}

func (s *Store) inTx(tx *Tx, queue *os.File, found *state, fn func(*Tx) error) error {
	btx := tx.btx
	meta := btx.Bucket(bucketMeta)
	if meta == nil {
		return fmt.Errorf("%w: no bucket %q", ErrDamaged, bucketMeta)
	}
	if err := checkFormat(meta.Get(keyFormat)); err != nil {
		return err
	}
	for _, name := range buckets {
		if btx.Bucket(name) == nil {
			return fmt.Errorf("%w: no bucket %q", ErrDamaged, name)
		}
	}
	if btx.Writable() {
		btx.OnCommit(func() { s.at("committed") })
	}
	if tx.digest = decodeDigest(meta.Get(keyDigest)); found != nil {
		tx.digest = found.sum
	}
	if err := fn(tx); err != nil || !btx.Writable() {
		return err
	}
	if !tx.changed {
		return errUnchanged // makes bbolt roll back
	}
	sum := tx.digest.encode(uint64(btx.ID()))
	if err := errors.Join(meta.Put(keyDigest, sum), s.unstamp(queue)); err != nil {
		return err
	}
	s.at("commit")
	return nil
}

// classify distinguishes damage from other errors. An error of the kernel is never damage, because
// a disk that recovers from EIO loses nothing; an error of bbolt about the content is.
func classify(err error) error {
	var errno syscall.Errno
	switch {
	case errors.As(err, &errno):
		return fmt.Errorf("journal: %w", err)
	case errors.Is(err, bolterrors.ErrVersionMismatch):
		return fmt.Errorf("%w (%w)", ErrNewer, err)
	}
	return fmt.Errorf("%w: %w", ErrDamaged, err)
}

// confirm verifies an error of opening the file. bbolt mistakes a meta page that the disk cannot
// read for a damaged one, so confirm reports damage only if the whole file can be read.
func (s *Store) confirm(verdict error) error {
	if !errors.Is(verdict, ErrDamaged) {
		return verdict
	}
	f, err := openFile(s.Path(), os.O_RDONLY)
	if err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	defer f.Close()
	if _, err := verify(f); err != nil {
		return err
	}
	return verdict
}

// at marks a place where tests can crash.
func (s *Store) at(point string) {
	if s.Point != nil {
		s.Point(point)
	}
}

func (s *Store) logger() *slog.Logger {
	if s.Logger == nil {
		return slog.New(slog.DiscardHandler)
	}
	return s.Logger
}
