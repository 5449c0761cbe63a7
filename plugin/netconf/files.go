package netconf

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
)

// ReadFile reads a configuration. It does not follow a link in a directory that others can write
// to, and rejects anything but a regular file.
func ReadFile(path string) ([]byte, error) {
	flags := os.O_RDONLY | syscall.O_NONBLOCK
	if dir, err := os.Stat(filepath.Dir(path)); err == nil && dir.Mode().Perm()&0o022 != 0 {
		flags |= syscall.O_NOFOLLOW
	}
	f, err := os.OpenFile(path, flags, 0)
	if err != nil {
		err = errors.Unwrap(err) // without the path
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%w; the network's provider has not written it, or has removed it", err)
		}
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, errors.New("not a regular file")
	}
	return ReadAll(f)
}

// ReadAll reads a configuration of at most MaxConfig bytes.
func ReadAll(r io.Reader) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, MaxConfig+1))
	if err == nil && len(data) > MaxConfig {
		err = fmt.Errorf("too large: more than %d bytes", MaxConfig)
	}
	return data, err
}

// Conflists returns the paths of the configurations in a directory (/etc/cni/net.d), in the order
// in which a runtime reads them. The first is the node's network. For a missing directory,
// Conflists returns no paths.
func Conflists(dir string) ([]string, error) {
	return filesIn(dir, ".conflist", ".conf", ".json") // the extensions that libcni reads
}

// filesIn returns the paths of the files in a directory with one of the extensions.
func filesIn(dir string, extensions ...string) (paths []string, err error) {
	files, err := os.ReadDir(dir) // sorted by name
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, f := range files {
		if !f.IsDir() && slices.Contains(extensions, filepath.Ext(f.Name())) {
			paths = append(paths, filepath.Join(dir, f.Name()))
		}
	}
	return paths, err
}

// InlineDirectory returns the plugin configurations (*.conf) in a directory, in the order of their
// names. libcni appends the configurations in the directory with the network's name, next to a
// conflist, to the conflist's own plugins.
func InlineDirectory(dir string) ([]json.RawMessage, error) {
	paths, err := filesIn(dir, ".conf")
	if err != nil {
		return nil, err
	}
	var plugins []json.RawMessage
	for _, path := range paths {
		data, err := ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		plugins = append(plugins, data)
	}
	return plugins, nil
}

// FindPlugin returns the path of a plugin's binary, in the first directory of a path list that
// contains it.
func FindPlugin(plugin, path string) (string, error) {
	dirs := filepath.SplitList(path)
	for _, dir := range dirs {
		file := filepath.Join(dir, plugin)
		if info, err := os.Stat(file); err == nil && info.Mode().IsRegular() {
			return file, nil
		}
	}
	return "", fmt.Errorf("failed to find plugin %q in path %s", plugin, dirs) // libcni's message
}
