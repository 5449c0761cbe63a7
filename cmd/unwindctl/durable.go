package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// replaceFile makes a file have a content: after a crash or a loss of power it has either all of it, or is as it was. Owner and
// mode are those of like, a file that it takes the place of; without one they are this process's and 0644. The temporary
// file is in the same folder; its name has no extension for which a runtime would load it.
//
//	openat(DIR, ".NAME.*.tmp", O_CREAT|O_EXCL), write, fchmod, fchown, fsync, close, rename, open(DIR), fsync, close
func replaceFile(path string, content io.Reader, like fs.FileInfo) (err error) {
	dir, name := filepath.Dir(path), filepath.Base(path)
	f, err := os.CreateTemp(dir, "."+name+".*.tmp")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	_, err = io.Copy(f, content)
	mode := fs.FileMode(0o644)
	if like != nil {
		mode = like.Mode().Perm()
		if st, ok := like.Sys().(*syscall.Stat_t); ok {
			err = errors.Join(err, f.Chown(int(st.Uid), int(st.Gid)))
		}
	}
	if err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if err = os.Rename(f.Name(), path); err != nil {
		return err
	}
	return syncDir(dir)
}

// removeFile removes a file for good. One that is not there is no error.
//
//	unlink, open(DIR), fsync, close
func removeFile(path string) error {
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

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
