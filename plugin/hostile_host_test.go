package plugin

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
)

// TestPlantedLinks has links, and what no journal is made of, in stateDir, where only root can have put them: no verb creates,
// changes or waits for what is behind them. Pods come and go meanwhile as without a journal.
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
					// A GC says that it could not look.
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

// victim makes what a link leads to.
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

// plant puts a link to the victim in a place of stateDir; a pipe goes there itself.
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

// snapshot describes all that is in a folder.
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

// TestStateDirOfOthers has a stateDir that others can write to, or that is another user's: the words name it, and say what to do.
func TestStateDirOfOthers(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		change func(n *node) error
		want   string
	}{
		{"mode", func(n *node) error { return os.Chmod(n.stateDir, 0o777) }, "can be written to by others (mode 0777); chmod 0700 it"},
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

// prevFor is the prevResult that a runtime gives with a verb, or nil.
func prevFor(command string) any {
	if command != "DEL" {
		return nil
	}
	return json.RawMessage(`{"cniVersion": "1.1.0", "ips": []}`)
}

// TestHostileDelegate has the second of two delegates misbehave: what an ADD took is given back, also by what goes on behind the
// back of its process group, and a DEL ends in its time and stays owed.
func TestHostileDelegate(t *testing.T) {
	t.Parallel()
	const forever = `sleep 60`
	for _, tt := range []struct {
		name, does string
		ok         bool // it is a success all the same
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

// TestEffectAfterTheGroup: a child that left the process group of its delegate takes something after the delegate was killed and
// undone. The second DEL, after gracePeriod, gives that back.
func TestEffectAfterTheGroup(t *testing.T) {
	t.Parallel()
	n := newNode(t).hasty()
	n.conf["gracePeriod"] = "6s"
	taken := filepath.Join(n.faultyDir(), "taken", "late")
	n.mkdir(filepath.Dir(taken))
	n.script("bad", `case $CNI_COMMAND in ADD) setsid sh -c 'sleep 4; mkdir `+taken+`' & wait ;; DEL) rmdir `+taken+` 2>/dev/null || : ;; esac`)
	list := n.unwind(n.faulty("p0", ""), `{"type": "bad"}`)
	p := n.pod("a")
	if _, err := p.add(list); err == nil || !strings.Contains(err.Error(), "did not end in time") {
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

// TestNoProc has every verb where /proc is not mounted. Nothing can be told of who is alive, so nothing is released. An ADD takes
// nothing, for it could not print its success: skel looks at /proc after the ADD.
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
		in.more, in.first = []string{noProcEnv + "=1"}, ":"
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
	in.more, in.first = []string{noProcEnv + "=1"}, ":"
	if out := n.start(in); out.said.Code != types.ErrInvalidNetNS || !strings.Contains(out.said.Msg, "/proc") || len(n.taken()) != 1 {
		t.Errorf("ADD: exit %d, %s, taken %v\n%s", out.code, out.stdout, n.taken(), out.stderr)
	}
	if out := blind("DEL", nil); out.code != 0 || len(n.taken()) != 0 {
		t.Errorf("DEL: exit %d, %s, taken %v\n%s", out.code, out.stdout, n.taken(), out.stderr)
	}
	n.nothingLeft()
}

// TestNoPermission has unwind run as a user who may not write to stateDir.
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
		in.more = []string{uidEnv + "=65534"}
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

// TestLimits has unwind run with little of what the kernel gives: an ADD takes all or nothing, and a DEL gives all back, or says
// that it did not.
func TestLimits(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		limit    string
		want     string // in what is said or logged at ADD
		helpless bool   // no delegate can be started
	}{
		{"ulimit -n 20", "", false}, // the number of a delegate's lock is more
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

// TestNoInput: a stdin that is closed is as an empty one.
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
