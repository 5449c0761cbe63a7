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

// Store is the journal of a node: the folder with the file, its queue and the attachments' locks. The zero value but
// for Dir is ready to use, nothing is opened before it is needed and nothing stays open.
//
// A transaction runs so:
//
//  1. Take the queue's flock, with a deadline. Readers take it too: bbolt's own lock polls every 50 ms, and a reader
//     that held it while it prints would block every pod of the node.
//  2. See that the queue's file is still the one at its path, else start again.
//  3. Open the file, made first if there is none (see create), take its flock, see that it is the one at its path and
//     that it is whole and can be found again (see verify and syncFolders).
//  4. One bbolt transaction.
//  5. Close the file, release the queue.
//
// A panic or a SIGBUS in bbolt ends in an error. If the file is then proven to be damaged it is set aside, a fresh one
// is begun and the transaction runs once more, so the function given to Update must bear to be run twice.
type Store struct {
	Dir    string
	Logger *slog.Logger
	// Point is called with the name of each place where a crash would leave another state on the disk. Tests set it.
	Point func(name string)

	mu   sync.Mutex
	held map[Key]bool // the locks that this process holds

	bootOnce sync.Once
	boot     string // see bootID
}

// MaxWait bounds the wait for the queue where the caller's context has no earlier deadline. A node that starts its 110 pods
// at once gets them through, one transaction each, on a disk that takes 45 ms for a sync.
const MaxWait = 10 * time.Second

// strangerWait bounds the wait for the file itself. The queue is ours: only a stranger (a backup, bbolt's own tool) can
// hold the file's lock.
const strangerWait = time.Second

const (
	fileName  = "journal.db"
	queueName = "journal.lock"
	locksName = "locks"
)

// ErrDamaged is returned by a View of a file that is damaged. The next Update sets the file aside and begins a new one.
var ErrDamaged = errors.New("journal: the file is damaged")

var errAgain = errors.New("journal: the file was replaced")

// Path returns the path of the bbolt file.
func (s *Store) Path() string { return filepath.Join(s.Dir, fileName) }

// Update runs fn in one read-write transaction. When it returns nil, what fn wrote survives a crash and a loss of
// power. When it returns an error nothing was written, unless the error came from the commit's own sync.
func (s *Store) Update(ctx context.Context, fn func(*Tx) error) error {
	if err := s.makeDir(); err != nil {
		return err
	}
	return s.run(ctx, true, fn)
}

// View runs fn in one read-only transaction and changes nothing on the disk. Without a journal fn sees an empty one.
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
	ctx, cancel := context.WithTimeout(ctx, MaxWait)
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

// transact opens the file, runs fn and closes it. The caller holds the queue.
func (s *Store) transact(ctx context.Context, queue *os.File, write bool, fn func(*Tx) error) (err error) {
	var file *os.File
	debug.SetPanicOnFault(true)
	defer debug.SetPanicOnFault(false)
	defer func() {
		r := recover()
		if r == nil {
			return
		}
		err = fmt.Errorf("journal: %s: panic: %v", s.Path(), r)
		if file == nil {
			return
		}
		if damage := verify(file); errors.Is(damage, ErrDamaged) {
			err = fmt.Errorf("%w: %w", damage, err)
		}
		abandon(file)
	}()

	if write {
		if err := s.create(); err != nil {
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
		return s.confirm(classify(err))
	}
	if write {
		err = db.Update(func(btx *bolt.Tx) error { return s.inTx(btx, fn) })
		if err == nil {
			s.stamp(queue, file)
		}
	} else {
		err = db.View(func(btx *bolt.Tx) error { return s.inTx(btx, fn) })
	}
	return errors.Join(err, db.Close())
}

// abandon gives up a file in which bbolt panicked. bbolt's own locks are in an unknown state, so its memory stays mapped,
// and that keeps the flock unless it is undone by name.
func abandon(file *os.File) {
	_ = syscall.Flock(int(file.Fd()), syscall.LOCK_UN)
	_ = file.Close()
}

// open opens the file, with its lock held, if it is the one at its path and whole.
func (s *Store) open(ctx context.Context, queue *os.File, write bool) (*os.File, error) {
	flag, how := os.O_RDONLY, unix.LOCK_SH
	if write {
		flag, how = os.O_RDWR, unix.LOCK_EX
	}
	f, err := openFile(s.Path(), flag)
	if err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, strangerWait)
	defer cancel()
	if err := flock(ctx, f, how); err != nil {
		return nil, fmt.Errorf("journal: %s is locked by another program: %w", s.Path(), err)
	}
	switch {
	case !samePath(f, s.Path()):
		err = errAgain
	case !s.stamped(queue, f):
		if err = verify(f); err == nil && write {
			err = s.syncFolders()
		}
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

func (s *Store) inTx(btx *bolt.Tx, fn func(*Tx) error) error {
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
	if err := fn(&Tx{btx}); err != nil {
		return err
	}
	if btx.Writable() {
		s.at("commit")
		btx.OnCommit(func() { s.at("committed") })
	}
	return nil
}

// classify tells damage from all that can be wrong around a file: what the kernel says is never damage (EIO on a disk
// that comes back loses nothing), what bbolt says of the content is.
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

// confirm returns the verdict on a file that bbolt did not open. To bbolt a meta page that the disk does not give is a
// damaged one, so damage is believed only of a file of which all can be read.
func (s *Store) confirm(verdict error) error {
	if !errors.Is(verdict, ErrDamaged) {
		return verdict
	}
	f, err := openFile(s.Path(), os.O_RDONLY)
	if err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	defer f.Close()
	if err := verify(f); err != nil {
		return err
	}
	return verdict
}

// at marks a place where a crash can be tried.
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
