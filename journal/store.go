package journal

import (
	"context"
	"errors"
	"fmt"
	"io"
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
)

// Store is the journal of a node: the folder with the file, its queue and the attachments' locks. The zero value but
// for Dir is ready to use, nothing is opened before it is needed and nothing stays open.
//
// A transaction runs so:
//
//  1. Take the queue's flock, with a deadline. Readers take it too: bbolt's own lock polls every 50 ms, and a reader
//     that held it while it prints would block every pod of the node.
//  2. See that the queue's file is still the one at its path, else start again.
//  3. Open the file, made first if there is none (see create), and see that it is the one at its path.
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
}

// MaxWait bounds the wait for the queue where the caller's context has no earlier deadline.
const MaxWait = 5 * time.Second

const (
	fileName  = "journal.db"
	queueName = "journal.lock"
	locksName = "locks"
)

var (
	errCorrupt = errors.New("journal: the file is damaged")
	errAgain   = errors.New("journal: the file was replaced")
)

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
	unlock, err := s.queue(ctx, write)
	if err != nil {
		return err
	}
	defer unlock()
	for try := 0; ; try++ {
		err := s.transact(write, fn)
		switch {
		case errors.Is(err, errAgain) && try < 3:
		case errors.Is(err, errCorrupt) && write && try == 0:
			if err := s.setAside(err); err != nil {
				return err
			}
		default:
			return err
		}
	}
}

// transact opens the file, runs fn and closes it. The caller holds the queue.
func (s *Store) transact(write bool, fn func(*Tx) error) (err error) {
	var file *os.File
	debug.SetPanicOnFault(true)
	defer debug.SetPanicOnFault(false)
	defer func() {
		r := recover()
		if r == nil {
			return
		}
		abandon(file)
		err = fmt.Errorf("journal: %s: panic: %v", s.Path(), r)
		if damage := s.probe(); damage != nil {
			err = fmt.Errorf("%w: %w: %w", errCorrupt, damage, err)
		}
	}()

	if write {
		if err := s.create(); err != nil {
			return err
		}
	}
	db, err := bolt.Open(s.Path(), 0o600, s.boltOptions(write, &file))
	if err != nil {
		return classify(s.Path(), err)
	}
	if !samePath(file, s.Path()) {
		_ = db.Close()
		return errAgain
	}
	if write {
		err = db.Update(func(btx *bolt.Tx) error { return s.inTx(btx, file, fn) })
	} else {
		err = db.View(func(btx *bolt.Tx) error { return s.inTx(btx, file, fn) })
	}
	return errors.Join(err, db.Close())
}

// abandon gives up a file in which bbolt panicked. bbolt's own locks are in an unknown state, so its memory stays mapped,
// and that keeps the flock unless it is undone by name.
func abandon(file *os.File) {
	if file != nil {
		_ = syscall.Flock(int(file.Fd()), syscall.LOCK_UN)
		_ = file.Close()
	}
}

// checkSize sees that the file has all the pages that its header speaks of.
func checkSize(btx *bolt.Tx, file *os.File) error {
	info, err := file.Stat()
	if err == nil && btx.Size() > info.Size() {
		return fmt.Errorf("%w: it has %d bytes of %d", errCorrupt, info.Size(), btx.Size())
	}
	return err
}

func (s *Store) inTx(btx *bolt.Tx, file *os.File, fn func(*Tx) error) error {
	if err := checkSize(btx, file); err != nil {
		return err
	}
	meta := btx.Bucket(bucketMeta)
	if meta == nil {
		return fmt.Errorf("%w: no bucket %q", errCorrupt, bucketMeta)
	}
	if err := checkFormat(meta.Get(keyFormat)); err != nil {
		return err
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

func (s *Store) boltOptions(write bool, file **os.File) *bolt.Options {
	return &bolt.Options{
		Timeout:      time.Second, // the queue is ours: only a stranger (a backup, bbolt's own tool) can hold it
		ReadOnly:     !write,
		NoStatistics: true,
		OpenFile: func(path string, flag int, mode os.FileMode) (*os.File, error) {
			f, err := os.OpenFile(path, flag&^os.O_CREATE|syscall.O_NOFOLLOW, mode)
			*file = f
			return f, err
		},
	}
}

// classify tells damage from all that can be wrong around a file: what the kernel says is never damage (EIO on a disk
// that comes back loses nothing), what bbolt says of the content is.
func classify(path string, err error) error {
	var errno syscall.Errno
	switch {
	case errors.As(err, &errno):
		return fmt.Errorf("journal: %w", err)
	case errors.Is(err, bolterrors.ErrTimeout):
		return fmt.Errorf("journal: %s is locked by another program", path)
	case errors.Is(err, bolterrors.ErrVersionMismatch):
		return fmt.Errorf("%w (%w)", ErrNewer, err)
	}
	return fmt.Errorf("%w: %w", errCorrupt, err)
}

// probe reads the whole file and visits every key in it. It returns what is wrong with the content, or nil if nothing
// is, or if the file could not be read: then nothing is known.
func (s *Store) probe() (damage error) {
	f, err := os.Open(s.Path())
	if err != nil {
		return nil
	}
	_, err = io.Copy(io.Discard, f)
	_ = f.Close()
	if err != nil {
		return nil
	}
	var file *os.File
	debug.SetPanicOnFault(true)
	defer func() {
		if r := recover(); r != nil {
			damage = fmt.Errorf("%v", r)
		}
		abandon(file)
	}()
	options := s.boltOptions(false, &file)
	options.PreLoadFreelist = true
	db, err := bolt.Open(s.Path(), 0o600, options)
	if err != nil {
		if err = classify(s.Path(), err); errors.Is(err, errCorrupt) {
			return err
		}
		return nil
	}
	return db.View(func(btx *bolt.Tx) error {
		if err := checkSize(btx, file); err != nil {
			return err
		}
		return btx.ForEach(func(_ []byte, b *bolt.Bucket) error {
			return b.ForEach(func(_, _ []byte) error { return nil })
		})
	})
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
