package journal

import (
	"cmp"
	"os"
	"path/filepath"
)

// OpenIn opens a file in a state directory to read and write it. It creates what is missing: the
// directory (0700), and the file (0600). It rejects a directory that others can write to, and a
// file that is not a regular one, such as a symbolic link.
func OpenIn(stateDir, name string) (*os.File, error) {
	if err := cmp.Or(os.MkdirAll(stateDir, 0o700), checkDir(stateDir)); err != nil {
		return nil, err
	}
	return openFile(filepath.Join(stateDir, name), os.O_RDWR|os.O_CREATE)
}

// CheckDir returns why a directory cannot be a state directory, which makeDir rejects, or nil. A
// missing one is fs.ErrNotExist.
func CheckDir(stateDir string) error { return checkDir(stateDir) }
