package plugin

import (
	"testing"
)

// TestNewSandbox (Azure CNS #4350): a pool has one address, and a pod gets a new sandbox. It gets
// the address if the old sandbox is certainly gone. Otherwise the old one keeps all it has.
func TestNewSandbox(t *testing.T) {
	stories(t, `
	patient
	chain {"type": "bridge", "bridge": "$bridge", "isGateway": true, "ipam": {"type": "host-local",
		"dataDir": "$data", "ranges": [[{"subnet": "$subnet", "rangeStart": "$ip7", "rangeEnd": "$ip7"}]]}} | p1
	add a
	either dead, its namespace gone: drop a
	or dead, of an earlier boot: reboot a
	or alive, its namespace there:
	or alive, a process inside, no path: process a; unpin a
	or alive, held open, no path, no process: hold a; unpin a
	forgets; sandbox a b
	if dead: add b; calls DEL p1, ADD p1
	if alive: fails add b 'no IP addresses available'; calls; entry a live 2
	if held: letgo
	del b a`)
}
