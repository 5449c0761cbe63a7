package journal

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"
)

// create creates the file if there is none. The caller holds the queue. A crash leaves either no
// file or a complete one, and at most a journal.db.new that the next call replaces. create does not
// sync the directory; the first writer that opens the file does (see syncFolders).
//
//	unlink   journal.db.new
//	open     journal.db.new, mode 0600
//	pwrite   meta pages, buckets, format; fdatasync
//	fsync    journal.db.new
//	rename   journal.db.new → journal.db
func (s *Store) create() error {
	switch info, err := os.Lstat(s.Path()); {
	case err == nil && info.Mode().IsRegular(): // perhaps an empty one: see verify
		return nil
	case err == nil:
		return fmt.Errorf("journal: %s is not a regular file; move it away", s.Path())
	case !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("journal: %w", err)
	}
	tmp := s.Path() + ".new"
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("journal: %w", err)
	}
	if err := fill(tmp); err != nil {
		return fmt.Errorf("journal: %s: %w", tmp, err)
	}
	s.at("created")
	if err := os.Rename(tmp, s.Path()); err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	s.at("renamed")
	return nil
}

// syncFolders ensures that the file can be found after a power loss. It syncs the directory and its
// parents on the same file system, because some may be as new as the file, and the process that
// created them may have been killed before it could sync them. So every writer to a file without a
// matching stamp calls syncFolders first.
func (s *Store) syncFolders() error {
	var here, above unix.Stat_t
	dir := s.Dir
	if err := unix.Stat(dir, &here); err != nil {
		return fmt.Errorf("journal: %w", &fs.PathError{Op: "stat", Path: dir, Err: err})
	}
	for {
		if err := syncPath(dir); err != nil {
			return err
		}
		parent := filepath.Dir(dir)
		if parent == dir || unix.Stat(parent, &above) != nil || above.Dev != here.Dev {
			return nil //nolint:nilerr // above is not ours
		}
		dir = parent
	}
}

// fill writes an empty journal to a new file and syncs it.
func fill(path string) error {
	db, err := bolt.Open(path, 0o600, &bolt.Options{Timeout: time.Second, NoStatistics: true})
	if err != nil {
		return err
	}
	err = db.Update(func(tx *bolt.Tx) error {
		for _, name := range buckets {
			if _, err := tx.CreateBucket(name); err != nil {
				return err
			}
		}
		data, err := json.Marshal(format{Writer: Version, OldestReader: 1})
		if err != nil {
			return err
		}
		meta := tx.Bucket(bucketMeta)
		return errors.Join(meta.Put(keyFormat, data),
			meta.Put(keyDigest, new(digest).encode(uint64(tx.ID()))))
	})
	if err := errors.Join(err, db.Close()); err != nil {
		return err
	}
	return syncPath(path)
}

// setAside renames a damaged file, to keep it and start a new one. The caller holds the queue.
func (s *Store) setAside(cause error) error {
	aside := fmt.Sprintf("%s.damaged-%s", s.Path(),
		time.Now().UTC().Format("20060102T150405.000000000Z"))
	if err := os.Rename(s.Path(), aside); err != nil {
		return fmt.Errorf("%w; cannot set it aside: %w", cause, err)
	}
	s.logger().Error("damaged journal set aside, starting a new one; "+
		"DELs of earlier attachments use the configuration that the runtime sends",
		"file", aside, "err", cause)
	return syncPath(s.Dir)
}

// makeDir creates a missing directory (0700), and checks it before anything is created in it.
func (s *Store) makeDir() error {
	return s.makeDirs(s.Dir, filepath.Join(s.Dir, locksName))
}

func (s *Store) makeDirs(dirs ...string) error {
	if !filepath.IsAbs(s.Dir) {
		return fmt.Errorf("journal: stateDir %q is not an absolute path", s.Dir)
	}
	for _, dir := range dirs {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("journal: %w", err)
		}
		if err := checkDir(dir); err != nil {
			return err
		}
	}
	return nil
}

// checkDir rejects a directory that is a link, or that anyone but this user or root can write to:
// whoever can write there can make root run any DEL.
func checkDir(dir string) error {
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return fmt.Errorf("journal: %w", &fs.PathError{Op: "lstat", Path: dir, Err: err})
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return fmt.Errorf("journal: %s is not a directory; move it away", dir)
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
	if err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	return nil
}
