package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/undo"
	"cni-unwind/testdata/sandbox"
)

// TestMain runs the tests in namespaces of their own, or, where this program was started under the
// name of one of these programs, that: unwindctl itself, the plugin, and journal, which writes what
// the plugin would have written.
func TestMain(m *testing.M) {
	switch filepath.Base(os.Args[0]) {
	case "unwindctl":
		programDir = "" // nothing goes into the machine's own
		main()
	case netconf.Name:
		runPlugin()
	case "journal":
		writeJournal()
	default:
		if strings.HasPrefix(os.Args[0], "/proc/self/fd/") { // the plugin to install, which has no path on the host
			runPlugin()
		}
		os.Exit(sandbox.RunAsMachine(m)) // --host goes to process 1, and so does a sweep after a boot
	}
	os.Exit(0)
}

func runPlugin() {
	p := &plugin.Plugin{Stdout: os.Stdout, Stderr: os.Stderr, Budgets: undo.DefaultBudgets}
	os.Exit(p.Main(context.Background(), "CNI plugin unwind dev: under test"))
}

// programs returns a directory with the programs that TestMain knows.
func programs(t *testing.T) string {
	t.Helper()
	sandbox.Need(t)
	dir := t.TempDir()
	self, err := os.Executable()
	for _, name := range []string{"unwindctl", netconf.Name, "journal"} {
		err = errors.Join(err, os.Symlink(self, filepath.Join(dir, name)))
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// noExitDelay has the race detector let a program exit at once, and not a second later.
const noExitDelay = "atexit_sleep_ms=0"

func TestScript(t *testing.T) {
	bin := programs(t)
	tools, err := filepath.Abs("../../.tools")
	if err != nil {
		t.Fatal(err)
	}
	testscript.Run(t, testscript.Params{
		Dir:                 "../../testdata/script",
		RequireExplicitExec: true,
		Cmds:                map[string]func(*testscript.TestScript, bool, []string){"eventually": untilItSucceeds},
		Setup: func(env *testscript.Env) error {
			env.Setenv("PATH", bin+":"+env.Getenv("PATH"))
			env.Setenv("TOOLS", tools)
			env.Setenv("PROGRAMS", bin)
			env.Setenv("PLUGIN", filepath.Join(bin, netconf.Name))
			env.Setenv("GORACE", noExitDelay)
			env.Defer(func() { unmountAll(filepath.Join(env.WorkDir, "netns")) })
			return nil
		},
	})
}

// untilItSucceeds runs a program until its exit code is 0: eventually PROGRAM ARG….
func untilItSucceeds(ts *testscript.TestScript, _ bool, args []string) {
	for end := time.Now().Add(time.Minute); ts.Exec(args[0], args[1:]...) != nil; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			ts.Fatalf("not in time: %v", args)
		}
	}
}

// unmountAll lets go of the network namespaces that are pinned in a directory.
func unmountAll(dir string) {
	pins, _ := filepath.Glob(filepath.Join(dir, "*"))
	for _, pin := range pins {
		_ = unix.Unmount(pin, unix.MNT_DETACH)
	}
}

// writeJournal is
//
//	journal put DIR FILE…      writes entries, each a JSON file, see readEntry
//	journal copy DIR N FILE…   writes N copies of each entry, with the container IDs ID-1, ID-2 and so on
//	journal bury DIR FILE…     deletes entries and leaves tombstones
//	journal damage DIR FILE…   replaces the bytes of entries
//	journal newer DIR          makes the journal one that only a newer release can read
//	journal record DIR FILE…   records events, each a JSON file, as of when it says: "ago" is a duration
//	journal count DIR N NAME LABEL…   sets a counter
func writeJournal() {
	dir, err := filepath.Abs(os.Args[2])
	if err == nil {
		err = map[string]func(*journal.Store, []string) error{
			"put": put, "copy": putCopies, "bury": bury, "damage": damage, "newer": newer, "record": recordEvents, "count": count,
		}[os.Args[1]](&journal.Store{Dir: dir}, os.Args[3:])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func put(s *journal.Store, files []string) error {
	return eachEntry(files, func(e *journal.Entry) error { return putEntry(s, e) })
}

func putEntry(s *journal.Store, e *journal.Entry) error {
	return s.Update(context.Background(), func(tx *journal.Tx) error { return putIn(tx, e) })
}

// putIn takes an entry through its legal states.
func putIn(tx *journal.Tx, e *journal.Entry) error {
	want, since := e.State, e.Since
	e.State = journal.Adding
	err := tx.Put(e)
	if want != journal.Adding && err == nil {
		e.State = want
		err = tx.Put(e)
	}
	if since != (journal.Time{}) && err == nil && want != journal.Live {
		e.Since = since
		err = tx.Put(e)
	}
	return err
}

func putCopies(s *journal.Store, args []string) error {
	n, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	return eachEntry(args[1:], func(e *journal.Entry) error {
		id := e.ContainerID
		for i := range n {
			e.ContainerID, e.Newest().Number = fmt.Sprintf("%s-%d", id, i+1), 0
			if err := putEntry(s, e); err != nil {
				return err
			}
		}
		return nil
	})
}

func bury(s *journal.Store, files []string) error {
	return eachEntry(files, func(e *journal.Entry) error {
		return s.Update(context.Background(), func(tx *journal.Tx) error {
			return errors.Join(tx.Delete(e.Key), tx.PutTombstone(journal.Tombstone{Key: e.Key, Reason: "settled"}))
		})
	})
}

func damage(s *journal.Store, files []string) error {
	return eachEntry(files, func(e *journal.Entry) error {
		return inFile(s, "entries", strings.Join([]string{e.Network, e.ContainerID, e.IfName}, "\x00"), become(`{"network":`))
	})
}

func newer(s *journal.Store, _ []string) error {
	return inFile(s, "meta", "format", become(`{"writer":99,"oldestReader":99}`))
}

func recordEvents(s *journal.Store, files []string) error {
	for _, file := range files {
		data, err := os.ReadFile(file)
		var e journal.Event
		var when struct{ Ago string }
		if err = errors.Join(err, json.Unmarshal(data, &e), json.Unmarshal(data, &when)); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		ago, err := time.ParseDuration(when.Ago)
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		if err := s.Update(context.Background(), func(tx *journal.Tx) error { return tx.Record(e) }); err != nil {
			return err
		}
		if err := inLast(s, "history", func(event []byte) ([]byte, error) {
			if err := json.Unmarshal(event, &e); err != nil {
				return nil, err
			}
			e.At.Wall = e.At.Wall.Add(-ago)
			return json.Marshal(e)
		}); err != nil {
			return err
		}
	}
	return nil
}

// secondCommit makes the transaction before count, although that does not fit its digest.
func secondCommit(*bolt.Tx) error { return nil }

// inLast changes the last value of a bucket past the journal's own code.
func inLast(s *journal.Store, bucket string, change func([]byte) ([]byte, error)) error {
	db, err := bolt.Open(s.Path(), 0o600, nil)
	if err != nil {
		return err
	}
	return errors.Join(db.Update(func(tx *bolt.Tx) error {
		b := tx.Bucket([]byte(bucket))
		key, value := b.Cursor().Last()
		value, err := change(value)
		return errors.Join(err, b.Put(bytes.Clone(key), value))
	}), db.Update(secondCommit), db.Close())
}

func count(s *journal.Store, args []string) error {
	n, err := strconv.ParseUint(args[0], 10, 64)
	if err != nil {
		return err
	}
	return s.Update(context.Background(), func(tx *journal.Tx) error { return tx.SetCounter(n, args[1], args[2:]...) })
}

func eachEntry(files []string, do func(*journal.Entry) error) error {
	for _, file := range files {
		e, err := readEntry(file)
		if err == nil {
			err = do(e)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	return nil
}

// readEntry reads an entry in which $NAME is a variable of the environment, and $MACHINE the kind
// of name that this machine has. What it leaves out of its newest ADD's host is as it is here, and
// the network namespace at its path is identified.
func readEntry(file string) (*journal.Entry, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	host := thisHost()
	data = []byte(os.Expand(string(data), func(name string) string {
		if name == "MACHINE" {
			kind, _, _ := strings.Cut(host.Machine, ":")
			return kind
		}
		return os.Getenv(name)
	}))
	e := &journal.Entry{}
	if err := json.Unmarshal(data, e); err != nil {
		return nil, err
	}
	g := e.Newest()
	given := g.Host
	g.Host = journal.Host{
		BootID: cmp.Or(given.BootID, host.BootID), Machine: cmp.Or(given.Machine, host.Machine),
		MountNS: cmp.Or(given.MountNS, host.MountNS), PIDNS: cmp.Or(given.PIDNS, host.PIDNS),
		NetNS: cmp.Or(given.NetNS, host.NetNS), TimeNS: cmp.Or(given.TimeNS, host.TimeNS),
	}
	var there unix.Stat_t
	if !g.NetNS.Known() && unix.Stat(g.NetNS.Path, &there) == nil {
		g.NetNS.Dev, g.NetNS.Ino = there.Dev, there.Ino
	}
	return e, nil
}

// thisHost is what the plugin would write of this machine and the namespaces of this process.
func thisHost() journal.Host {
	line := func(path string) string {
		data, _ := os.ReadFile(path)
		return strings.TrimSpace(string(data))
	}
	link := func(name string) string {
		target, _ := os.Readlink("/proc/self/ns/" + name)
		return target
	}
	h := journal.Host{
		BootID: line("/proc/sys/kernel/random/boot_id"), Machine: "machine-id:" + line("/etc/machine-id"),
		MountNS: link("mnt"), PIDNS: link("pid"), NetNS: link("net"), TimeNS: link("time"),
	}
	if id := strings.ToLower(line("/sys/class/dmi/id/product_uuid")); strings.Trim(id, "0f-") != "" {
		h.Machine = "dmi:" + id
	}
	return h
}

func become(value string) func([]byte) []byte { return func([]byte) []byte { return []byte(value) } }

// inFile changes a value past the journal's own code.
func inFile(s *journal.Store, bucket, key string, change func([]byte) []byte) error {
	db, err := bolt.Open(s.Path(), 0o600, nil)
	if err != nil {
		return err
	}
	return errors.Join(db.Update(func(tx *bolt.Tx) error {
		b := tx.Bucket([]byte(bucket))
		return b.Put([]byte(key), change(b.Get([]byte(key))))
	}), db.Update(secondCommit), db.Close())
}
