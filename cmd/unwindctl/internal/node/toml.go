package node

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/pelletier/go-toml/v2"
)

// firstThere returns the directories from the first one that exists on, or all.
func firstThere(root string, dirs ...string) []string {
	for i, dir := range dirs {
		if anyExists(root, dir) {
			return slices.Clone(dirs[i:])
		}
	}
	return slices.Clone(dirs)
}

func anyExists(root string, paths ...string) bool {
	return slices.ContainsFunc(paths, func(path string) bool {
		_, err := os.Stat(filepath.Join(root, path))
		return err == nil
	})
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// readTOML reads a file below root into a struct. Keys that the file does not have keep their
// values; a missing file has none. An error quotes none of the file, which may hold secrets.
func readTOML(root, path string, into any) error {
	data, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		return ignoreMissing(err)
	}
	if err := toml.Unmarshal(data, into); err != nil {
		var where *toml.DecodeError
		if errors.As(err, &where) {
			row, column := where.Position()
			return fmt.Errorf("%s: not valid TOML in line %d, column %d", path, row, column)
		}
		return fmt.Errorf("%s: not valid TOML", path)
	}
	return nil
}
