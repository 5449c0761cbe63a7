package plugin

import (
	"fmt"
	"maps"
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

// TestStatusOfNewNode: without a state directory, or with an empty one, STATUS succeeds and changes
// nothing.
func TestStatusOfNewNode(t *testing.T) {
	stories(t, `
	chain p0
	either degrade: conf onJournalFailure degrade
	or fail: conf onJournalFailure fail
	either there: shell 'mkdir $state'
	or not there:
	status; warned level=WARN 0; status; warned level=WARN 0`)
}

var details = acts{"details": func(s *story, w []string) { s.want(s.said.said.Details == w[0], "%s", s.said.said.Details) }}

// TestStatusOfMissingPlugin: a plugin of the chain, or an IPAM one, that is in no directory is code
// 50. STATUS looks for it again after a second.
func TestStatusOfMissingPlugin(t *testing.T) {
	stories(t, `
	let missing gone
	either delegate: chain p0 | {"type": "gone"}
	or IPAM: chain p0 | {"type": "bridge", "ipam": {"type": "gone"}}
	or both: chain p0 | {"type": "gone"} | {"type": "bridge", "ipam": {"type": "away"}}; let missing gone, away
	either 1.0.0: versions 1.1.0 1.0.0
	or 1.1.0: versions 1.1.0 1.1.0
	clock; fails status code=50 'unwind: failed to find plugin "gone" in path [$dir/bin $cni '; lasted 1s
	details '$missing'`, details, acts{"lasted": func(s *story, w []string) {
		d, err := time.ParseDuration(w[0])
		s.must(err)
		s.want(time.Since(s.when) >= d, "it was looked for once only: STATUS took %s", time.Since(s.when))
	}})
}

// TestStatusDuringUpgrade: a plugin that is missing when STATUS looks and is back within the
// second, as in an upgrade, is no failure, even if STATUS must then ask it for its own STATUS. STATUS
// looks at several things at once.
func TestStatusDuringUpgrade(t *testing.T) {
	stories(t, `
	script upgraded 'echo asked >>$dir/asked'; shell 'mv $dir/bin/upgraded $dir/bin/away'
	either delegate: chain {"type": "upgraded"}
	or IPAM: chain {"type": "faulty", "dir": "$dir", "ipam": {"type": "upgraded"}}
	either 1.0.0: versions 1.1.0 1.0.0
	or 1.1.0: versions 1.1.0 1.1.0
	start status; appears $state; pause 100ms; shell 'mv $dir/bin/away $dir/bin/upgraded'; wait status
	if delegate, 1.1.0: shell 'test $(cat $dir/asked) = asked'
	unless delegate, 1.1.0: absent $dir/asked`)
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
	stories(t, `
	versions 1.1.0 1.1.0; chain {"type": "words"}
	script words 'cat >/dev/null; echo "{\"cniVersion\": \"1.1.0\", \"code\": 51, \"msg\": \"no route\", \"details\": \"to 10.1.0.0/16\"}"; exit 1'
	fails status code=51 'plugin type="words" failed (status): no route'; details 'to 10.1.0.0/16'`, details)
}

// TestStatusOfJournal: an unusable journal is an error if no ADD goes on without it, and otherwise
// a warning. A journal that others are using is no problem.
func TestStatusOfJournal(t *testing.T) {
	var broken strings.Builder
	for how := range breakages {
		fmt.Fprintf(&broken, "\n\tor %s: break %s", how, how)
	}
	stories(t, `
	chain p0; journal; let warning 'the journal cannot be used; ADDs continue without it'
	either a folder that anybody can write to: shell 'chmod 777 $state'; let mend chmod 700 $state
	or not a folder: shell 'mv $state $state.away; touch $state'; let mend 'rm $state; mv $state.away $state'
	or a folder as its file: break file`+broken.String()+`
	status
	if stranger: warned '$warning' 0; status onJournalFailure="fail"
	unless stranger: warned '$warning'
		fails status onJournalFailure="fail" code=50 'unwind: journal: ' ' (onJournalFailure is "fail")'
	if a folder that: shell '$mend'
	if not a folder: shell '$mend'
	unless folder: mend
	if a folder as: mend
	status onJournalFailure="fail"; warned '$warning' 0`)
}
