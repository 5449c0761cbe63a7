// Package durable replaces and removes files so that a crash or a power loss leaves either the old
// state or the new one.
package durable

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Replace replaces or creates a file. After a crash or a power loss, the file is either complete or
// unchanged. The new file belongs to this process's user. Replace first writes a temporary file in
// the same directory, with an extension that no runtime loads. If the process is killed, the
// temporary file stays until it is stale and a later Replace, Rename or Remove of the same path
// removes it. The calls:
//
//	openat(DIR, ".NAME.*.tmp", O_CREAT|O_EXCL), write, fchmod, fsync, close, rename,
//	open(DIR), fsync, close
func Replace(path string, content io.Reader, mode fs.FileMode) error {
	return replace(path, content, func(f *os.File) error { return f.Chmod(mode) })
}

// ReplaceLike is Replace, but copies another file's mode and owner (fchown before fchmod).
func ReplaceLike(path string, content io.Reader, like fs.FileInfo) error {
	return replace(path, content, func(f *os.File) error {
		var err error
		if st, ok := like.Sys().(*syscall.Stat_t); ok {
			err = f.Chown(int(st.Uid), int(st.Gid))
		}
		return errors.Join(err, f.Chmod(like.Mode().Perm()))
	})
}

func replace(path string, content io.Reader, own func(*os.File) error) (err error) {
	RemoveTemporary(path)
	dir, name := filepath.Dir(path), filepath.Base(path)
	f, err := os.CreateTemp(dir, "."+name+".*.tmp")
	if err != nil {
		var at *fs.PathError
		if errors.As(err, &at) {
			at.Path = path // the temporary name would mean nothing to a user
		}
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	_, err = io.Copy(f, content)
	if err = errors.Join(err, own(f), f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if err = os.Rename(f.Name(), path); err != nil {
		return err
	}
	return syncDir(dir)
}

// Create creates an empty file, which takes no space on most file systems, or empties an existing
// one. Its calls:
//
//	openat(DIR, NAME, O_CREAT|O_TRUNC), close, open(DIR), fsync, close
func Create(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(f.Close(), syncDir(filepath.Dir(path)))
}

// stale is the age from which a temporary file counts as left behind by a killed process.
const stale = time.Minute

// RemoveTemporary removes Replace's stale temporary files for a path, and returns the paths of the
// removed files. It ignores errors, because such files do no harm.
func RemoveTemporary(path string) (removed []string) {
	dir, name := filepath.Dir(path), filepath.Base(path)
	files, _ := os.ReadDir(dir)
	for _, f := range files {
		number, found := strings.CutPrefix(f.Name(), "."+name+".")
		number, isTemporary := strings.CutSuffix(number, ".tmp")
		if !found || !isTemporary || strings.Trim(number, "0123456789") != "" {
			continue
		}
		temporary := filepath.Join(dir, f.Name())
		if info, err := f.Info(); err == nil && info.Mode().IsRegular() &&
			time.Since(info.ModTime()) >= stale && os.Remove(temporary) == nil {
			removed = append(removed, temporary)
		}
	}
	return removed
}

// Rename durably renames a file within its directory, and replaces an existing file. Its calls:
//
//	rename, open(DIR), fsync, close
func Rename(path, to string) error {
	RemoveTemporary(path)
	if err := os.Rename(path, to); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

// Remove removes a file durably. A missing file is not an error. Its calls:
//
//	unlink, open(DIR), fsync, close
func Remove(path string) error {
	RemoveTemporary(path)
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// NotDirectory returns why a path is not a directory, or "" if it is one or is unreadable.
func NotDirectory(path string) string {
	switch info, err := os.Stat(path); {
	case errors.Is(err, fs.ErrNotExist):
		return "no such directory"
	case errors.Is(err, syscall.ENOTDIR), err == nil && !info.IsDir():
		return "not a directory"
	}
	return ""
}

// CannotCreate returns why this process cannot create a file in a directory, or nil if it can. If
// the directory is missing, CannotCreate checks the nearest parent directory that exists.
func CannotCreate(dir string) error {
	for !Exists(dir) && dir != filepath.Dir(dir) {
		dir = filepath.Dir(dir)
	}
	var st unix.Statfs_t
	err := unix.Access(dir, unix.W_OK)
	switch statErr := unix.Statfs(dir, &st); {
	case errors.Is(err, unix.EROFS):
		return fmt.Errorf("%s is on a %w", dir, err) // the error reads "read-only file system"
	case err == nil && statErr == nil && st.Files > 0 && st.Ffree == 0:
		err = unix.ENOSPC
	}
	if err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	return nil
}

func Exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
