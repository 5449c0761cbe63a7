package plugin

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/sweep"
)

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

// TestGatewayOutsideOfTheSubnet: host-local accepts a gateway outside of the subnet at the ADD. Its next
// version (1.10, of which a script stands in) rejects it, with the code of any error, and the conflist is
// corrected. Then the DEL passes with the present configuration, if that frees the address.
func TestGatewayOutsideOfTheSubnet(t *testing.T) {
	stories(t, `
	let right {"type": "bridge", "bridge": "$bridge", "ipam": $hostlocal}
	let wrong {"type": "bridge", "bridge": "$bridge", "ipam": {"type": "host-local", "dataDir": "$data", "ranges": [[{"subnet": "$subnet", "gateway": "192.0.2.1"}]]}}
	let elsewhere {"type": "bridge", "bridge": "$bridge", "ipam": {"type": "host-local", "dataDir": "$dir/elsewhere", "subnet": "$subnet"}}
	either chain: let in chain
	or chainFile: let in chainfile
	$in $wrong | p1; add a
	script host-local 'conf=$(cat); case "$conf" in *ranges*) echo "{\"cniVersion\": \"1.0.0\", \"code\": 999, \"msg\": \"gateway 192.0.2.1 not in network\"}"; exit 1;; esac;
		printf "%s" "$conf" | exec $cni/host-local'
	fails del a 'bridge (code 999)'; $in $elsewhere; fails del a 'bridge (code 999)'; reserved 1
	either DEL: $in $right; del a
	or STATUS: drop a; $in $right; until 0 status
	or GC: drop a; $in $right; until 0 gc
	or unwindctl sweep: drop a; $in $right; of-pools`, chainFiles, acts{"of-pools": func(s *story, _ []string) {
		conf, err := netconf.ParseConf([]byte(s.entryOf(fmt.Sprintf(`{"plugins": [%s]}`, strings.Join(s.plugins(s.node), ", ")), nil)))
		s.must(err)
		chain, err := conf.LoadChain()
		s.must(err)
		_, err = s.plugin().Sweep(s.Context(), s.stateDir, sweep.Job{Pools: sweep.PoolsOf(chain, conf), Path: strings.Join(s.path, ":")})
		s.must(err)
	}})
}

// TestReplaced: a configuration that worked replaces the rejected one if the step still has a
// pending DEL, because its delegate was killed once.
func TestReplaced(t *testing.T) {
	stories(t, `
	conf gracePeriod 1h; chain p0, "modes": {"DEL": "fail"}, "code": 7
	plan p0 ADD crash-effect; fails add a; plan
	chain p0; del a; entry a rolling-back 1
	due a; forgets; chain another; del a; stdin p0 modes; calls DEL p0`)
}

// TestRejectedConfiguration: a delegate that rejects its configuration as bad gets the chain's
// present one. After any other error it does not, and it never gets another delegate's. Its step then
// stays pending, with its earlier configuration and the first error.
func TestRejectedConfiguration(t *testing.T) {
	stories(t, `
	let mode fail; let code 7; let now p0; let dels 1; let how fails; let said 0
	either accepted, incompatible version: let code 1; let dels 2; let how passes; let said 1
	or accepted, invalid configuration: let dels 2; let how passes; let said 1
	or refused, unknown container: let code 3
	or refused, no code: let code 0
	or refused, crash: let mode crash; let code 999
	or refused, of two nobody can tell which: let now p0 | p1
	or refused, not in the chain any more: let now loopback
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
