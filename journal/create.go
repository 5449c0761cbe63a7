package journal

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"
)

// replace creates the journal, or replaces it, with a file that write writes. The caller has locked
// the queue file. A crash leaves the old journal (or
// none, if none existed) or the new one. It may also leave a file journal.db.new, which the next
// call removes.
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
	if err := errors.Join(s.setCommit(queue, began), os.RemoveAll(tmp)); err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	defer func() { _ = os.Remove(tmp) }() // after the rename, this does nothing
	if err := write(tmp); err != nil {
		return fmt.Errorf("journal: %s: %w", tmp, err)
	}
	if err := syncPath(tmp); err != nil {
		return err
	}
	s.at("created")
	if err := os.Rename(tmp, s.Path()); err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	s.at("renamed")
	if err := s.syncFolders(); err != nil {
		return err
	}
	return s.setCommit(queue, succeeded)
}

// syncFolders ensures that the file can be found after a power loss. It syncs the directory and
// its parents on the same file system, because some of them may be new, and the process that
// created them may have been killed before it could sync them.
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

// fill writes an empty journal to a new file.
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
		data, err := json.Marshal(format{Writer: Version, OldestReader: Version})
		if err != nil {
			return err
		}
		return tx.Bucket(bucketMeta).Put(keyFormat, Seal(keyFormat, data))
	})
	return errors.Join(err, db.Close())
}

// setAside renames a damaged journal file, so that a new journal can be created. The caller has
// locked the queue file.
func (s *Store) setAside(cause error) error {
	aside := fmt.Sprintf("%s.damaged-%s", s.Path(),
		time.Now().UTC().Format("20060102T150405.000000000Z"))
	if err := os.Rename(s.Path(), aside); err != nil {
		return fmt.Errorf("%w; cannot set it aside: %w", cause, err)
	}
	log := cmp.Or(s.Logger, slog.New(slog.DiscardHandler))
	log.Error("the damaged journal was set aside, and a new one is started; "+
		"DELs of earlier attachments use the configuration that the runtime sends",
		"file", aside, "err", cause)
	return syncPath(s.Dir)
}

// makeDir creates the state directory and its directory of lock files (mode 0700) if they are
// missing. It checks each directory before it creates anything in it.
func (s *Store) makeDir() error {
	if !filepath.IsAbs(s.Dir) {
		return fmt.Errorf("journal: stateDir %q is not an absolute path", s.Dir)
	}
	for _, dir := range []string{s.Dir, filepath.Join(s.Dir, locksName)} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("journal: %w", err)
		}
		if err := checkDir(dir); err != nil {
			return err
		}
	}
	return nil
}

// checkDir rejects a path that is not a directory, such as a symbolic link. It also rejects a
// directory that anyone except this user and root owns or can write to, because that user could
// make root run any DEL.
func checkDir(dir string) error {
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return fmt.Errorf("journal: %w", &fs.PathError{Op: "lstat", Path: dir, Err: err})
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return fmt.Errorf("journal: %s is not a directory; move it out of the way", dir)
	case st.Uid != 0 && int(st.Uid) != os.Geteuid():
		return fmt.Errorf("journal: %s belongs to user %d; chown it to root", dir, st.Uid)
	case st.Mode&0o022 != 0:
		return fmt.Errorf("journal: %s is writable by others (mode %04o); chmod it to 0700", dir,
			st.Mode&0o7777)
	}
	return nil
}

// syncPath fsyncs a file or a directory.
func syncPath(path string) error {
	f, err := os.Open(path)
	if err == nil {
		err = errors.Join(f.Sync(), f.Close())
	}
	if err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	return nil
}
