package plugin

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// keys are changes of unwind's entry.
type keys = map[string]any

// status runs the STATUS of a chain. Whatever hangs, it must end in two seconds; the rest of the
// time is for a busy machine.
func (n *node) status(chainVersion string, changes keys, plugins ...string) outcome {
	n.Helper()
	began := time.Now()
	out := n.ask("STATUS", chainVersion, changes, plugins...)
	if took := time.Since(began); took > 4*time.Second {
		n.Errorf("STATUS took %s", took)
	}
	return out
}

// wantStatus checks the outcome of a STATUS. Code 0 is success, with nothing on stdout.
func (n *node) wantStatus(what string, out outcome, code uint, msg string) {
	n.Helper()
	if out.said.Code != code || (out.code != 0) != (code != 0) || code == 0 && out.stdout != "" {
		n.Errorf("%s: exit %d, %s; want code %d\n%s", what, out.code, out.stdout, code, out.stderr)
	}
	if out.said.Msg != msg {
		n.Errorf("%s:\n     %s\nwant %s", what, out.said.Msg, msg)
	}
}

// TestStatusOfConfiguration: a configuration that every ADD would refuse is code 50, with the words
// of the ADD. STATUS looks at nothing else and creates nothing.
func TestStatusOfConfiguration(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name    string
		changes keys
		file    string // chainFile's content
		msg     string
	}{
		{"a wrong key", keys{"gracePeriod": "abc"}, "", `unwind: key "gracePeriod": "abc" is not a duration such as "30s" or "10m"`},
		{"two wrong keys", keys{"sweepOnStatus": "no", "stateDir": "x"}, "",
			`unwind: key "stateDir": "x" is not an absolute path; key "sweepOnStatus": "no" is not true or false`},
		{"no chain", keys{"chain": nil}, "",
			`unwind: neither "chain" nor "chainFile" is set; put the plugins to run into "chain": {"plugins": [...]}`},
		{"an empty chain", keys{"chain": keys{"plugins": []string{}}}, "",
			`unwind: key "chain": key "plugins" is empty; put the plugins to run there`},
		{"unwind in unwind", keys{"chain": keys{"plugins": []keys{{"type": "unwind"}}}}, "",
			`unwind: key "chain": plugins[0]: key "type": unwind cannot run inside itself; list the plugins of its chain here`},
		{"chainFile gone", keys{"chain": nil, "chainFile": "FILE.gone"}, "",
			`unwind: chainFile FILE.gone: no such file or directory; ` +
				`the network's provider has not written it, or has removed it`},
		{"chainFile has unwind", keys{"chain": nil, "chainFile": "FILE"}, `{"plugins": [{"type": "unwind"}]}`,
			`unwind: chainFile FILE: plugins[0]: key "type": unwind cannot run inside itself; list the plugins of its chain here`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			file := filepath.Join(n.dir, "10-provider.conflist")
			n.write(file, tt.file)
			if name, is := tt.changes["chainFile"].(string); is {
				tt.changes["chainFile"] = strings.Replace(name, "FILE", file, 1)
			}
			out := n.status("1.1.0", tt.changes, n.faulty("p0", ""))
			n.wantStatus("STATUS", out, 50, strings.Replace(tt.msg, "FILE", file, 1))
			n.untouched()
		})
	}
}

// TestStatusOfNewNode: without a state directory, or with an empty one, STATUS succeeds and changes
// nothing.
func TestStatusOfNewNode(t *testing.T) {
	t.Parallel()
	for _, onFailure := range []string{"degrade", "fail"} {
		for _, there := range []bool{true, false} {
			n := newNode(t)
			n.conf["onJournalFailure"] = onFailure
			if there {
				n.mkdir(n.stateDir)
			}
			for range 2 {
				out := n.status("1.0.0", nil, n.faulty("p0", ""))
				n.wantStatus(fmt.Sprintf("%s, there %t", onFailure, there), out, 0, "")
				if strings.Contains(out.stderr, "level=WARN") {
					t.Errorf("warnings:\n%s", out.stderr)
				}
			}
			n.nothingLeft()
		}
	}
}

// TestStatusOfMissingPlugin: a plugin of the chain, or an IPAM one, that is in no directory is code
// 50. STATUS looks for it again after a second.
func TestStatusOfMissingPlugin(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, plugin, first, details string }{
		{"delegate", `{"type": "gone"}`, "gone", "gone"},
		{"IPAM", `{"type": "bridge", "ipam": {"type": "gone"}}`, "gone", "gone"},
		{"both", `{"type": "gone"}, {"type": "bridge", "ipam": {"type": "away"}}`, "gone", "gone, away"},
	} {
		for _, version := range []string{"1.0.0", "1.1.0"} {
			t.Run(tt.name+" "+version, func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				began := time.Now()
				out := n.status(version, nil, n.faulty("p0", ""), tt.plugin)
				if took := time.Since(began); took < time.Second {
					t.Errorf("it was looked for once only: STATUS took %s", took)
				}
				n.wantStatus("STATUS", out, 50, fmt.Sprintf("unwind: failed to find plugin %q in path %v", tt.first, n.path))
				if out.said.Details != tt.details {
					t.Errorf("details %q, want %q", out.said.Details, tt.details)
				}
			})
		}
	}
}

// TestStatusDuringUpgrade: a plugin that is missing when STATUS looks and is back within the
// second, as in an upgrade, is no failure, even if STATUS must then ask it for its own STATUS.
func TestStatusDuringUpgrade(t *testing.T) {
	t.Parallel()
	for _, as := range []string{`{"type": "upgraded"}`, `{"type": "faulty", "dir": "/tmp", "ipam": {"type": "upgraded"}}`} {
		for _, version := range []string{"1.0.0", "1.1.0"} {
			t.Run(as+" "+version, func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				n.script("upgraded", "echo asked >>"+n.dir+"/asked")
				file := filepath.Join(n.path[0], "upgraded")
				n.rename(file, file+".away")
				answer := make(chan outcome)
				go func() { answer <- n.status(version, nil, as) }()
				eventually(t, "STATUS looks", func() bool { _, err := os.Stat(n.stateDir); return err == nil })
				time.Sleep(100 * time.Millisecond) // it looks at several things at once
				n.rename(file+".away", file)
				n.wantStatus("STATUS", <-answer, 0, "")
				asked, _ := os.ReadFile(n.dir + "/asked")
				if want := version == "1.1.0" && strings.HasPrefix(as, `{"type": "upgraded"`); (string(asked) == "asked\n") != want {
					t.Errorf("the plugin was asked: %q", asked)
				}
			})
		}
	}
}

// TestStatusOfDelegates: STATUS asks delegates if the chain speaks 1.1, each with its own
// configuration. The runtime gets the delegate's words and code. Of several failures it gets the
// gravest: 51 before 50 before all others.
func TestStatusOfDelegates(t *testing.T) {
	t.Parallel()
	refused := func(instance string) string {
		return fmt.Sprintf(`plugin type="faulty" failed (status): faulty: %s STATUS refused`, instance)
	}
	for _, tt := range []struct {
		name  string
		codes [3]int // of the delegates that fail
		mode  string // of these delegates
		code  uint
		msg   string
	}{
		{"all well", [3]int{}, "", 0, ""},
		{"not available", [3]int{0, 50, 0}, "fail", 50, refused("p1")},
		{"limited", [3]int{0, 0, 51}, "fail", 51, refused("p2")},
		{"another code", [3]int{11, 0, 0}, "fail", 11, refused("p0")},
		{"a code of its own", [3]int{0, 0, 147}, "fail", 147, refused("p2")},
		{"50 and 51", [3]int{50, 0, 51}, "fail", 51, refused("p2")},
		{"51 and 50", [3]int{51, 0, 50}, "fail", 51, refused("p0")},
		{"all kinds", [3]int{999, 50, 51}, "fail", 51, refused("p2")},
		{"50 among others", [3]int{999, 50, 147}, "fail", 50, refused("p1")},
		{"others", [3]int{0, 147, 11}, "fail", 147, refused("p1")},
		{"text", [3]int{0, 1, 0}, "stderr", 999,
			`plugin type="faulty" failed (status): netplugin failed: "faulty: this text is on stderr only\n": exit status 1`},
		{"crash", [3]int{0, 1, 0}, "crash", 999,
			`plugin type="faulty" failed (status): netplugin failed with no error message: signal: killed`},
		{"nothing said", [3]int{1, 1, 1}, "empty", 0, ""},
		{"no JSON said", [3]int{1, 1, 1}, "garbage", 0, ""},
		// Together these take longer than a STATUS has.
		{"slow", [3]int{1, 1, 1}, "late", 0, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			var chain []string
			plan, want := map[string]map[string]string{}, []string{}
			for i, code := range tt.codes {
				instance := fmt.Sprintf("p%d", i)
				chain = append(chain, n.faulty(instance, fmt.Sprintf(`, "code": %d, "delayMS": 600`, code)))
				want = append(want, "STATUS "+instance)
				if code != 0 {
					plan[instance] = map[string]string{"STATUS": tt.mode}
				}
			}
			n.plan(plan)
			n.wantStatus("chain 1.1.0", n.status("1.1.0", nil, chain...), tt.code, tt.msg)
			got := n.calls()
			slices.Sort(got)
			if !slices.Equal(got, want) {
				t.Errorf("asked: %q, want %q", got, want)
			}
			for _, l := range n.callLog() {
				delete(l.Stdin, "dir")
				keys := slices.Sorted(maps.Keys(l.Stdin))
				if want := []string{"cniVersion", "code", "delayMS", "instance", "name", "type"}; !slices.Equal(keys, want) ||
					string(l.Stdin["cniVersion"]) != `"1.1.0"` || l.Path != strings.Join(n.path, ":") || l.ContainerID+l.IfName+l.NetNS != "" {
					t.Errorf("%s was given %+v", l.Instance, l)
				}
			}
			n.forgetCalls()
			n.wantStatus("chain 1.0.0", n.status("1.0.0", nil, chain...), 0, "")
			n.wantCalls("chain 1.0.0")
		})
	}
}

// TestStatusKeepsDetails: a delegate's details are passed on too.
func TestStatusKeepsDetails(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.script("words", `cat >/dev/null
		echo '{"cniVersion": "1.1.0", "code": 51, "msg": "no route", "details": "to 10.1.0.0/16"}'
		exit 1`)
	out := n.status("1.1.0", nil, `{"type": "words"}`)
	n.wantStatus("STATUS", out, 51, `plugin type="words" failed (status): no route`)
	if out.said.Details != "to 10.1.0.0/16" {
		t.Errorf("details %q", out.said.Details)
	}
}

// TestStatusOfJournal: an unusable journal is an error if no ADD goes on without it, and otherwise
// a warning. A journal that others are using is no problem.
func TestStatusOfJournal(t *testing.T) {
	t.Parallel()
	more := map[string]func(n *node) (mend func()){
		"folder that anybody can write to": func(n *node) func() {
			n.chmod(n.stateDir, 0o777)
			return func() { n.chmod(n.stateDir, 0o700) }
		},
		"not a folder": func(n *node) func() {
			n.rename(n.stateDir, n.stateDir+".away")
			n.write(n.stateDir, "")
			return func() {
				n.rename(n.stateDir, n.stateDir+".file")
				n.rename(n.stateDir+".away", n.stateDir)
			}
		},
		"file that is a folder": func(n *node) func() { return n.blockFile(n.store.Path()) },
	}
	maps.Copy(more, breakages)
	for name, breakIt := range more {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.makeJournal()
			mend := breakIt(n)
			const warning = "the journal cannot be used; ADDs continue without it"
			busy := name == "queue that a stranger holds"
			out := n.status("1.0.0", nil, n.faulty("p0", ""))
			n.wantStatus("degrade", out, 0, "")
			if strings.Contains(out.stderr, warning) == busy {
				t.Errorf("log:\n%s", out.stderr)
			}
			fail := keys{"onJournalFailure": "fail"}
			out = n.status("1.0.0", fail, n.faulty("p0", ""))
			if busy {
				n.wantStatus("fail", out, 0, "")
			} else if msg := out.said.Msg; out.said.Code != 50 || !strings.HasPrefix(msg, "unwind: journal: ") ||
				!strings.HasSuffix(msg, ` (onJournalFailure is "fail")`) {
				t.Errorf("fail: %s", out.stdout)
			}
			mend()
			out = n.status("1.0.0", fail, n.faulty("p0", ""))
			n.wantStatus("mended", out, 0, "")
			if strings.Contains(out.stderr, warning) {
				t.Errorf("log:\n%s", out.stderr)
			}
		})
	}
}
