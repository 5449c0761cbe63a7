package durable

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"cni-unwind/plugin/plugintest/nodetest"
)

// TestReplace: Replace writes the whole content with the requested mode, or leaves the file
// unchanged. It leaves no other file in the directory. The test does not cover a power loss.
func TestReplace(t *testing.T) {
	t.Parallel()
	broken := io.MultiReader(strings.NewReader("half"), iotest.ErrReader(errors.New("broken")))
	for _, c := range []struct {
		name    string
		replace func(path string, like fs.FileInfo) error
		want    string
		mode    fs.FileMode
	}{
		{"a mode", func(path string, _ fs.FileInfo) error { return Replace(path, strings.NewReader("new"), 0o755) }, "new", 0o755},
		{"the mode of the one before", func(path string, like fs.FileInfo) error {
			return ReplaceLike(path, strings.NewReader("new"), like)
		}, "new", 0o640},
		{"broken", func(path string, _ fs.FileInfo) error { return Replace(path, broken, 0o755) }, "old", 0o640},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(t.TempDir(), "file")
			nodetest.Check(t, os.WriteFile(path, []byte("old"), 0o640))
			before, err := os.Stat(path)
			nodetest.Check(t, err)
			if err := c.replace(path, before); (err != nil) != (c.want == "old") {
				t.Errorf("error %v", err)
			}
			content, err := os.ReadFile(path)
			after, statErr := os.Stat(path)
			if err != nil || statErr != nil || string(content) != c.want || after.Mode() != c.mode {
				t.Errorf("%q, %v, %v, %v", content, after.Mode(), err, statErr)
			}
			if files, err := os.ReadDir(filepath.Dir(path)); err != nil || len(files) != 1 {
				t.Errorf("%v, %v", files, err)
			}
		})
	}
}

// TestTemporary: Replace and Remove delete old temporary files that a killed Replace left. They
// keep all other files.
func TestTemporary(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		do   func(path string) error
	}{
		{"Replace", func(path string) error { return Replace(path, strings.NewReader("new"), 0o600) }},
		{"Remove", Remove},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			old := time.Now().Add(-2 * time.Minute)
			for _, name := range []string{".off.123.tmp", ".off.45.tmp", ".off.x.tmp", ".off.json.123.tmp", ".off.123", "off.123.tmp"} {
				path := filepath.Join(dir, name)
				nodetest.Check(t, errors.Join(os.WriteFile(path, nil, 0o600), os.Chtimes(path, old, old)))
			}
			if err := os.WriteFile(filepath.Join(dir, ".off.9.tmp"), nil, 0o600); err != nil { // of a Replace that still runs
				t.Fatal(err)
			}
			nodetest.Check(t, c.do(filepath.Join(dir, "off")))
			files, err := filepath.Glob(filepath.Join(dir, ".*"))
			for i := range files {
				files[i] = filepath.Base(files[i])
			}
			if want := []string{".off.123", ".off.9.tmp", ".off.json.123.tmp", ".off.x.tmp"}; err != nil || !slices.Equal(files, want) {
				t.Errorf("left: %v, want %v, %v", files, want, err)
			}
		})
	}
}
