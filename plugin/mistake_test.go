package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"cni-unwind/journal"
)

// TestMistake: the last plugin of a chain fails its ADD, and each DEL, for a mistake in its configuration
// or in the runtime's arguments; unwind may be killed before it has written the outcome. The DEL is
// pending: the runtime's DEL fails, as it does without unwind. With the mistake corrected, the DEL
// passes with the present configuration.
func TestMistake(t *testing.T) {
	stories(t, `
	let right bridge, "ipMasq": true
	let wrong $right; let plugins 1; let state adding
	either subnet: let wrong {"type": "bridge", "bridge": "$bridge", "ipam": {"type": "host-local", "dataDir": "$data", "subnet": "10.1.2.0/33"}}
	or MTU is a string: let wrong {"type": "bridge", "bridge": "$bridge", "mtu": "1500", "ipam": $hostlocal}
	or no IPAM: let wrong {"type": "bridge", "bridge": "$bridge", "mtu": "1500"}
	or ptp: let wrong {"type": "ptp", "mtu": "1500", "ipMasq": true, "ipam": $hostlocal}
		let right {"type": "ptp", "ipMasq": true, "ipam": $hostlocal}
	or CNI_ARGS: given-args a FAST=yes
	or after firewall: let wrong $right | firewall, "firewalldZone": 5; let right $right | firewall
	or after portmap: let wrong $right | portmap, "markMasqBit": 40; let right $right | portmap
	or after tuning: let wrong $right | {"type": "tuning", "mtu": "1400"}; let right $right | {"type": "tuning", "mtu": 1400}
	if after: let plugins 2; let state live
	chain $wrong
	either it fails: fails add a; fails del a
	or it is cut off: kill added $plugins add a; was-killed; entry a $state $plugins
	unless CNI_ARGS: chain $right; tries del a; del a; clean
	if CNI_ARGS: fails del a; leaves`, acts{"given-args": func(s *story, w []string) {
		key, value, _ := strings.Cut(w[1], "=")
		s.who(w[0]).Args = [][2]string{{key, value}}
	}})
}

// TestTakenAndFailed: bridge has taken an address and fails at its rules, and its IPAM plugin then
// refuses each DEL. The DEL stays pending, whatever the code and bridge's present configuration. When
// the IPAM plugin works again, the DEL releases the address.
func TestTakenAndFailed(t *testing.T) {
	stories(t, `
	breaks host-local
	chain bridge, "ipMasq": true, "ipMasqBackend": "bogus"; fails add a
	chain bridge; del a; entry a rolling-back 1; reserved 1
	chain bridge, "mtu": 1400; del a; entry a rolling-back 1; reserved 1
	chain loopback; del a; entry a rolling-back 1; reserved 1
	works host-local
	chain bridge; del a`)
}

// TestMistakeThatCannotBeProven: nobody can tell what a plugin that is no reference plugin has
// taken, so its DEL stays pending. As long as the chain has the mistake, the runtime's DEL fails,
// as the plain chain's does. Later the DEL is tried with the chain's present configuration. If that
// fails too, the runtime's DEL succeeds, with a warning.
func TestMistakeThatCannotBeProven(t *testing.T) {
	stories(t, `
	let bad p0, "modes": {"ADD": "fail-effect", "DEL": "fail"}
	chain $bad; fails add a
	either refused, the mistake is there:
	or done, put right: plan p0 DEL ok; chain p0
	or owed, put right, and fails: plan p0 DEL fail; chain p0
	or owed, left the chain: chain loopback
	or owed, two of them: chain p0 | p1
	or refused, two of them, one with the mistake: chain $bad | p1
	or refused, the chain cannot be read: chain {"type": "unwind"}
	if refused: fails del a; fails del a; entry a; taken a.eth0.p0; logged 'stays pending, but the runtime gets no error' 0
	if owed: del a; del a; entry a; taken a.eth0.p0; logged 'stays pending, but the runtime gets no error'
	if done: del a; del a; gone a; taken; logged 'stays pending, but the runtime gets no error' 0
	plan; chain p0; status; gc`)
}

// TestFailsAsItsADD: bridge rejects the runtime's arguments at the ADD and at each DEL of each sandbox.
// After 20 tries in over an hour their DELs are dropped, each with a reason. Before that, or while a
// namespace is there, they stay, and a plugin that is repaired gets them.
func TestFailsAsItsADD(t *testing.T) {
	stories(t, `
	conf delegateTimeout; chain bridge; let all a b
	script bridge 'if [ $CNI_COMMAND = DEL ] && [ -e $dir/well ]; then echo $CNI_CONTAINERID >> $dir/deleted; exit; fi; exec $cni/bridge'
	either for good: let all a b c d; refused $all; drop $all
		retried 18; hour $all; entries 4; retried 1; entries 0; absent $dir/deleted; dropped $all
	or repaired in time: refused $all; drop $all; retried 18; hour $all
	or not for an hour: refused $all; drop $all; retried 20
	or the namespaces are there: refused $all; retried 18; hour $all; retried 2
	unless for good: entries 2; file $dir/well; sweep; entries 0; deleted $all`, acts{
		"refused": func(s *story, w []string) {
			for _, name := range w {
				s.who(name).Args = [][2]string{{"FAST", "yes"}}
				verbs["fails"](s, []string{"add", name, "FAST"})
			}
		},
		// retried N: by so many GCs
		"retried": func(s *story, w []string) {
			for range s.number(w[0]) {
				_, _ = s.attempt([]string{"gc"})
			}
		},
		// hour PODS: the tries so far are of the last hour
		"hour": each(func(p *pod) {
			p.edit(func(e *journal.Entry) { e.Undo.Steps[0].AlikeSince -= int64(time.Hour) })
		}),
		"dropped": func(s *story, w []string) {
			var got []string
			for _, e := range s.node.recorded() {
				if e.Kind == journal.Untaken && strings.HasPrefix(e.Reason, "its ADD and its DELs failed with the same error for over an hour: ") {
					got = append(got, e.ContainerID)
				}
			}
			slices.Sort(got)
			s.want(slices.Equal(got, w), "%q", got)
		},
		"deleted": func(s *story, w []string) {
			got := strings.Fields(read(s, filepath.Join(s.dir, "deleted")))
			slices.Sort(got)
			s.want(slices.Equal(got, w), "%q", got)
		},
	})
}

// TestNeverRan: a delegate that never ran has no pending DEL: a binary that is missing or cannot be
// executed.
func TestNeverRan(t *testing.T) {
	stories(t, `
	chain p0 | {"type": "broken"}
	either not executable: file 0644 '#!/bin/sh'
	or of another format: file 0755 '1234'
	or missing:
	fails add a; clean
	del a`, acts{"file": func(s *story, w []string) {
		s.write(filepath.Join(s.path[0], "broken"), w[1])
		run(s, "chmod", w[0], filepath.Join(s.path[0], "broken"))
	}})
}

// TestBridgeFailsAtItsRules: bridge removes the interface and then fails at its rules. The next DEL
// finds no interface in an existing namespace, and would pass without a look at the rules.
func TestBridgeFailsAtItsRules(t *testing.T) {
	stories(t, `
	chain bridge, "ipMasq": true; failing-rules; add a; fails del a
	lose $dir/fail; del a`, acts{"failing-rules": func(s *story, _ []string) {
		real, err := filepath.EvalSymlinks("/usr/sbin/iptables")
		s.must(err)
		s.mkdir(filepath.Join(s.dir, "fail"))
		s.mkdir(filepath.Join(s.dir, "path"))
		s.must(os.WriteFile(filepath.Join(s.dir, "path", "iptables"), fmt.Appendf(nil, `#!/bin/bash
			for a; do if [ "$a" = -D ] && [ -e %s ]; then exit 4; fi; done
			exec -a iptables %s "$@"`, filepath.Join(s.dir, "fail"), real), 0o755))
		s.env = append(s.env, "PATH="+filepath.Join(s.dir, "path")+":"+os.Getenv("PATH"))
	}})
}
