package plugin

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/record"
	"cni-unwind/testdata/unwind/env"
)

// keeper is a delegate that neither writes nor needs a file. It takes and releases a directory,
// which taken lists. It is a shell script that runs more first.
func (n *node) keeper(name, more string) string {
	n.Helper()
	n.mkdir(filepath.Join(n.faultyDir(), "taken"))
	folder := filepath.Join(n.faultyDir(), "taken", name)
	n.script(name, more+`
case $CNI_COMMAND in
ADD) mkdir `+folder+` || exit 1; echo '{"cniVersion": "1.0.0", "ips": []}' ;;
DEL) rmdir `+folder+` 2>/dev/null || : ;;
esac`)
	return fmt.Sprintf(`{"type": %q}`, name)
}

// everyVerb lists the verbs of an attachment and those of a network.
var everyVerb = []string{"ADD", "CHECK", "DEL", "GC", "STATUS"}

// asking returns an input for any verb, in the version that has them all.
func (p *pod) asking(command, chain string, changes map[string]any) *input {
	p.Helper()
	all := map[string]any{"cniVersion": "1.1.0"}
	maps.Copy(all, changes)
	return p.input(command, p.entryOf(chain, all))
}

// TestHostileNetworkName: every verb refuses a network name that leads out of its directories, and
// creates nothing.
func TestHostileNetworkName(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"../x", "a/b", "..", ".", "a\x00b", "a\nb", " ", "-", "\u2028", "a\u202eb"} {
		for _, command := range everyVerb {
			t.Run(fmt.Sprintf("%s %q", command, name), func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				chain := `{"cniVersion": "1.1.0", "plugins": [` + n.faulty("p0", "") + `]}`
				out := n.start(n.pod("a").asking(command, chain, map[string]any{"name": name}))
				if out.code == 0 || !strings.Contains(out.said.Msg, "network name") {
					t.Errorf("exit %d: %s", out.code, out.stdout)
				}
				n.untouched()
			})
		}
	}
}

// TestNameTwice: skel checks the last "name" in any case, unwind uses the last one in lower case.
// Neither may lead out.
func TestNameTwice(t *testing.T) {
	t.Parallel()
	for _, keys := range []string{`"NAME": "good", "name": "../x"`, `"name": "../x", "NAME": "good"`, `"name": "../x", "name": "good", "nAme": "../y"`} {
		t.Run(keys, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			entry := strings.Replace(n.entryOf(`{"plugins": [`+n.faulty("p0", "")+`]}`, map[string]any{"name": nil}), "{", "{"+keys+", ", 1)
			if out := n.start(n.pod("a").input("ADD", entry)); out.said.Code != types.ErrInvalidNetworkConfig {
				t.Errorf("exit %d: %s", out.code, out.stdout)
			}
			n.untouched()
		})
	}
}

// TestLongNames: names are too long for a file or for a key of the journal. An ADD goes on without
// the journal and says so, or is refused before it takes anything. The DEL releases all.
func TestLongNames(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, key string
		length    int
		journaled bool
	}{
		{"a container ID of 300 bytes", "CNI_CONTAINERID", 300, true},
		{"a container ID of 30,000 bytes", "CNI_CONTAINERID", 30_000, true},
		{"a container ID of 100,000 bytes", "CNI_CONTAINERID", 100_000, false},
		{"a network of 300 bytes", "name", 300, true},
		{"a network of 100,000 bytes", "name", 100_000, false},
	} {
		for _, onFailure := range []string{"degrade", "fail"} {
			t.Run(tt.name+", "+onFailure, func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				n.conf["onJournalFailure"] = onFailure
				chain := `{"plugins": [` + n.keeper("one", "") + `, ` + n.keeper("two", "") + `]}`
				long := strings.Repeat("a", tt.length)
				p, changes := n.pod("a"), map[string]any{}
				if tt.key == "name" {
					changes["name"] = long
				} else {
					p.ContainerID = long
				}
				out := n.start(p.input("ADD", n.entryOf(chain, changes)))
				refused := !tt.journaled && onFailure == "fail"
				if refused != (out.code != 0) || refused != (len(n.taken()) == 0) || !tt.journaled && !strings.Contains(out.stdout+out.stderr, "key too large") {
					t.Errorf("ADD: exit %d, taken %v, %.300s\n%.2000s", out.code, n.taken(), out.stdout, out.stderr)
				}
				if out.code == 0 {
					changes["prevResult"] = json.RawMessage(out.stdout)
				}
				if out := n.start(p.input("DEL", n.entryOf(chain, changes))); out.code != 0 || len(n.taken()) > 0 {
					t.Errorf("DEL: %.300s, taken %v", out.stdout, n.taken())
				}
				if entries := n.entries(); len(entries) > 0 {
					t.Errorf("the journal has %d entries", len(entries))
				}
			})
		}
	}
}

// TestHostileList runs a GC whose list, and whose journal, have names that lead out of their
// directories.
func TestHostileList(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.outer = "1.1.0"
	victim := filepath.Join(n.dir, "victim")
	n.write(victim, "victim")
	var valid []map[string]string
	for _, id := range []string{"../../victim", "/etc/passwd", "a\x00b", strings.Repeat("x", 100_000), "*", "\xff"} {
		valid = append(valid, map[string]string{"containerID": id, "ifname": "../../../victim"})
	}
	p := n.pod("a")
	chain := `{"cniVersion": "1.1.0", "plugins": [` + n.faulty("p0", "") + `]}`
	if out := n.start(p.asking("ADD", chain, nil)); out.code != 0 {
		t.Fatal(out.stdout)
	}
	if out := n.start(p.asking("GC", chain, map[string]any{"cni.dev/valid-attachments": valid})); out.code != 0 {
		t.Errorf("GC: %s", out.stdout)
	}
	if data, err := os.ReadFile(victim); err != nil || string(data) != "victim" {
		t.Errorf("the victim: %q, %v", data, err)
	}
	n.nothingLeft()
}

// TestBigConfiguration: a configuration of a size or depth that no network has is either refused
// with an error that says why, or carried out in full.
func TestBigConfiguration(t *testing.T) {
	t.Parallel()
	nested := func(depth int) string { return strings.Repeat(`[`, depth) + strings.Repeat(`]`, depth) }
	many := func(n *node, count int, last string) string {
		return `{"plugins": [` + strings.Repeat(`{"type": "one"}, `, count) + last + `]}`
	}
	for _, tt := range []struct {
		name  string
		chain func(n *node) string
		want  string // in the error of the ADD; "": it succeeds
	}{
		{"10,000 plugins", func(n *node) string { return many(n, 9_999, `{"type": "two"}`) },
			`unwind: key "chain": key "plugins" has 10000 plugins, more than 500`},
		{"500 plugins, the last has no type", func(n *node) string { return many(n, 499, `{}`) },
			`unwind: key "chain": plugins[499]: key "type" is missing`},
		{"500 plugins, the first fails", func(n *node) string {
			n.script("one", "[ $CNI_COMMAND != ADD ]")
			return many(n, 499, `{"type": "one"}`)
		}, `plugin type="one" failed (add)`},
		{"500 plugins", func(n *node) string {
			n.script("one", `[ $CNI_COMMAND != ADD ] || echo '{"cniVersion": "1.0.0", "ips": []}'`)
			return `{"plugins": [{"type": "two"}, {"type": "three"}` + strings.Repeat(`, {"type": "one"}`, 498) + `]}`
		}, ""},
		{"4 MiB", func(n *node) string {
			return `{"plugins": [{"type": "one"}, {"type": "two", "x": "` + strings.Repeat("x", netconf.MaxConfig-2000) + `"}]}`
		}, ""},
		{"300 levels", func(n *node) string {
			return `{"plugins": [{"type": "one", "x": ` + nested(300) + `}, {"type": "two"}]}`
		}, ""},
		// encoding/json reads 10,000 levels; the journal's entry adds some around the delegate's
		// own.
		{"9,990 levels", func(n *node) string {
			return `{"plugins": [{"type": "one", "x": ` + nested(9_990) + `}, {"type": "two"}]}`
		}, ""},
		{"10,000 levels", func(n *node) string {
			return `{"plugins": [{"type": "one", "x": ` + nested(10_000) + `}, {"type": "two"}]}`
		}, "exceeded max depth"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.keeper("one", "")
			n.keeper("two", "")
			n.keeper("three", "")
			chain := tt.chain(n)
			p := n.pod("a")
			out := n.start(&input{env: p.input("ADD", "").env, stdin: n.rawEntry(chain)})
			if (out.code == 0) != (tt.want == "") || !strings.Contains(out.said.Msg, tt.want) {
				t.Errorf("ADD: exit %d, %.500s\n%.2000s", out.code, out.stdout, out.stderr)
			}
			if taken := n.taken(); len(taken) != 2 && out.code == 0 || len(taken) != 0 && out.code != 0 {
				t.Errorf("taken: %v", taken)
			}
			out = n.start(&input{env: p.input("DEL", "").env, stdin: n.rawEntry(chain)})
			if refused := strings.Contains(tt.want, "max depth"); (out.code != 0) != refused {
				t.Errorf("DEL: %.500s\n%.2000s", out.stdout, out.stderr)
			}
			n.nothingLeft()
		})
	}
}

// rawEntry is entryOf with a chain that no encoder has to handle.
func (n *node) rawEntry(chain string) string {
	return strings.Replace(n.entryOf(`"CHAIN"`, nil), `"CHAIN"`, chain, 1)
}

// TestKeysTwice: of a key that comes twice the last one counts, at ADD and at DEL.
func TestKeysTwice(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	decoy := filepath.Join(n.dir, "decoy")
	entry := strings.Replace(n.entryOf(`{"plugins": [`+n.faulty("p0", "")+`]}`, nil), "{",
		`{"stateDir": "`+decoy+`", "chain": {"plugins": [{"type": "gone"}]}, "onJournalFailure": "never", "onJournalFailure": "fail", `, 1)
	p := n.pod("a")
	if out := n.start(p.input("ADD", entry)); out.code != 0 || len(n.taken()) != 1 {
		t.Fatalf("ADD: %s", out.stdout)
	}
	if _, err := os.Lstat(decoy); err == nil {
		t.Error("the first stateDir is in use")
	}
	if out := n.start(p.input("DEL", entry)); out.code != 0 {
		t.Errorf("DEL: %s", out.stdout)
	}
	n.nothingLeft()
}

// TestEnvironmentTwice: each variable comes twice, with different values. The delegates get the
// value that the journal has.
func TestEnvironmentTwice(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	stdin := filepath.Join(n.dir, "stdin")
	n.write(stdin, n.entryOf(`{"plugins": [`+n.faulty("p0", "")+`]}`, nil))
	p := n.pod("a")
	for _, command := range []string{"ADD", "DEL"} {
		env := []string{"CNI_ARGS=A=b"}
		for name, value := range p.input(command, "").env {
			env = append(env, name+"="+value)
		}
		env = append(env, "CNI_CONTAINERID=other", "CNI_IFNAME=eth7", "CNI_NETNS=/none", "CNI_ARGS=X=y", "CNI_PATH=/none", "CNI_COMMAND=CHECK")
		in, err := os.Open(stdin)
		if err != nil {
			t.Fatal(err)
		}
		defer in.Close()
		// os/exec would remove one of the two.
		started, err := os.StartProcess(filepath.Join(n.path[0], netconf.Name), []string{netconf.Name}, &os.ProcAttr{Env: env, Files: []*os.File{in, os.Stderr, os.Stderr}})
		if err != nil {
			t.Fatal(err)
		}
		if state, err := started.Wait(); err != nil || !state.Success() {
			t.Fatalf("%s: %v, %v", command, state, err)
		}
		if command == "ADD" && p.entry() == nil {
			t.Errorf("the journal has %+v", n.entries())
		}
	}
	calls := n.callLog()
	for _, l := range calls {
		if l.ContainerID != "a" || l.IfName != "eth0" || l.Args != "A=b" || l.Path != strings.Join(n.path, ":") {
			t.Errorf("%s had %q, %q, %q, %q", l.Command, l.ContainerID, l.IfName, l.Args, l.Path)
		}
	}
	if len(calls) != 2 {
		t.Errorf("%d calls", len(calls))
	}
	n.nothingLeft()
}

// TestMuchEnvironment: the environment is nearly as large as the kernel allows. The delegates get
// it too.
func TestMuchEnvironment(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	chain := `{"plugins": [` + n.faulty("p0", "") + `]}`
	p := n.pod("a")
	var much []string
	for i := range 15 {
		much = append(much, fmt.Sprintf("MUCH%d=%s", i, strings.Repeat("x", 127<<10)))
	}
	in := p.input("ADD", n.entryOf(chain, nil))
	in.more = much
	if out := n.start(in); out.code != 0 || len(n.taken()) != 1 {
		t.Fatalf("ADD: %s", out.stdout)
	}
	in = p.input("DEL", n.entryOf(chain, nil))
	in.more = much
	if out := n.start(in); out.code != 0 {
		t.Fatalf("DEL: %s", out.stdout)
	}
	n.nothingLeft()
}

// TestNotTextAtDEL: an ADD refuses text that the journal could not reproduce. A DEL of an earlier
// attachment accepts it and goes on without the journal.
func TestNotTextAtDEL(t *testing.T) {
	t.Parallel()
	for _, env := range []map[string]string{{"CNI_IFNAME": "eth\xff"}, {"CNI_ARGS": "X=\xff"}} {
		t.Run(fmt.Sprintf("%q", slices.Collect(maps.Values(env))), func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			chain := `{"plugins": [` + n.keeper("one", `[ $CNI_COMMAND = DEL ] && [ -e "$0.refuse" ] && exit 1`) + `]}`
			n.mkdir(filepath.Join(n.faultyDir(), "taken", "one"))
			n.write(filepath.Join(n.path[0], "one.refuse"), "")
			in := n.pod("a").input("DEL", n.entryOf(chain, map[string]any{"prevResult": json.RawMessage(`{"cniVersion": "1.0.0", "ips": []}`)}))
			maps.Copy(in.env, env)
			out := n.start(in)
			if out.code == 0 || !strings.Contains(out.said.Msg, "DEL incomplete") || !strings.Contains(out.stderr, "is not valid UTF-8") {
				t.Errorf("DEL: %s\n%s", out.stdout, out.stderr)
			}
			if entries := n.entries(); len(entries) > 0 {
				t.Errorf("the journal has %+v", entries)
			}
			if err := os.Remove(filepath.Join(n.path[0], "one.refuse")); err != nil {
				t.Fatal(err)
			}
			if out := n.start(in); out.code != 0 || len(n.taken()) > 0 {
				t.Errorf("DEL: %s, taken %v", out.stdout, n.taken())
			}
		})
	}
}

// TestClockSetBack: an attachment was added while the clock was a year ahead. It lives, is not
// older for that, and its DEL passes. The time of the last sweep follows the present clock.
func TestClockSetBack(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.outer, n.conf["gracePeriod"] = "1.1.0", "1h"
	list := n.unwind(n.faulty("p0", ""))
	p := n.pod("a")
	p.mustAdd(list)
	e := p.entry()
	const year = 365 * 24 * 60 * 60
	if err := n.store.Update(t.Context(), func(tx *journal.Tx) error {
		g := e.Newest()
		g.Created.Wall, e.Since.Wall = g.Created.Wall.AddDate(1, 0, 0), e.Since.Wall.AddDate(1, 0, 0)
		now := uint64(g.Created.Wall.Unix())
		if err := tx.SetCounter(now, record.LastSweep); err != nil {
			return err
		}
		if err := tx.Delete(e.Key); err != nil {
			return err
		}
		e.State = journal.Adding
		if err := tx.Put(e); err != nil {
			return err
		}
		e.State = journal.Live
		return tx.Put(e)
	}); err != nil {
		t.Fatal(err)
	}
	gc := func(changes map[string]any) {
		t.Helper()
		if out := n.ask("GC", "1.0.0", changes, n.faulty("p0", "")); out.code != 0 {
			t.Errorf("GC: %s", out.stdout)
		}
	}
	gc(map[string]any{"cni.dev/valid-attachments": []any{}})
	if e := p.entry(); e == nil || e.State != journal.Live {
		t.Fatalf("after a GC within the grace period: %+v", e)
	}
	gc(nil)
	var last uint64
	if err := n.store.View(t.Context(), func(tx *journal.Tx) error { last = tx.Counter(record.LastSweep); return nil }); err != nil {
		t.Fatal(err)
	}
	if last > uint64(e.Newest().Created.Wall.Unix())-year/2 {
		t.Errorf("the last sweep was at %d, by the clock that was ahead", last)
	}
	p.mustDel(list)
	n.nothingLeft()
}

// TestPlantedLinks: stateDir has links, and other things that no journal consists of, which only
// root can have put there. No verb creates, changes or waits for their targets. Pods come and go as
// without a journal.
func TestPlantedLinks(t *testing.T) {
	t.Parallel()
	for _, at := range []string{"", "journal.db", "journal.db.new", "journal.lock", "locks", "locks/LOCK", "log"} {
		for _, to := range []string{"a file", "nothing", "a folder", "a pipe"} {
			t.Run(at+" to "+to, func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				n.conf["gracePeriod"] = "1h"
				p := n.pod("a")
				at := strings.Replace(at, "LOCK", filepath.Base(n.store.LockPath(p.key())), 1)
				outside := filepath.Join(n.dir, "outside")
				n.mkdir(outside)
				victim := n.victim(outside, to)
				n.plant(victim, filepath.Join(n.stateDir, at), to)
				before := snapshot(t, outside)
				chain := `{"cniVersion": "1.0.0", "plugins": [` + n.faulty("p0", "") + `]}`
				changes := map[string]any{}
				if at == "log" {
					changes["logFile"] = filepath.Join(n.stateDir, "log")
				}
				for _, command := range []string{"STATUS", "ADD", "CHECK", "GC", "STATUS", "DEL", "GC"} {
					began := time.Now()
					out := n.start(p.asking(command, chain, changes))
					// A GC is an error if it could not look.
					if out.code != 0 && command != "GC" || command == "ADD" && len(n.taken()) != 1 {
						t.Errorf("%s: exit %d, %s\n%s", command, out.code, out.stdout, out.stderr)
					}
					if took := time.Since(began); took > 20*time.Second {
						t.Errorf("%s took %s", command, took)
					}
					if command == "ADD" {
						changes["prevResult"] = json.RawMessage(out.stdout)
					}
				}
				if len(n.taken()) > 0 {
					t.Errorf("taken: %v", n.taken())
				}
				if after := snapshot(t, outside); after != before {
					t.Errorf("outside was\n%sand is\n%s", before, after)
				}
			})
		}
	}
}

// victim makes the target of a link.
func (n *node) victim(dir, kind string) string {
	n.Helper()
	path := filepath.Join(dir, "victim")
	switch kind {
	case "a file":
		n.write(path, "victim")
	case "a folder":
		n.mkdir(path)
	case "a pipe":
		if err := unix.Mkfifo(path, 0o600); err != nil {
			n.Fatal(err)
		}
	}
	return path
}

// plant puts a link to the victim, or the pipe itself, in a place of stateDir.
func (n *node) plant(victim, place, kind string) {
	n.Helper()
	if err := os.MkdirAll(filepath.Dir(place), 0o700); err != nil {
		n.Fatal(err)
	}
	var err error
	if kind == "a pipe" {
		err = unix.Mkfifo(place, 0o600)
	} else {
		err = os.Symlink(victim, place)
	}
	if err != nil {
		n.Fatal(err)
	}
}

// snapshot describes all that is in a directory.
func snapshot(t *testing.T, dir string) string {
	t.Helper()
	var text bytes.Buffer
	err := filepath.Walk(dir, func(path string, info os.FileInfo, err error) error {
		if err != nil {
			return err
		}
		data := []byte(nil)
		if info.Mode().IsRegular() {
			data, err = os.ReadFile(path)
		}
		fmt.Fprintf(&text, "%s %s %s %q\n", path, info.Mode(), info.ModTime(), data)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return text.String()
}

// TestStateDirOfOthers: others can write to stateDir, or own it. The message names it and says what
// to do.
func TestStateDirOfOthers(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		change func(n *node) error
		want   string
	}{
		{"mode", func(n *node) error { return os.Chmod(n.stateDir, 0o777) }, "is writable by others (mode 0777); chmod it to 0700"},
		{"owner", func(n *node) error { return os.Chown(n.stateDir, 65534, 0) }, "belongs to user 65534; chown it to root"},
		{"file", func(n *node) error { return os.WriteFile(n.stateDir+"/locks", nil, 0o600) }, "not a directory"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			if err := os.Mkdir(n.stateDir, 0o700); err != nil {
				t.Fatal(err)
			}
			if err := tt.change(n); err != nil {
				t.Fatal(err)
			}
			p := n.pod("a")
			chain := `{"cniVersion": "1.1.0", "plugins": [` + n.faulty("p0", "") + `]}`
			strict := map[string]any{"onJournalFailure": "fail"}
			for _, command := range []string{"ADD", "STATUS"} {
				if out := n.start(p.asking(command, chain, strict)); out.code == 0 || !strings.Contains(out.said.Msg, tt.want) {
					t.Errorf("%s: exit %d, %s", command, out.code, out.stdout)
				}
			}
			if len(n.taken()) > 0 {
				t.Errorf("taken by an ADD that was refused: %v", n.taken())
			}
			for _, command := range []string{"ADD", "STATUS", "DEL"} {
				out := n.start(p.asking(command, chain, map[string]any{"prevResult": prevFor(command)}))
				if out.code != 0 || !strings.Contains(out.stderr, n.stateDir) || !strings.Contains(out.stderr, tt.want) {
					t.Errorf("%s: exit %d, %s\n%s", command, out.code, out.stdout, out.stderr)
				}
			}
			if len(n.taken()) > 0 || len(n.names(n.stateDir)) > 1 {
				t.Errorf("taken %v, in stateDir %v", n.taken(), n.names(n.stateDir))
			}
		})
	}
}

// prevFor returns the prevResult that a runtime gives with a verb, or nil.
func prevFor(command string) any {
	if command != "DEL" {
		return nil
	}
	return json.RawMessage(`{"cniVersion": "1.1.0", "ips": []}`)
}

// TestHostileDelegate: the second of two delegates misbehaves. What an ADD took is released, also
// when a process escaped the delegate's process group. A DEL ends in its time and stays pending.
func TestHostileDelegate(t *testing.T) {
	t.Parallel()
	const forever = `sleep 60`
	for _, tt := range []struct {
		name, does string
		ok         bool // success all the same
		killed     bool
	}{
		{"100 MB on stdout", `head -c 100000000 /dev/zero`, false, false},
		{"100 MB on stderr", `head -c 100000000 /dev/zero >&2; exit 1`, false, false},
		{"nothing", `:`, false, false},
		{"a result of 9,990 levels", `printf '{"cniVersion": "1.0.0", "ips": [], "x": '; head -c 9990 /dev/zero | tr '\0' '['; head -c 9990 /dev/zero | tr '\0' ']'; echo '}'`, true, false},
		{"a result of 20,000 levels", `printf '{"cniVersion": "1.0.0", "x": '; head -c 20000 /dev/zero | tr '\0' '['; head -c 20000 /dev/zero | tr '\0' ']'; echo '}'`, false, false},
		{"an error of 9,990 levels", `printf '{"code": 11, "msg": "no room", "details": '; head -c 9990 /dev/zero | tr '\0' '['; exit 1`, false, false},
		{"a result, and an error code", `echo '{"cniVersion": "1.0.0", "ips": []}'; exit 1`, false, false},
		{"an error, and no error code", `echo '{"cniVersion": "1.0.0", "code": 11, "msg": "no room"}'`, true, false},
		{"a result twice", `echo '{"cniVersion": "1.0.0", "ips": []}{"cniVersion": "1.0.0", "ips": []}'`, false, false},
		{"ignores SIGTERM", `trap "" TERM INT HUP; ` + forever, false, true},
		{"closes stdout and hangs", `exec >&- 2>&-; ` + forever, false, true},
		{"closes the lock's descriptor and hangs", `exec 20>&-; ` + forever, false, true},
		{"unlocks the lock", `flock -u 20; echo '{"cniVersion": "1.0.0", "ips": []}'`, true, false},
		{"stops itself", `kill -STOP $$`, false, true},
		{"leaves its group and hangs", `setsid ` + forever, false, true},
		{"leaves a daemon", `setsid ` + forever + ` >/dev/null 2>&1 & echo '{"cniVersion": "1.0.0", "ips": []}'`, true, false},
		{"leaves a daemon with the output", `setsid ` + forever + ` & echo '{"cniVersion": "1.0.0", "ips": []}'`, true, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t).hasty()
			n.conf["gracePeriod"] = "1ms"
			body := `[ -e "$0.well" ] && { echo '{"cniVersion": "1.0.0", "ips": []}'; exit; }` + "\n"
			n.script("bad", body+tt.does)
			list := n.unwind(n.faulty("p0", ""), `{"type": "bad"}`)
			p := n.pod("a")
			began := time.Now()
			_, err := p.add(list)
			if took := time.Since(began); took > 20*time.Second {
				t.Errorf("the ADD took %s", took)
			}
			if (err == nil) != tt.ok || err != nil && !strings.HasPrefix(err.Error(), `plugin type="unwind" failed (add): plugin type="bad" failed (add): `) {
				t.Errorf("ADD: %v", err)
			}
			if want := []string{"a.eth0.p0"}; tt.ok != slices.Equal(n.taken(), want) {
				t.Errorf("taken: %v", n.taken())
			}
			e := p.entry()
			if !tt.ok && tt.killed && (e == nil || e.State != journal.Unwinding || e.Pending() != 1) {
				t.Errorf("a delegate that was killed is owed another DEL: %+v", e)
			}
			n.write(filepath.Join(n.path[0], "bad.well"), "")
			p.mustDel(list)
			n.nothingLeft()
		})
	}
}

// TestEffectAfterTheGroup: a child that left its delegate's process group takes something after the
// delegate was killed and undone. The second DEL, after gracePeriod, releases it.
func TestEffectAfterTheGroup(t *testing.T) {
	t.Parallel()
	n := newNode(t).hasty()
	n.conf["gracePeriod"] = "6s"
	taken := filepath.Join(n.faultyDir(), "taken", "late")
	n.mkdir(filepath.Dir(taken))
	n.script("bad", `case $CNI_COMMAND in ADD) setsid sh -c 'sleep 4; mkdir `+taken+`' & wait ;; DEL) rmdir `+taken+` 2>/dev/null || : ;; esac`)
	list := n.unwind(n.faulty("p0", ""), `{"type": "bad"}`)
	p := n.pod("a")
	if _, err := p.add(list); err == nil || !strings.Contains(err.Error(), "timed out") {
		t.Errorf("ADD: %v", err)
	}
	eventually(t, "the child takes effect", func() bool { return slices.Equal(n.taken(), []string{"late"}) })
	eventually(t, "the second DEL", func() bool {
		if out := n.ask("GC", "1.0.0", nil, n.faulty("p0", ""), `{"type": "bad"}`); out.code != 0 {
			t.Errorf("GC: %s", out.stdout)
		}
		time.Sleep(300 * time.Millisecond)
		return len(n.taken()) == 0
	})
	n.nothingLeft()
}

// TestNoProc runs every verb without /proc. unwind cannot tell who is alive, so it releases
// nothing. An ADD takes nothing, since it could not print its success: skel looks at /proc after
// the ADD.
func TestNoProc(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.outer, n.conf["gracePeriod"] = "1.1.0", "1ms"
	chain := `{"cniVersion": "1.0.0", "plugins": [` + n.keeper("one", "") + `]}`
	p := n.pod("a")
	added := n.start(p.asking("ADD", chain, nil))
	if added.code != 0 {
		t.Fatal(added.stdout)
	}
	blind := func(command string, changes map[string]any) outcome {
		t.Helper()
		in := p.asking(command, chain, changes)
		in.more, in.first = []string{env.NoProc + "=1"}, ":"
		return n.start(in)
	}
	empty := map[string]any{"cni.dev/valid-attachments": []any{}}
	time.Sleep(10 * time.Millisecond)
	p.dropNetNS() // with /proc, it is dead
	for _, command := range []string{"STATUS", "GC"} {
		if out := blind(command, empty); out.code != 0 || len(n.taken()) != 1 {
			t.Errorf("%s: exit %d, %s, taken %v\n%s", command, out.code, out.stdout, n.taken(), out.stderr)
		}
	}
	if e := p.entry(); e == nil || e.State != journal.Live {
		t.Errorf("the journal has %+v", e)
	}
	other := n.pod("b")
	in := other.asking("ADD", strings.Replace(chain, "one", "two", 1), nil)
	n.keeper("two", "")
	in.more, in.first = []string{env.NoProc + "=1"}, ":"
	if out := n.start(in); out.said.Code != types.ErrInvalidNetNS || !strings.Contains(out.said.Msg, "/proc") || len(n.taken()) != 1 {
		t.Errorf("ADD: exit %d, %s, taken %v\n%s", out.code, out.stdout, n.taken(), out.stderr)
	}
	if out := blind("DEL", nil); out.code != 0 || len(n.taken()) != 0 {
		t.Errorf("DEL: exit %d, %s, taken %v\n%s", out.code, out.stdout, n.taken(), out.stderr)
	}
	n.nothingLeft()
}

// TestNoPermission runs unwind as a user who may not write to stateDir.
func TestNoPermission(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.makeJournal()
	chain := `{"plugins": [` + n.keeper("one", "") + `]}`
	for _, dir := range []string{filepath.Dir(n.dir), n.path[0], filepath.Join(n.path[0], "one")} {
		n.chmod(dir, 0o755)
	}
	n.chmod(filepath.Join(n.faultyDir(), "taken"), 0o777)
	p := n.pod("a")
	as := func(command string, changes map[string]any) outcome {
		t.Helper()
		in := p.input(command, n.entryOf(chain, changes))
		in.more = []string{env.UID + "=65534"}
		return n.start(in)
	}
	out := as("ADD", map[string]any{"onJournalFailure": "fail"})
	if out.said.Code != types.ErrTryAgainLater || !strings.Contains(out.said.Msg, "permission denied") || len(n.taken()) > 0 {
		t.Errorf("ADD: %s, taken %v", out.stdout, n.taken())
	}
	out = as("ADD", nil)
	if out.code != 0 || len(n.taken()) != 1 || !strings.Contains(out.stderr, n.stateDir) {
		t.Errorf("ADD: %s, taken %v\n%s", out.stdout, n.taken(), out.stderr)
	}
	if out = as("DEL", map[string]any{"prevResult": json.RawMessage(out.stdout)}); out.code != 0 || len(n.taken()) > 0 {
		t.Errorf("DEL: %s, taken %v\n%s", out.stdout, n.taken(), out.stderr)
	}
}

// TestLimits runs unwind with low resource limits: an ADD takes all or nothing, and a DEL releases
// all, or says that it did not.
func TestLimits(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		limit    string
		want     string // in what the ADD prints or logs
		helpless bool   // no delegate can be started
	}{
		{"ulimit -n 20", "", false}, // the delegate's lock has a higher number
		{"ulimit -n 16", "too many open files", true},
		{"ulimit -n 8", "RLIMIT_NOFILE", true},
		{"ulimit -f 0", "file too large", false}, // 512 bytes each
		{"ulimit -f 8", "file too large", false},
		{"ulimit -f 40", "", false},
		{"umask 0777", "", false},
		{"umask 0", "", false},
	} {
		for _, fails := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, the ADD fails: %t", tt.limit, fails), func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				refuse := ""
				if fails {
					refuse = `[ $CNI_COMMAND != ADD ] || exit 1`
				}
				chain := `{"plugins": [` + n.keeper("one", "") + `, ` + n.keeper("two", refuse) + `]}`
				p := n.pod("a")
				in := p.input("ADD", n.entryOf(chain, nil))
				in.first = tt.limit
				out := n.start(in)
				if taken := n.taken(); (out.code == 0) == (fails || tt.helpless) || len(taken) != 2 && out.code == 0 || len(taken) != 0 && out.code != 0 {
					t.Errorf("ADD: exit %d, %s, taken %v", out.code, out.stdout, taken)
				}
				if !strings.Contains(out.stdout+out.stderr, tt.want) {
					t.Errorf("%q is not said:\n%s\n%s", tt.want, out.stdout, out.stderr)
				}
				if out.code != 0 && !fails {
					out = n.start(p.input("ADD", n.entryOf(chain, nil)))
				}
				changes := map[string]any{}
				if out.code == 0 {
					changes["prevResult"] = json.RawMessage(out.stdout)
				}
				in = p.input("DEL", n.entryOf(chain, changes))
				in.first = tt.limit
				if out := n.start(in); tt.helpless && out.code == 0 && len(n.taken()) > 0 || !tt.helpless && (out.code != 0 || len(n.taken()) > 0) {
					t.Errorf("DEL: exit %d, %s, taken %v\n%s", out.code, out.stdout, n.taken(), out.stderr)
				}
				if out := n.start(p.input("DEL", n.entryOf(chain, changes))); out.code != 0 {
					t.Errorf("DEL, without the limit: %s", out.stdout)
				}
				if entries := n.entries(); len(entries)+len(n.taken()) > 0 {
					t.Errorf("the journal has %d entries, taken %v", len(entries), n.taken())
				}
			})
		}
	}
}

// TestNoOutput: an ADD whose result cannot be printed is undone. A DEL has nothing to print.
func TestNoOutput(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	chain := `{"plugins": [` + n.faulty("p0", "") + `]}`
	p := n.pod("a")
	in := p.input("ADD", n.entryOf(chain, nil))
	in.first, in.mute = "exec >/dev/full", true
	if out := n.start(in); out.code != 1 || !strings.Contains(out.stderr, "no space left on device") {
		t.Errorf("ADD: exit %d\n%s", out.code, out.stderr)
	}
	n.nothingLeft()
	if out := n.start(p.input("ADD", n.entryOf(chain, nil))); out.code != 0 {
		t.Fatal(out.stdout)
	}
	in = p.input("DEL", n.entryOf(chain, nil))
	in.first, in.mute = "exec >&- 2>&-", true
	if out := n.start(in); out.code != 0 {
		t.Errorf("DEL: exit %d", out.code)
	}
	n.nothingLeft()
}

// TestNoInput: a closed stdin is the same as an empty one.
func TestNoInput(t *testing.T) {
	t.Parallel()
	for _, command := range everyVerb {
		n := newNode(t)
		in := n.pod("a").input(command, "")
		in.first = "exec <&-"
		if out := n.start(in); out.said.Code != types.ErrDecodingFailure {
			t.Errorf("%s: exit %d, %s", command, out.code, out.stdout)
		}
		n.untouched()
	}
}
