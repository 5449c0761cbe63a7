package plugin

import (
	"testing"
)

// TestForeign: the disk comes from another machine, as a clone or a backup. No DEL of its pods
// runs, since the original may use the addresses. A sweep removes what host-local keeps on this
// disk for exactly these owners: $ip99 is in the form that old releases of host-local wrote.
func TestForeign(t *testing.T) {
	stories(t, `
	chain bridge | p1; let by gc
	either live, STATUS: let by status; add a
	or live, GC: add a
	or live, sweep: let by sweep; add a
	or DEL pending: add a; plan p1 DEL fail; fails del a
	or ADD failed: plan p1 ADD fail-effect, p1 DEL fail; fails add a
	or ADD cut off: plan p1 ADD kill-parent-effect; killed add a; free a
	plan; clone a; drop a
	reserve $ip100 a eth1; reserve $ip101 aa eth0; reserve $ip102 b eth0; reserve $ip99 a
	forgets; until 0 $by; calls
	owners '$ip100 a eth1' '$ip101 aa eth0' '$ip102 b eth0'
	tombstone a another machine
	del a; calls; locks 0; leaves`)
}

// TestForeignContainerIDAgain: this disk is a copy of a machine's, and a container ID of that
// machine is added here. No DEL of the original's runs; what host-local keeps for it on this disk
// goes.
func TestForeignContainerIDAgain(t *testing.T) {
	stories(t, `
	chain bridge | p1
	add a; clone a; drop a; forgets
	move a a; add a
	reserved 1; calls ADD p1; entry a live 2 1
	del a`)
}

// TestReboot: pods of an earlier boot have all that is on the disk, and their rules. Any sweep
// releases it. The runtime's DEL, which comes later with libcni's cached result, runs nothing.
func TestReboot(t *testing.T) {
	stories(t, `
	chain bridge, "ipMasq": true | firewall | portmap | last
	add a b; reboot a b; forgets
	either STATUS: until 0 status
	or GC: until 0 gc
	or sweep: until 0 sweep
	or GC of the network, renamed: network renamed; until 0 gc
	clean; calls DEL last, DEL last
	tombstone a it was added before the last boot; tombstone b it was added before the last boot
	del a b; calls`)
}
