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

// readTOML reads a file below root. A missing file is empty. An error quotes none of the file,
// which may hold secrets.
func readTOML(root, path string) (map[string]any, error) {
	data, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		return nil, ignoreMissing(err)
	}
	table := map[string]any{}
	if err := toml.Unmarshal(data, &table); err != nil {
		var where *toml.DecodeError
		if errors.As(err, &where) {
			row, column := where.Position()
			return nil, fmt.Errorf("%s: not valid TOML in line %d, column %d", path, row, column)
		}
		return nil, fmt.Errorf("%s: not valid TOML", path)
	}
	return table, nil
}

// tableAt returns the table at a path of keys, nil if there is none.
func tableAt(table map[string]any, keys ...string) map[string]any {
	for _, key := range keys {
		table, _ = table[key].(map[string]any)
	}
	return table
}

// setString sets *to if the value is a string that says something.
func setString(to *string, value any) {
	if s, ok := value.(string); ok && s != "" {
		*to = s
	}
}

// stringsOf returns a list's strings, nil if it has none.
func stringsOf(value any) []string {
	var all []string
	list, _ := value.([]any)
	for _, one := range list {
		if s, ok := one.(string); ok && s != "" {
			all = append(all, s)
		}
	}
	return all
}
