package plugin

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/journal"
)

// keeper is a delegate that writes no file and needs none: it takes and gives back a folder, which taken lists. It is a shell
// script, with more commands before what it does.
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

// everyVerb are those of an attachment and those of a network.
var everyVerb = []string{"ADD", "CHECK", "DEL", "GC", "STATUS"}

// asking is an input for any verb, in the version that has them all.
func (p *pod) asking(command, chain string, changes map[string]any) *input {
	p.Helper()
	all := map[string]any{"cniVersion": "1.1.0"}
	maps.Copy(all, changes)
	return p.input(command, p.entryOf(chain, all))
}

// TestHostileNetworkName has every verb with a network that would lead out of its folders: it is refused, and nothing is made.
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

// TestNameTwice: skel checks the last "name" of any case, unwind goes by the last of exactly this one. Neither may lead out.
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

// TestLongNames has names that no file and no key of the journal can have. An ADD goes on without the journal and says so, or is
// refused before it takes anything; the DEL gives all back.
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

// TestHostileList has a GC whose list, and whose journal, have names that would lead out of their folders.
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

// TestBigConfiguration has configurations of a size or depth that no network has: refused with words that say what is wrong, or
// carried out in whole.
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
			return `{"plugins": [{"type": "one"}, {"type": "two", "x": "` + strings.Repeat("x", maxConfig-2000) + `"}]}`
		}, ""},
		{"300 levels", func(n *node) string {
			return `{"plugins": [{"type": "one", "x": ` + nested(300) + `}, {"type": "two"}]}`
		}, ""},
		// encoding/json reads 10,000 levels; the journal's entry has some around the delegate's own.
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

// rawEntry is entryOf with a chain that no encoder has to bear.
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

// TestEnvironmentTwice has each variable come twice, with another value: what the delegates get is what the journal has.
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
		// Not by os/exec, which would take one of the two out.
		started, err := os.StartProcess(filepath.Join(n.path[0], Name), []string{Name}, &os.ProcAttr{Env: env, Files: []*os.File{in, os.Stderr, os.Stderr}})
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

// TestMuchEnvironment has nearly as much environment as the kernel lets a process have. The delegates get it too.
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

// TestNotTextAtDEL: what an ADD refuses, since the journal could not give it back, a DEL of an attachment from before takes, and
// goes on without the journal.
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

// TestClockSetBack has an attachment of a clock that was a year ahead: it lives, is not older for it, and its DEL passes. The
// time of the last sweep is that of the clock as it is.
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
		if err := tx.SetCounter(now, LastSweep); err != nil {
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
	if err := n.store.View(t.Context(), func(tx *journal.Tx) error { last = tx.Counter(LastSweep); return nil }); err != nil {
		t.Fatal(err)
	}
	if last > uint64(e.Newest().Created.Wall.Unix())-year/2 {
		t.Errorf("the last sweep was at %d, by the clock that was ahead", last)
	}
	p.mustDel(list)
	n.nothingLeft()
}
