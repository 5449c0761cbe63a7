package plugin

import "testing"

// TestReboot: pods of an earlier boot have all that is on the disk, and their rules. Any sweep
// releases it. The runtime's DEL, which comes later with libcni's cached result, runs nothing.
func TestReboot(t *testing.T) {
	stories(t, `
	patient; chain bridge, "ipMasq": true | firewall | portmap | last
	add a b; reboot a b; forgets
	either STATUS: until STATUS
	or GC: until GC
	or sweep: until sweep
	or GC of the network, renamed: network renamed; until GC
	clean; calls DEL last, DEL last
	tombstone a it was added before the last boot; tombstone b it was added before the last boot
	del a b; calls`)
}

// TestRebootRace: after a reboot a sweep frees a's address and b gets it. Then the runtime's DEL of
// a comes, with libcni's cached result, and runs nothing, since a has a tombstone. Without the
// tombstone the delegates run, and the guards alone keep b's rules.
func TestRebootRace(t *testing.T) {
	stories(t, `
	firewall works; chain bridge | firewall | portmap | last
	add a; reboot a; until GC; closed $a
	lowest; add b; given b $a
	either a tombstone:
	or no tombstone: exhume a
	unasked; forgets; del a
	if a tombstone: asked; calls
	if no tombstone: asked DEL a; calls DEL last
	open $a; port $a
	del b; clean`)
}
