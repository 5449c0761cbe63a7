package netconf

import (
	"fmt"
	"os"
	"path/filepath"
)

// FindPlugin returns the path of a plugin's binary in the first directory of a path list that has
// it.
func FindPlugin(plugin, path string) (string, error) {
	dirs := filepath.SplitList(path)
	for _, dir := range dirs {
		file := filepath.Join(dir, plugin)
		if info, err := os.Stat(file); err == nil && info.Mode().IsRegular() {
			return file, nil
		}
	}
	return "", fmt.Errorf("failed to find plugin %q in path %s", plugin, dirs) // libcni's words
}
