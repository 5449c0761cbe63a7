package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	bolt "go.etcd.io/bbolt"

	"cni-unwind/journal"
)

// TestMain makes this program, under other names, the commands of the scripts: unwindctl itself, and journal, which writes
// what unwind would have written.
func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"unwindctl": main, "journal": writeJournal})
}

func TestScript(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "../../testdata/script",
		RequireExplicitExec: true,
		Setup: func(env *testscript.Env) error {
			env.Setenv("GORACE", "atexit_sleep_ms=0") // else every command takes a second more with the race detector
			return nil
		},
	})
}

// writeJournal is
//
//	journal put DIR FILE…      writes entries, each a JSON file
//	journal bury DIR FILE…     deletes entries and leaves tombstones
//	journal damage DIR FILE…   replaces the bytes of entries
//	journal newer DIR          makes the journal one that only a newer release can read
func writeJournal() {
	dir, err := filepath.Abs(os.Args[2])
	if err == nil {
		err = map[string]func(*journal.Store, []string) error{
			"put": put, "bury": bury, "damage": damage, "newer": newer,
		}[os.Args[1]](&journal.Store{Dir: dir}, os.Args[3:])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// put takes each entry through its legal states.
func put(s *journal.Store, files []string) error {
	return eachEntry(files, func(e *journal.Entry) error {
		return s.Update(context.Background(), func(tx *journal.Tx) error {
			want := e.State
			e.State = journal.Adding
			err := tx.Put(e)
			if want != journal.Adding && err == nil {
				e.State = want
				err = tx.Put(e)
			}
			return err
		})
	})
}

func bury(s *journal.Store, files []string) error {
	return eachEntry(files, func(e *journal.Entry) error {
		return s.Update(context.Background(), func(tx *journal.Tx) error {
			return errors.Join(tx.Delete(e.Key), tx.Bury(journal.Tombstone{Key: e.Key, Reason: "settled"}))
		})
	})
}

func damage(s *journal.Store, files []string) error {
	return eachEntry(files, func(e *journal.Entry) error {
		return inFile(s, "entries", strings.Join([]string{e.Network, e.ContainerID, e.IfName}, "\x00"), `{"network":`)
	})
}

func newer(s *journal.Store, _ []string) error {
	return inFile(s, "meta", "format", `{"writer":99,"oldestReader":99}`)
}

func eachEntry(files []string, do func(*journal.Entry) error) error {
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		e := &journal.Entry{}
		if err := errors.Join(json.Unmarshal(data, e), do(e)); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	return nil
}

// inFile writes past the journal's own code.
func inFile(s *journal.Store, bucket, key, value string) error {
	db, err := bolt.Open(s.Path(), 0o600, nil)
	if err != nil {
		return err
	}
	return errors.Join(db.Update(func(tx *bolt.Tx) error {
		return tx.Bucket([]byte(bucket)).Put([]byte(key), []byte(value))
	}), db.Close())
}

// TestHint has the hints that no script can show: scripts run as root, and do not wait for locks.
func TestHint(t *testing.T) {
	for _, tt := range []struct {
		name string
		err  error
		want string
	}{
		{"not root", &fs.PathError{Op: "open", Path: "/var/lib/cni/unwind/journal.lock", Err: fs.ErrPermission}, "the journal is root's; run this as root"},
		{"busy", journal.ErrBusy, "another program has held the journal for some seconds; try again"},
		{"one of two", errors.Join(errors.New("other"), journal.ErrBusy), "another program has held the journal for some seconds; try again"},
		{"nothing to do", errors.New("other"), ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := hintFor(fmt.Errorf("journal: %w", tt.err)); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}
