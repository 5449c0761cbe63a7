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
