package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/undo"
	"cni-unwind/testdata/nodetest"
	"cni-unwind/testdata/sandbox"
	"cni-unwind/testdata/unwind/env"
)

// TestMain runs the tests in namespaces of their own, or, where this program was started under the
// name of one of these programs, that: unwindctl itself, the plugin, and one that writes records.
func TestMain(m *testing.M) {
	switch filepath.Base(os.Args[0]) {
	case "unwindctl":
		programDir = "" // nothing goes into the machine's own
		main()
	case netconf.Name:
		runPlugin()
	case "puts":
		putThree(os.Args[1], os.Args[2])
	default:
		if strings.HasPrefix(os.Args[0], "/proc/self/fd/") { // the plugin to install, which has no path on the host
			runPlugin()
		}
		os.Exit(sandbox.Run(m)) // --host goes to process 1, and so does a sweep after a boot
	}
	os.Exit(0)
}

func runPlugin() {
	p := &plugin.Plugin{Env: undo.Env{Stderr: os.Stderr, Budgets: env.Long, Runner: &delegate.Processes{}}, Stdout: os.Stdout}
	os.Exit(p.Main(context.Background(), "CNI plugin unwind dev: under test"))
}

// programs returns a directory with the programs that TestMain knows.
func programs(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	self, err := os.Executable()
	for _, name := range []string{"unwindctl", netconf.Name, "puts"} {
		err = errors.Join(err, os.Symlink(self, filepath.Join(dir, name)))
	}
	check(t, err)
	return dir
}

// noExitDelay has the race detector let a program exit at once, and not a second later.
const noExitDelay = "atexit_sleep_ms=0"

func TestScript(t *testing.T) {
	sandbox.Need(t)
	bin := programs(t)
	cmds := map[string]func(*testscript.TestScript, bool, []string){}
	for name, do := range verbs {
		cmds[name] = func(ts *testscript.TestScript, neg bool, args []string) { do(ts.Value("n").(*scripted), ts, neg, args) }
	}
	testscript.Run(t, testscript.Params{
		Dir: "../../testdata/script", RequireExplicitExec: true, Cmds: cmds,
		Setup: func(env *testscript.Env) error {
			n := newMachineAt(env.T().(testing.TB), env.WorkDir, bin)
			n.Dirs = &nodetest.Dirs{TB: n.TB, Dir: n.dir}
			env.Values["n"] = &scripted{machine: n}
			for name, value := range map[string]string{
				"PATH": bin + ":" + env.Getenv("PATH"), "TOOLS": n.tools, "PROGRAMS": bin, "PLUGIN": filepath.Join(bin, netconf.Name),
				"GORACE": noExitDelay, "FIRST": nodetest.First,
			} {
				env.Setenv(name, value)
			}
			env.Defer(func() { unmountAll(filepath.Join(env.WorkDir, "netns")) })
			return expandFiles(env)
		},
	})
}

// expandFiles has the files of a script name its directories.
func expandFiles(env *testscript.Env) error {
	return filepath.WalkDir(env.WorkDir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		data, err := os.ReadFile(path)
		if expanded := bytes.ReplaceAll(data, []byte("$WORK"), []byte(env.WorkDir)); err == nil && !bytes.Equal(expanded, data) {
			err = os.WriteFile(path, expanded, 0o644)
		}
		return err
	})
}

// untilItSucceeds runs a program until its exit code is 0: eventually PROGRAM ARG….
func untilItSucceeds(ts *testscript.TestScript, _ bool, args []string) {
	for end := time.Now().Add(sandbox.Patience); ts.Exec(args[0], args[1:]...) != nil; time.Sleep(20 * time.Millisecond) {
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

// writer writes what the plugin would have written, to a journal.
type writer struct {
	*testscript.TestScript
	*journal.Store
}

// writes are the ways to do so:
//
//	entry KEY STATE [NAME=VALUE…] PLUGIN [STEP]…   puts an entry
//	put FILE…      puts entries, each a JSON file
//	bury KEY…      deletes entries and leaves tombstones
//	years N        moves the wall times of all entries: of the ADD, of the state, of the last change
//	damage KEY…    replaces the bytes of entries
//	newer          makes the journal one that only a newer release can read
//	record FILE…   events, each a JSON file, as of when it says: "ago" is a duration
//	count N NAME LABEL…   sets a counter
var writes = map[string]func(writer, []string) error{
	"put": writer.put, "entry": writer.entry, "bury": writer.bury, "damage": writer.damage, "newer": writer.newer,
	"years":  writer.years,
	"record": writer.recordEvents, "count": writer.count,
}

// put puts the entry of each file. In a file $NAME is a variable of the script, and $MACHINE the kind
// of name that this machine has.
func (w writer) put(files []string) error {
	for _, file := range files {
		e := &journal.Entry{}
		err := json.Unmarshal([]byte(os.Expand(w.ReadFile(file), func(name string) string {
			if name == "MACHINE" {
				kind, _, _ := strings.Cut(facts.This().Machine, ":")
				return kind
			}
			return w.Getenv(name)
		})), e)
		if err == nil {
			err = putEntry(w.Store, here(e))
		}
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	return nil
}

func putEntry(s *journal.Store, e *journal.Entry) error {
	return s.Update(context.Background(), func(tx *journal.Tx) error { return putIn(tx, e) })
}

// putIn takes an entry through its legal states.
func putIn(tx *journal.Tx, e *journal.Entry) error {
	want, since := e.Undo.State, e.Undo.Since
	e.Undo.State = journal.Adding
	err := tx.Put(e)
	if want != journal.Adding && err == nil {
		e.Undo.State = want
		err = tx.Put(e)
	}
	if since != (journal.Time{}) && err == nil && want != journal.Live {
		e.Undo.Since = since
		err = tx.Put(e)
	}
	return err
}

// entry puts an entry that needs no file: KEY STATE [NAME=VALUE…] PLUGIN [STEP]…. netns is a path, or
// "gone" for one whose network namespace is gone, copies a number of copies, with the container IDs
// ID-1, ID-2 and so on. dir and instance are of the next plugin's configuration, other names of the
// newest ADD. STEP is what the step of the plugin before it has, in JSON.
func (w writer) entry(args []string) error {
	e := &journal.Entry{Key: keyOf(args[0]), Undo: journal.Undo{State: journal.State(args[1])}, Added: journal.Added{CNIVersion: "1.0.0"}}
	g, config, copies := e, map[string]string{"name": e.Network}, 0
	g.Added.Path = filepath.Join(w.Getenv("TOOLS"), "test")
	for _, arg := range args[2:] {
		name, value, has := strings.Cut(arg, "=")
		var err error
		switch {
		case strings.HasPrefix(arg, "{"):
			err = json.Unmarshal([]byte(arg), &g.Undo.Steps[len(g.Undo.Steps)-1])
		case !has:
			if name == "faulty" {
				config["dir"] = cmp.Or(config["dir"], w.Getenv("WORK"))
			}
			g.Undo.Steps = append(g.Undo.Steps, journal.Step{Index: len(g.Undo.Steps), Type: name, Config: netconf.Marshal(config)})
			config = map[string]string{"name": e.Network}
		case arg == "netns=gone":
			g.Added.NetNS = journal.NetNS{Path: "/none", Dev: 4, Ino: 1}
		case name == "netns":
			g.Added.NetNS.Path = value
		case name == "grace":
			g.Added.GracePeriod, err = time.ParseDuration(value)
		case name == "pod":
			e.Added.Pod.Namespace, e.Added.Pod.Name, _ = strings.Cut(value, "/")
		case name == "address":
			address, pool, _ := strings.Cut(value, "@")
			g.Got.Claims = append(g.Got.Claims, journal.Claim{Address: netip.MustParseAddr(address), Pool: pool})
		case name == "reason":
			e.Undo.Reason = value
		case name == "boot":
			g.Added.Host.BootID = value
		case name == "path":
			g.Added.Path = value
		case name == "copies":
			copies, err = strconv.Atoi(value)
		default:
			config[name] = value
		}
		if err != nil {
			return fmt.Errorf("%s: %w", arg, err)
		}
	}
	here(e)
	if copies == 0 {
		return putEntry(w.Store, e)
	}
	id := e.ContainerID
	for i := range copies {
		e.ContainerID, g.Number = fmt.Sprintf("%s-%d", id, i+1), 0
		if err := putEntry(w.Store, e); err != nil {
			return err
		}
	}
	return nil
}

// keyOf parses NETWORK/CONTAINER/IFNAME.
func keyOf(text string) journal.Key {
	part := strings.Split(text, "/")
	return journal.Key{Network: part[0], ContainerID: part[1], IfName: part[2]}
}

func (w writer) bury(keys []string) error {
	return w.Update(context.Background(), func(tx *journal.Tx) error {
		for _, text := range keys {
			key := keyOf(text)
			e, err := tx.Get(key)
			if err != nil {
				return err
			}
			if e == nil {
				e = &journal.Entry{Key: key}
			}
			e.Bury()
			e.Undo.Reason = "settled"
			if err := tx.Put(e); err != nil {
				return err
			}
		}
		return nil
	})
}

func (w writer) damage(keys []string) error {
	for _, key := range keys {
		if err := inFile(w.Store, "entries", strings.ReplaceAll(key, "/", "\x00"), become(`{"network":`)); err != nil {
			return err
		}
	}
	return nil
}

var wallYear = regexp.MustCompile(`"wall":"\d{4}`)

func (w writer) years(args []string) error {
	years, err := strconv.Atoi(args[0])
	entries, moved := 0, 0
	err = errors.Join(err, inFile(w.Store, "entries", "", func(key, entry []byte) []byte {
		entries++
		const sum = 4
		return journal.Seal(key, wallYear.ReplaceAllFunc(entry[sum:], func(b []byte) []byte {
			moved++
			year, _ := strconv.Atoi(string(b[len(b)-4:]))
			return fmt.Appendf(nil, `"wall":"%d`, year+years)
		}))
	}))
	if err == nil && (entries == 0 || moved != 3*entries) {
		err = fmt.Errorf("%d times of %d entries moved", moved, entries)
	}
	return err
}

func (w writer) newer([]string) error {
	return inFile(w.Store, "meta", "format", func(key, _ []byte) []byte {
		return journal.Seal(key, []byte(`{"writer":99,"oldestReader":99}`))
	})
}

func (w writer) recordEvents(files []string) error {
	for _, file := range files {
		var e journal.Event
		var when struct{ Ago string }
		data := []byte(w.ReadFile(file))
		err := errors.Join(json.Unmarshal(data, &e), json.Unmarshal(data, &when))
		ago, durationErr := time.ParseDuration(when.Ago)
		if err = errors.Join(err, durationErr); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		e.At = journal.Now()
		e.At.Wall = e.At.Wall.Add(-ago)
		if err := w.Record(e); err != nil {
			return err
		}
	}
	return nil
}

func (w writer) count(args []string) error {
	n, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	return w.Record(slices.Repeat([]journal.Event{{Count: args[1:]}}, n)...)
}

// here returns an entry whose newest ADD ran here, as far as it does not say otherwise, and whose
// network namespace is the one at its path.
func here(e *journal.Entry) *journal.Entry {
	g, host := e, facts.This()
	given := g.Added.Host
	g.Added.Host = journal.Host{
		BootID: cmp.Or(given.BootID, host.BootID), Machine: cmp.Or(given.Machine, host.Machine),
		MountNS: cmp.Or(given.MountNS, host.MountNS), PIDNS: cmp.Or(given.PIDNS, host.PIDNS),
		NetNS: cmp.Or(given.NetNS, host.NetNS), TimeNS: cmp.Or(given.TimeNS, host.TimeNS),
	}
	var there unix.Stat_t
	if !g.Added.NetNS.Known() && unix.Stat(g.Added.NetNS.Path, &there) == nil {
		g.Added.NetNS.Dev, g.Added.NetNS.Ino = there.Dev, there.Ino
	}
	soon := journal.BootNanos() + int64(4*time.Minute)
	for i := range e.Undo.Steps { // a time that is further away was set in another boot
		e.Undo.Steps[i].Again = min(e.Undo.Steps[i].Again, soon)
		e.Undo.Steps[i].Next.At = min(e.Undo.Steps[i].Next.At, soon)
	}
	return e
}

func become(value string) func(_, _ []byte) []byte {
	return func(_, _ []byte) []byte { return []byte(value) }
}

// inFile changes the values of a bucket whose keys begin so, past the journal's own code.
func inFile(s *journal.Store, bucket, key string, change func(key, value []byte) []byte) error {
	db, err := bolt.Open(s.Path(), 0o600, nil)
	if err != nil {
		return err
	}
	return errors.Join(db.Update(func(tx *bolt.Tx) (err error) {
		b, changed := tx.Bucket([]byte(bucket)), map[string][]byte{}
		c := b.Cursor()
		for k, v := c.Seek([]byte(key)); bytes.HasPrefix(k, []byte(key)) && k != nil; k, v = c.Next() {
			changed[string(k)] = change(k, bytes.Clone(v))
		}
		for k, v := range changed {
			err = errors.Join(err, b.Put([]byte(k), v))
		}
		return err
	}), db.Close())
}
