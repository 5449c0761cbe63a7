package plugin

import (
	"strings"
	"testing"
)

// mistakes are chains of reference plugins whose last one has a mistake in its configuration ($wrong),
// or is given one. It fails its ADD, and each DEL with that configuration, and takes nothing.
const mistakes = `
	let ipam "ipam": {"type": "host-local", "dataDir": "$data", "subnet": "10.1.2.0/24"
	let bare {"type": "bridge", "bridge": "$bridge",
	let right bridge, "ipMasq": true
	let wrong $right; let plugins 1; let state adding
	either subnet: let wrong $bare "ipam": {"type": "host-local", "subnet": "10.1.2.0/33", "dataDir": "$data"}}
	or subnet of IPv4 and range of IPv6: let wrong $bare $ipam, "rangeStart": "fd00::1"}}
	or ranges are no list: let wrong $bare "ipam": {"type": "host-local", "dataDir": "$data", "ranges": {"subnet": "10.1.2.0/24"}}}
	or route: let wrong $bare $ipam, "routes": [{"dst": "10.300.0.0/16"}]}}
	or MTU is a string: let wrong $bare "mtu": "1500", $ipam}}
	or VLAN out of range: let wrong $bare "vlan": 5000, $ipam}}
	or ipMasq is a string, static: let wrong $bare "ipMasq": "yes", "ipam": {"type": "static", "addresses": [{"address": "10.1.2.3/24"}]}}
	or no IPAM: let wrong $bare "mtu": "1500"}
	or CNI_ARGS with an IP: given-args a IgnoreUnknown=1 IP=10.1.2
	or CNI_ARGS that is unknown: given-args a FAST=yes
	or ptp: let wrong {"type": "ptp", "mtu": "1500", "ipMasq": true, $ipam}}; let right {"type": "ptp", "ipMasq": true, $ipam}}
	or macvlan: let wrong {"type": "macvlan", "master": "lo", "mtu": "1500", $ipam}}; let right {"type": "macvlan", "master": "lo", $ipam}}
	or after firewall: let wrong $right | firewall, "firewalldZone": 5; let right $right | firewall
	or after portmap: let wrong $right | portmap, "markMasqBit": 40; let right $right | portmap
	or after bandwidth: let wrong $right | {"type": "bandwidth", "ingressRate": 8000000}
		let right $right | {"type": "bandwidth", "ingressRate": 8000000, "ingressBurst": 8000000}
	or after tuning: let wrong $right | {"type": "tuning", "mtu": "1400"}; let right $right | {"type": "tuning", "mtu": 1400}
	or after sbr: let wrong $right | sbr, "table": "x"; let right $right | sbr
	if after: let plugins 2; let state live
	chain $wrong`

var givenArgs = acts{"given-args": func(s *story, w []string) {
	p := s.who(w[0])
	p.Args = nil
	for _, arg := range w[1:] {
		key, value, _ := strings.Cut(arg, "=")
		p.Args = append(p.Args, [2]string{key, value})
	}
}}

// TestMistake: an ADD that fails for a mistake has a pending DEL, as long as the mistake is in the
// chain: the runtime's DEL fails, as it does without unwind. With the mistake corrected, the DEL
// passes, with the present configuration. A mistake of the runtime's arguments stays.
func TestMistake(t *testing.T) {
	stories(t, mistakes+`
	fails add a; fails del a
	unless CNI_ARGS: chain $right; del a; clean
	if CNI_ARGS: leaves`, givenArgs)
}

// TestMistakeCutOff: an ADD fails for a mistake, and unwind is killed by SIGKILL before the outcome
// is written. The result of a delegate before it makes the entry live.
func TestMistakeCutOff(t *testing.T) {
	stories(t, mistakes+`
	kill added $plugins add a; was-killed
	entry a $state $plugins
	unless CNI_ARGS: chain $right; tries del a; del a; clean
	if CNI_ARGS: fails del a; leaves`, givenArgs)
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
	if refused: fails del a; fails del a; entry a; taken a.eth0.p0; logged 'stays pending without an error for the runtime' 0
	if owed: del a; del a; entry a; taken a.eth0.p0; logged 'stays pending without an error for the runtime'
	if done: del a; del a; gone a; taken; logged 'stays pending without an error for the runtime' 0
	plan; chain p0; status; gc`)
}
