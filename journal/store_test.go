package journal

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// listing returns the inode, mode, owner, size, times of change and content of each file below a
// directory.
func listing(t testing.TB, dir string) map[string]string {
	t.Helper()
	files := map[string]string{}
	check(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		var content []byte
		if d.Type().IsRegular() {
			if content, err = os.ReadFile(path); err != nil {
				return err
			}
		}
		files[path] = fmt.Sprintf("inode %d mode %o owner %d size %d changed %v %v content %x",
			st.Ino, st.Mode, st.Uid, st.Size, st.Mtim, st.Ctim, sha256.Sum256(content))
		return nil
	}))
	return files
}

// untouched returns a function that checks that nothing below dir has changed since untouched ran.
func untouched(t testing.TB, dir string) func() {
	t.Helper()
	before := listing(t, dir)
	return func() {
		t.Helper()
		want(t, "something was changed", listing(t, dir), before)
	}
}

// look reads all records in a transaction, and looks some of them up.
func look(tx *Tx) error {
	n := 0
	visit := func(e *Record, err error) error {
		if n++; err != nil || n%8 != 1 {
			return nil // look ignores damaged records
		}
		_, err = tx.Get(e.Key)
		_, errPod := tx.ByPod(e.Added.Pod)
		for _, a := range e.Addresses() {
			if _, err := tx.ByAddress(a); err != nil {
				return err
			}
		}
		return errors.Join(err, errPod)
	}
	_, err := undoneOf(tx, keyOf("buried"))
	return errors.Join(err, tx.All(visit))
}

func TestLookingChangesNothing(t *testing.T) {
	for _, tt := range []struct {
		name    string
		prepare func(t *testing.T, s *Store)
		records int
	}{
		{"no directory", func(*testing.T, *Store) {}, 0},
		{"empty directory", func(t *testing.T, s *Store) { check(t, os.Mkdir(s.Dir, 0o700)) }, 0},
		{"crashed during creation", func(t *testing.T, s *Store) {
			put(t, s)
			check(t, os.Rename(s.Path(), s.Path()+".new"))
		}, 0},
		{"populated", func(t *testing.T, s *Store) { check(t, populate(s)) }, populated},
		{"populated, no locks", func(t *testing.T, s *Store) {
			check(t, errors.Join(populate(s), os.Remove(filepath.Join(s.Dir, locksName))))
		}, populated},
		{"populated, no queue", func(t *testing.T, s *Store) {
			check(t, populate(s))
			check(t, os.Remove(filepath.Join(s.Dir, queueName)))
		}, populated},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newStore(t)
			tt.prepare(t, s)
			changed := untouched(t, filepath.Dir(s.Dir))
			n := 0
			view(t, s, func(tx *Tx) error {
				return errors.Join(look(tx), tx.All(func(*Record, error) error {
					n++
					return nil
				}))
			})
			if n != tt.records {
				t.Errorf("%d records, want %d", n, tt.records)
			}
			if lock, err := s.LookAtLock(keyOf("a")); lock != (LockState{}) || err != nil {
				t.Errorf("%+v, %v", lock, err)
			}
			changed()
		})
	}
}

func TestModes(t *testing.T) {
	modesOf := func(t *testing.T, dir string) map[string]fs.FileMode {
		modes := map[string]fs.FileMode{}
		check(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := d.Info()
			modes[strings.TrimPrefix(path, dir)] = info.Mode()
			return err
		}))
		return modes
	}
	for _, umask := range []string{"0", "022", "077", "0777"} {
		t.Run(umask, func(t *testing.T) {
			if umask == "0777" {
				needRoot(t) // only root can open a file of mode 0
			}
			s := newStore(t)
			s.Dir = filepath.Join(s.Dir, "made", "too")
			p := start(t, "act", s.Dir)
			p.umask(umask).ok()
			p.put("a").ok()
			p.acquire("a").is("taken")
			want := map[string]fs.FileMode{
				"":              fs.ModeDir | 0o700,
				"/" + fileName:  0o600,
				"/" + queueName: 0o600,
				"/" + locksName: fs.ModeDir | 0o700,
				"/" + locksName + "/" + filepath.Base(s.LockPath(keyOf("a"))): 0o600,
			}
			if umask == "0777" {
				for name, mode := range want {
					want[name] = mode &^ 0o777
				}
			}
			if diff := cmp.Diff(want, modesOf(t, s.Dir)); diff != "" {
				t.Errorf("modes (-want +got):\n%s", diff)
			}
			p.put("b").ok()
			wantRecords(t, s, "a", "b")
		})
	}
}

// TestRefused: the store refuses a directory or file that would let another user write or redirect
// the journal, and changes nothing in it.
func TestRefused(t *testing.T) {
	type change func(t *testing.T, path string)
	at := func(name string, do change) func(t *testing.T, s *Store) {
		return func(t *testing.T, s *Store) { do(t, filepath.Join(s.Dir, name)) }
	}
	mode := func(m os.FileMode) change {
		return func(t *testing.T, path string) { check(t, os.Chmod(path, m)) }
	}
	linked := func(t *testing.T, path string) {
		check(t, errors.Join(os.Rename(path, path+".real"), os.Symlink(path+".real", path)))
	}
	dangling := func(t *testing.T, path string) {
		check(t, errors.Join(os.Remove(path), os.Symlink(path+".real", path)))
	}
	// instead() makes the store use another directory, which do() creates.
	instead := func(do func(path string) error) func(t *testing.T, s *Store) {
		return func(t *testing.T, s *Store) {
			s.Dir += ".other"
			check(t, do(s.Dir))
		}
	}
	for _, tt := range []struct {
		name    string
		prepare func(t *testing.T, s *Store)
		want    string // part of the error
		views   bool   // a View may succeed
	}{
		{"relative", func(_ *testing.T, s *Store) { s.Dir = "state" }, "absolute", true},
		{"directory is a link", at("", linked), "not a directory", false},
		{"directory is a link to an empty directory", instead(func(path string) error { return os.Symlink(t.TempDir(), path) }), "not a directory", true},
		{"directory is a file", instead(func(path string) error { return os.WriteFile(path, nil, 0o600) }), "not a directory", false},
		{"directory writable by its group", at("", mode(0o720)), "0720", false},
		{"directory writable by others", at("", mode(0o1702)), "0702", false},
		{"empty directory writable by others", instead(func(path string) error {
			return errors.Join(os.Mkdir(path, 0o700), os.Chmod(path, 0o777))
		}), "0777", true},
		{"another user's directory", func(t *testing.T, s *Store) {
			needRoot(t)
			check(t, os.Chown(s.Dir, 12345, 0))
		}, "user 12345", false},
		{"locks writable by others", at(locksName, mode(0o777)), "0777", true},
		{"locks is a link", at(locksName, linked), "not a directory", true},
		{"file is a directory", at(fileName, func(t *testing.T, path string) {
			check(t, errors.Join(os.Rename(path, path+".real"), os.Mkdir(path, 0o700)))
		}), syscall.EISDIR.Error(), false},
		{"file is a pipe", at(fileName, func(t *testing.T, path string) {
			check(t, errors.Join(os.Rename(path, path+".real"), syscall.Mkfifo(path, 0o600)))
		}), "not a regular file", false},
		{"file is a link", at(fileName, linked), "is a symbolic link; remove it", false},
		{"file is a link to nothing", at(fileName, dangling), "is a symbolic link; remove it", false},
		{"queue is a link", at(queueName, linked), "is a symbolic link; remove it", false},
		{"queue is a link to nothing", at(queueName, dangling), "is a symbolic link; remove it", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newStore(t)
			top := filepath.Dir(s.Dir)
			put(t, s, adding("a"))
			tt.prepare(t, s)
			changed := untouched(t, top)
			err := s.Update(t.Context(), func(tx *Tx) error { return tx.Put(adding("b")) })
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Update: %v, want %q in it", err, tt.want)
			}
			ran := false
			err = s.View(t.Context(), func(tx *Tx) error {
				ran = true
				return tx.All(func(*Record, error) error { return errors.New("there are records") })
			})
			if !tt.views && err == nil || ran && !tt.views {
				t.Errorf("View: %v, it ran: %t", err, ran)
			}
			changed()
			if _, err := os.Lstat(filepath.Join("state", locksName)); err == nil {
				t.Error("a directory was created in the working directory")
			}
		})
	}
}

// TestFailingCaller: Update and View return fn's error unchanged, and turn a panic in fn into an
// error. Nothing is written, nothing stays locked, and the file stays in place.
func TestFailingCaller(t *testing.T) {
	s := newStore(t)
	put(t, s, adding("a"))
	mine := errors.New("mine")
	for name, fail := range map[string]func() error{
		"error": func() error { return mine },
		"nil":   func() error { var e *Record; e.State = Live; return nil },
		"panic": func() error { panic("fault") },
	} {
		for verb, run := range map[string]func(context.Context, func(*Tx) error) error{"Update": s.Update, "View": s.View} {
			err := run(t.Context(), func(tx *Tx) error {
				if verb == "Update" {
					check(t, errors.Join(tx.Put(adding("b")), remove(tx, keyOf("a"))))
				}
				return fail()
			})
			if err == nil || errors.Is(err, mine) != (name == "error") || errors.Is(err, ErrDamaged) {
				t.Errorf("%s in %s: %v", name, verb, err)
			}
			wantRecords(t, s, "a")
		}
	}
	wantAside(t, s, 0)
	put(t, s, adding("c"))
	wantRecords(t, s, "a", "c")
}

// TestWrites: an Update that only reads changes nothing. Each kind of write is one commit, and a
// View refuses it.
func TestWrites(t *testing.T) {
	s := newStore(t)
	put(t, s, adding("a"))
	changed := untouched(t, s.Dir)
	update(t, s, look)
	changed()
	commits := func(fn func(*Tx) error) (n int) {
		s.Point = func(point string) {
			if point == "committed" {
				n++
			}
		}
		update(t, s, fn)
		return n
	}
	for name, fn := range map[string]func(*Tx) error{
		"Put":    func(tx *Tx) error { return tx.Put(adding("b")) },
		"Delete": func(tx *Tx) error { return remove(tx, keyOf("a")) },
		"undone": func(tx *Tx) error { return tx.Put(&Record{Key: keyOf("a"), State: Abandoned}) },
	} {
		changed := untouched(t, s.Dir)
		if err := s.View(t.Context(), fn); err == nil {
			t.Errorf("%s in a View: no error", name)
		}
		changed()
		if n := commits(fn); n != 1 {
			t.Errorf("%s: %d commits", name, n)
		}
	}
}

// undone returns the abandoned record of an attachment, or nil.
func undone(t *testing.T, s *Store, k Key) (e *Record) {
	t.Helper()
	view(t, s, func(tx *Tx) (err error) {
		e, err = undoneOf(tx, k)
		return err
	})
	return e
}
