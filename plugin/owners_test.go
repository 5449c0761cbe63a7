package plugin

import (
	"testing"
)

// The tests of this file prove that no late DEL harms another owner (cni#924). firewall knows an
// address from prevResult alone; its ACCEPT rules of an address stay as long as the address has an
// owner, and no longer.

// TestPendingDELIsSettledAtClaim: the DEL of firewall is pending in every way, with the address
// free. When another pod gets the address, that DEL runs in full before the other pod's firewall
// does. The runtime's late DEL runs nothing.
func TestPendingDELIsSettledAtClaim(t *testing.T) {
	stories(t, `
	firewall works; chain bridge | firewall | p2
	either its DEL failed: add a; firewall fail; fails del a
	or its binary was missing: add a; firewall missing; fails del a
	or its ADD failed, and its DEL: plan p2 ADD fail; firewall fail; fails add a; plan
	or unwind was killed, and its namespace is gone: add a; firewall kill-parent; freed a; drop a
	open $ip2
	firewall works; unasked
	inherits b $ip2; asked DEL a $ip2, ADD b $ip2
	open $ip2; gone a
	del a; asked; open $ip2
	del b`)
}

// TestPendingDELIsParked: a pending DEL fails even when another pod gets its address. As long as
// that pod lives, the DEL is tried only without the address, and stays pending. When the pod is
// gone, it runs in full.
func TestPendingDELIsParked(t *testing.T) {
	stories(t, `
	firewall fail; chain bridge | firewall | p2
	add a; fails del a; unasked
	inherits b $a; asked DEL a $a, ADD b $a
	either retried meanwhile: fails del a; firewall works; del a
		asked DEL a, DEL a
		entry a deleting 1; parked a
	or not retried: firewall works
	open $a
	del b; asked DEL b $a, DEL a $a`)
}

// TestDELOfPodsFromBefore installs unwind on a node with pods. DELs through unwind release all they
// have, with their network namespace and without it.
func TestDELOfPodsFromBefore(t *testing.T) {
	stories(t, `
	chain masquerading bridge dual | {"type": "tuning", "mtu": 1400, "dataDir": "$dir/tuning"}
		| {"type": "bandwidth", "capabilities": {"bandwidth": true}} | portmap | firewall | p5
	limited a; past add a; remember a
	either its network namespace there:
	or its network namespace gone: drop a
	del a; vanished a
	del a`, acts{"limited": func(s *story, w []string) {
		s.who(w[0]).CapabilityArgs["bandwidth"] = map[string]any{"egressRate": 8000000, "egressBurst": 8000000}
	}})
}

// TestStaleOwnerIsNoRival: a pod gets an address that by the journal another one still has. The
// plain chain deleted that one, and its namespace exists. host-local names the new owner, whose DEL
// runs in full. If the other one's interface still has the address, that DEL is parked.
func TestStaleOwnerIsNoRival(t *testing.T) {
	stories(t, `
	conf onDuplicateAddress warn; chain bridge | firewall
	add a
	lose $data/$network/$a
	inherits b $a; entry a live
	del b
	entry b; open $a
	drop a b; sweep; sweep`)
}

// TestLongContainerID: host-local's record of an owner whose ID is longer than any runtime's is still
// that owner's: its DEL is shown its own address, and takes its rule.
func TestLongContainerID(t *testing.T) {
	stories(t, `
	firewall works; chain bridge | firewall
	either 4094: long 4094
	or 4095: long 4095
	or 20000: long 20000
	give add a CNI_CONTAINERID=$long; open $ip2
	give del a CNI_CONTAINERID=$long; closed $ip2; entries 0`, keepers)
}
