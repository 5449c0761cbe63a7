package metrics

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/durable"
)

// WriteTextfile writes a file atomically. It follows links and replaces only regular files, not
// devices.
func WriteTextfile(path string, text io.Reader) error {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	}
	info, err := os.Stat(path)
	switch {
	case err == nil && !info.Mode().IsRegular():
		return term.Usage("--textfile %s is not a file", path)
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("--textfile: %w", err)
	}
	if err == nil {
		err = durable.ReplaceLike(path, text, info)
	} else {
		err = durable.Replace(path, text, 0o644)
	}
	if err != nil {
		return fmt.Errorf("--textfile %s: %w", path, err)
	}
	return nil
}
