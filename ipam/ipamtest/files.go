package ipamtest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Files maps the names of a pool's files to their contents. The content "folder" stands for a
// directory, "pipe" for a named pipe, and "link to X" for a symbolic link to X.
type Files map[string]string

// Fill creates the files in a directory.
func (files Files) Fill(t testing.TB, dir string) {
	t.Helper()
	for name, content := range files {
		path := filepath.Join(dir, name)
		target, isLink := strings.CutPrefix(content, "link to ")
		var err error
		switch {
		case isLink:
			err = os.Symlink(target, path)
		case content == "folder":
			err = os.Mkdir(path, 0o755)
		case content == "pipe":
			err = unix.Mkfifo(path, 0o600)
		default:
			err = os.WriteFile(path, []byte(content), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}
