package plugin

import "testing"

// A duplicate is an address of a living pod that host-local gives out once more, since it lost the
// file (Azure CNS #4210: the same address under another owner is an error, never adopted).

// TestDuplicateAddress: an ADD that gets the address of a living pod fails. That pod keeps all it
// has, and the other one leaves nothing. When the address is free, the other pod can have it.
func TestDuplicateAddress(t *testing.T) {
	stories(t, `
	chain bridge | firewall
	add a; forget $a
	fails add b 'plugin type="bridge" failed (add): duplicate address $a: in use by $network/a/eth0'
	bare b; gone b; reserved 0; counters 'duplicate_addresses 1' 'rollbacks bridge complete 1'
	del b; open $a; entry a live; pings a
	del a
	lowest; add b; given b $a; pings b
	del b`)
}

// TestNoDuplicate: two pods have one address where that is no error. unwind warns if something
// could be wrong.
func TestNoDuplicate(t *testing.T) {
	stories(t, `
	let warnings 1; let chain bridge | firewall
	either allowed: conf onDuplicateAddress warn
	or not on the other's interface any more:
	or another network over the same subnet:
	or static: let chain p0, "address": "$ip7/24"
	or loopback: let warnings 0; let chain loopback
	or link-local: let warnings 0; let chain p0, "address": "fe80::7/64"
	chain $chain; add a
	if allowed: forget $a
	if not on: flush a; forget $a
	if another network: network other o
	add b; given b $a
	logged 'cannot release another attachment that has the same address' $warnings
	del a b`, acts{"flush": func(s *story, w []string) {
		run(s, "nsenter", "--net="+s.who(w[0]).NetNS, "ip", "address", "flush", "dev", "eth0")
	}})
}
