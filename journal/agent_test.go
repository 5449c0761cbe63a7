package journal

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"testing"
)

// TestLockAgent: one agent at a time has the lock, which is a file that nobody else can open.
func TestLockAgent(t *testing.T) {
	t.Parallel()
	s := &Store{Dir: filepath.Join(t.TempDir(), "new", "state")}
	if pid := s.AgentProcess(); pid != "" {
		t.Errorf("without a file it is held by %s", pid)
	}
	lock, err := s.LockAgent()
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]os.FileMode{s.Dir: os.ModeDir | 0o700, s.AgentLockPath(): 0o600} {
		if info, err := os.Lstat(path); err != nil || info.Mode() != want {
			t.Errorf("%s: %v, %v", path, info.Mode(), err)
		}
	}
	if names, _ := os.ReadDir(s.Dir); len(names) != 1 {
		t.Errorf("it made %v", names)
	}
	if _, err := s.LockAgent(); !errors.Is(err, ErrBusy) {
		t.Errorf("a second one: %v", err)
	}
	if pid := s.AgentProcess(); pid != strconv.Itoa(os.Getpid()) {
		t.Errorf("held by %q, not by %d", pid, os.Getpid())
	}
	if err := os.Rename(s.Dir, s.Dir+".away"); err != nil {
		t.Fatal(err)
	}
	if lock.InPlace() {
		t.Error("a file that was moved away counts")
	}
	if err := os.Rename(s.Dir+".away", s.Dir); err != nil {
		t.Fatal(err)
	}
	if !lock.InPlace() {
		t.Error("the file is in place")
	}
	lock.Release()
	if pid := s.AgentProcess(); pid != "" {
		t.Errorf("released, it is held by %s", pid)
	}
	if lock, err = s.LockAgent(); err != nil {
		t.Fatal(err)
	}
	lock.Release()
}
