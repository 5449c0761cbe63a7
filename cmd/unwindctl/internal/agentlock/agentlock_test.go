package agentlock

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestTake: one agent at a time has the lock, which is a file that nobody else can open.
func TestTake(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "new", "state")
	holder := func(when, want string) {
		t.Helper()
		if pid := Process(dir); pid != want {
			t.Errorf("%s: held by %q, not by %q", when, pid, want)
		}
	}
	holder("without a file", "")
	lock, err := Take(dir)
	check(t, err)
	holder("taken", fmt.Sprint(os.Getpid()))
	for path, want := range map[string]os.FileMode{dir: os.ModeDir | 0o700, Path(dir): 0o600} {
		if info, err := os.Lstat(path); err != nil || info.Mode() != want {
			t.Errorf("%s: %v, %v", path, info.Mode(), err)
		}
	}
	if names, _ := os.ReadDir(dir); len(names) != 1 {
		t.Errorf("it made %v", names)
	}
	if _, err := Take(dir); !errors.Is(err, ErrBusy) {
		t.Errorf("a second one: %v", err)
	}
	check(t, os.Rename(dir, dir+".away"))
	if lock.InPlace(dir) {
		t.Error("a file that was moved away counts")
	}
	check(t, os.Rename(dir+".away", dir))
	if !lock.InPlace(dir) {
		t.Error("the file is in place")
	}
	lock.Release()
	holder("released", "")
	lock, err = Take(dir)
	check(t, err)
	lock.Release()
}
