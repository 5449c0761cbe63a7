package journal

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"cni-unwind/plugin/plugintest/sandbox"

	bolt "go.etcd.io/bbolt"
)

// helperEnv selects the helper that the test binary runs when a test starts it again as another
// process. A helper and its test exchange lines over stdin and stdout.
const helperEnv = "JOURNAL_TEST_HELPER"

// helpers are the functions that can run in another process (see start). If a function returns an
// error, the process prints the error as a line for the test.
var helpers = map[string]func(s *Store, args []string) error{
	"act":    helpAct,
	"rounds": helpRounds,
	"damage": helpDamage,
	"power":  helpPower,
}

func TestMain(m *testing.M) {
	if name := os.Getenv(helperEnv); name != "" {
		if err := helpers[name](&Store{Dir: os.Args[1]}, os.Args[2:]); err != nil {
			tell("error: " + strings.ReplaceAll(err.Error(), "\n", "; "))
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(sandbox.RunInMemory(m))
}

var stdin = bufio.NewScanner(os.Stdin)

// tell sends a line from a helper to the test.
func tell(line string) { fmt.Println(line) }

// await waits in a helper for a line from the test. When the test ends, its helpers end too.
func await() string {
	if !stdin.Scan() {
		os.Exit(2)
	}
	return stdin.Text()
}

// process is the test's side of a helper.
type process struct {
	t     *testing.T
	dir   string
	cmd   *exec.Cmd
	say   func(line string)
	lines chan string
}

// start starts a helper process that uses the journal in dir.
func start(t *testing.T, name, dir string, args ...string) *process {
	t.Helper()
	cmd := exec.Command(os.Args[0], append([]string{dir}, args...)...)
	cmd.Env = append(os.Environ(), helperEnv+"="+name)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	check(t, err)
	out, err := cmd.StdoutPipe()
	check(t, err)
	check(t, cmd.Start())
	p := &process{t: t, dir: dir, cmd: cmd, lines: make(chan string, 4096)}
	p.say = func(line string) { fmt.Fprintln(in, line) }
	go func() {
		for s := bufio.NewScanner(out); s.Scan(); {
			p.lines <- s.Text()
		}
		close(p.lines)
	}()
	t.Cleanup(p.kill)
	return p
}

// line returns the next line of a helper. If the helper has ended, line returns how it ended: ""
// for exit code 0, otherwise the text of the error, such as "signal: killed".
func (p *process) line() string {
	p.t.Helper()
	select {
	case line, more := <-p.lines:
		if more {
			return line
		}
		if err := p.cmd.Wait(); err != nil {
			return err.Error()
		}
		return ""
	case <-time.After(sandbox.Patience):
		p.t.Fatal("the helper printed no line in time")
		return ""
	}
}

func (p *process) expect(want string) {
	p.t.Helper()
	if got := p.line(); got != want {
		p.t.Fatalf("the helper printed %q, want %q", got, want)
	}
}

func (p *process) signal(sig syscall.Signal) {
	p.t.Helper()
	check(p.t, p.cmd.Process.Signal(sig))
}

// pid returns the process ID of a helper, or of this process for an actor that runs in it.
func (p *process) pid() int {
	if p.cmd == nil {
		return os.Getpid()
	}
	return p.cmd.Process.Pid
}

// kill kills a helper with SIGKILL, if it is still running, and reaps it.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// newStore returns a journal in a directory that does not exist yet.
func newStore(t testing.TB) *Store {
	t.Helper()
	return &Store{Dir: filepath.Join(t.TempDir(), "state")}
}

func update(t testing.TB, s *Store, fn func(*Tx) error) {
	t.Helper()
	check(t, s.Update(t.Context(), fn))
}

func view(t testing.TB, s *Store, fn func(*Tx) error) {
	t.Helper()
	check(t, s.View(t.Context(), fn))
}

func put(t testing.TB, s *Store, records ...*Record) {
	t.Helper()
	update(t, s, func(tx *Tx) error { return putAll(tx, records...) })
}

func putAll(tx *Tx, records ...*Record) error {
	for _, e := range records {
		if err := tx.Put(e); err != nil {
			return err
		}
	}
	return nil
}

// get returns the newest record of an attachment, or nil.
func get(t testing.TB, s *Store, k Key) (e *Record) {
	t.Helper()
	view(t, s, func(tx *Tx) (err error) {
		e, err = tx.Get(k)
		return err
	})
	return e
}

// wantRecords checks the container IDs of all records of a journal.
func wantRecords(t testing.TB, s *Store, want ...string) {
	t.Helper()
	got, err := (&actor{Store: s}).list(t.Context())
	if err != nil || got != strings.Join(want, " ") {
		t.Fatalf("records: %s, %v, want %v", got, err, want)
	}
}

// raw changes a journal's file with bbolt, bypassing this package.
func raw(t testing.TB, s *Store, fn func(*bolt.Tx) error) {
	t.Helper()
	db, err := bolt.Open(s.Path(), 0o600, &bolt.Options{Timeout: sandbox.Patience})
	check(t, err)
	check(t, db.Update(fn))
	check(t, db.Close())
}

func keyOf(id string) Key { return Key{Network: "podnet", ContainerID: id, IfName: "eth0"} }

// adding returns a small record in the state adding that claims the addresses.
func adding(id string, addresses ...string) *Record {
	e := &Record{Key: keyOf(id), State: Adding, Steps: []Step{{Type: "bridge", Config: []byte(`{}`)}}, Added: Added{Path: "/opt/cni/bin", CNIVersion: "1.0.0"}}
	for _, a := range addresses {
		e.Got.Claims = append(e.Got.Claims, Claim{Address: netip.MustParseAddr(a)})
	}
	return e
}

// remove deletes all records of an attachment.
func remove(tx *Tx, k Key) error {
	all, err := tx.Records(k)
	err = errors.Join(IgnoreDamaged(err), tx.dropAbandoned(k))
	for _, e := range all {
		err = errors.Join(err, tx.Delete(e))
	}
	return err
}

// buryIn replaces all records of an attachment with one abandoned record.
func buryIn(tx *Tx, k Key, bootID, reason string) error {
	return errors.Join(remove(tx, k), tx.Put(&Record{Key: k, State: Abandoned, Reason: reason, Added: Added{Host: Host{BootID: bootID}}}))
}

// undoneOf returns the abandoned record of an attachment, or nil.
func undoneOf(tx *Tx, k Key) (*Record, error) {
	all, err := tx.Records(k)
	for _, e := range all {
		if e.State == Abandoned {
			return e, err
		}
	}
	return nil, err
}

// within returns a context that ends after d.
func within(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}
