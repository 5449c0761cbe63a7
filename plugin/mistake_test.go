package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/sweep"
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
	chain bridge, "ipMasq": true, "ipMasqBackend": "bogus"; fails add a; locks 1
	chain bridge; fails del a; entry a rolling-back 1; reserved 1
	chain bridge, "mtu": 1400; fails del a; entry a rolling-back 1; reserved 1
	chain loopback; del a; entry a rolling-back 1; reserved 1
	works host-local
	chain bridge; del a`)
}

// TestMistakeThatCannotBeProven: nobody can tell what a plugin that is no reference plugin has
// taken, so its DEL stays pending. As long as the chain has the mistake, the runtime's DEL fails,
// as the plain chain's does. Later the DEL is tried with the chain's present configuration. Once the
// plugin has left the chain, the runtime's DEL succeeds, with a warning.
func TestMistakeThatCannotBeProven(t *testing.T) {
	stories(t, `
	let bad p0, "modes": {"ADD": "fail-effect", "DEL": "fail"}
	chain $bad; fails add a
	either refused, the mistake is there:
	or done, put right: plan p0 DEL ok; chain p0
	or owed, left the chain: chain loopback
	or refused, two of them: chain p0 | p1
	or refused, put right, and fails: plan p0 DEL fail; chain p0
	or refused, two of them, one with the mistake: chain $bad | p1
	or refused, the chain cannot be read: chain {"type": "unwind"}
	if refused: fails del a; fails del a; entry a; taken a.eth0.p0; logged 'stays pending, but the runtime gets no error' 0
	if owed: del a; del a; entry a; taken a.eth0.p0; logged 'stays pending, but the runtime gets no error'
	if done: del a; del a; gone a; taken; logged 'stays pending, but the runtime gets no error' 0
	plan; chain p0; status; gc`)
}

// TestNeverRan: a delegate that never ran has no pending DEL: a binary that is missing or cannot be
// executed. The DEL of one of another format fails, as without unwind, until it is replaced.
func TestNeverRan(t *testing.T) {
	stories(t, `
	chain p0 | {"type": "broken"}
	either not executable: file 0644 '#!/bin/sh'
	or of another format: file 0755 '1234'
	or missing:
	fails add a; clean
	if another format: fails del a; file 0755 '#!/bin/true'
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

// In the tests of this file a delegate rejects, at DEL, the configuration of its ADD, as after an
// upgrade. The chain has another configuration for it now.

// TestPresentConfigurationHasWhatTheADDHad: the present configuration gets what the runtime and
// multus gave to the ADD, not what they give to the DEL.
func TestPresentConfigurationHasWhatTheADDHad(t *testing.T) {
	stories(t, `
	versions 1.0.0 0.4.0; conf args {"cni":{"ips":["192.0.2.9"]}}; conf deviceID 0000:03:00.1
	capabilities a {"ips":["192.0.2.9/24"],"mac":"02:00:00:00:00:07"}
	chain p0, "modes": {"DEL": "fail"}, "code": 1, "address": "192.0.2.7/24", "capabilities": {"ips": true}
	add a
	versions 1.0.0 1.0.0; conf args {"cni":{"ips":["192.0.2.10"]}}; conf deviceID 0000:04:00.1
	capabilities a {"ips":["192.0.2.10/24"]}
	chain p0, "new": "key", "capabilities": {"ips": true, "mac": true}
	del a; had`, acts{"had": func(s *story, _ []string) {
		all := s.callLog()
		s.want(slices.Equal(s.node.calls(), []string{"ADD p0", "DEL p0", "DEL p0"}), "%q", s.node.calls())
		last := all[len(all)-1]
		for key, want := range map[string]string{
			"cniVersion": `"1.0.0"`, "new": `"key"`, "modes": ``, "deviceID": `"0000:03:00.1"`, "args": `{"cni":{"ips":["192.0.2.9"]}}`,
			"runtimeConfig": `{"ips":["192.0.2.9/24"],"mac":"02:00:00:00:00:07"}`,
			"prevResult":    `{"cniVersion":"1.0.0","ips":[{"address":"192.0.2.7/24"}]}`,
		} {
			s.want(string(last.Stdin[key]) == want, "%s: %s, want %s", key, last.Stdin[key], want)
		}
		s.want(last.Args == all[0].Args, "CNI_ARGS %q, want %q", last.Args, all[0].Args)
	}})
}

// TestGatewayOutsideOfTheSubnet: host-local 1.9 (of which a script stands in, at the ADD) accepts a gateway
// outside of the subnet. 1.10 rejects it, with the code of any error, and the conflist is corrected. Then the DEL passes with the present configuration, and the address is free, also if the pool is another one by now.
func TestGatewayOutsideOfTheSubnet(t *testing.T) {
	stories(t, `
	let right {"type": "bridge", "bridge": "$bridge", "ipam": $hostlocal}
	let wrong {"type": "bridge", "bridge": "$bridge", "ipam": {"type": "host-local", "dataDir": "$data", "ranges": [[{"subnet": "$subnet", "gateway": "192.0.2.1"}]]}}
	let elsewhere {"type": "bridge", "bridge": "$bridge", "ipam": {"type": "host-local", "dataDir": "$dir/elsewhere", "subnet": "$subnet"}}
	either chain: let in chain
	or chainFile: let in chainfile
	script host-local 'conf=$(cat); [ $CNI_COMMAND = DEL ] || conf=$(echo "$conf" | sed "s/\"gateway\"/\"ignored\"/");
		printf "%s" "$conf" | exec $cni/host-local'
	$in $wrong | p1; add a
	fails del a 'bridge (code 999)'; reserved 1
	either DEL: $in $right; del a
	or DEL, another dataDir: $in $elsewhere; del a; reserved 0
	or STATUS: drop a; $in $right; until 0 status
	or GC: drop a; $in $right; until 0 gc
	or unwindctl sweep: drop a; $in $right; of-pools`, chainFiles, acts{"of-pools": func(s *story, _ []string) {
		conf, err := netconf.ParseConf([]byte(s.entryOf(s.chainOf(s.plugins(s.node)...), nil)))
		s.must(err)
		chain, err := conf.LoadChain()
		s.must(err)
		_, err = s.plugin().Sweep(s.Context(), s.stateDir, sweep.Job{Pools: sweep.PoolsOf(chain, conf),
			Networks: []sweep.Network{{Chain: chain, Conf: conf}}, Path: strings.Join(s.path, ":")})
		s.must(err)
	}})
}

// TestRejectedConfiguration: a delegate that fails with its configuration gets the chain's present one,
// whatever the error, but never another delegate's. If that fails too, its step stays pending, with its
// earlier configuration and the first error.
func TestRejectedConfiguration(t *testing.T) {
	stories(t, `
	let mode fail; let code 7; let now p0; let dels 1; let how fails; let said 0
	either accepted, incompatible version: let code 1; let dels 2; let how passes; let said 1
	or accepted, invalid configuration: let dels 2; let how passes; let said 1
	or accepted, unknown container: let code 3; let dels 2; let how passes; let said 1
	or accepted, no code: let code 0; let dels 2; let how passes; let said 1
	or refused, crash: let mode crash; let code 999
	or refused, of two nobody can tell which: let now p0 | p1
	or refused, not in the chain any more: let now loopback; let how tries
	or refused, no chain: let now {"type": "unwind"}
	or refused, the same configuration: let now p0, "modes": {"DEL": "fail"}, "code": 7
	or refused, another one that is rejected: let now p0, "modes": {"DEL": "fail"}, "code": 2; let dels 2
	chain p0, "modes": {"DEL": "$mode"}, "code": $code; add a
	chain $now
	either DEL: $how del a; logged 'DEL succeeded with the chain' $said
	or GC: state a deleting; $how gc
	if no chain, GC: let dels 0
	deleted a $dels
	if accepted: clean
	if refused: rejected a; chain p0, "modes": {"DEL": "$mode"}, "code": $code; forgets; tries del a; deleted a 1; leaves`, acts{
		"rejected": func(s *story, w []string) {
			e := s.who(w[0]).entry()
			if e == nil || len(e.Undo.Steps) != 1 {
				s.Fatalf("the journal has %+v", e)
			}
			step, code := e.Undo.Steps[0], s.vars["code"]
			if code == "0" {
				code = "999"
			}
			s.want(strings.Contains(string(step.Config), `"modes":`), "%+v", step)
			s.want(s.vars["dels"] == "0" || fmt.Sprint(step.Code) == code, "%+v", step)
			s.want(len(s.taken()) == 1, "taken: %q", s.taken())
		},
	})
}

// TestPresentConfigurationOfAnotherNetwork: a GC sweeps all networks, but its chain belongs to one.
func TestPresentConfigurationOfAnotherNetwork(t *testing.T) {
	stories(t, `
	chain p0, "modes": {"DEL": "fail"}, "code": 7
	add a; drop a
	chain p0
	network other; tries gc; tries gc; deleted a 2; entry a
	network; gc`)
}
