package plugin

import (
	"os"
	"path/filepath"
	"testing"

	"cni-unwind/journal"
)

// TestPowerLossInAVerb loses the power at each point of a verb, with the versions of the entry that
// were not synced. The kernel's state is gone, too, and what delegates keep on the disk is not: the
// next boot's sweep releases all of it.
func TestPowerLossInAVerb(t *testing.T) {
	t.Parallel()
	chains := map[string]func(n *node) []string{
		"all in the kernel": func(n *node) []string {
			return []string{n.bridgePlugin(""), `{"type": "firewall"}`}
		},
		"a delegate in the middle keeps something on the disk": func(n *node) []string {
			return []string{n.bridgePlugin(""), n.faulty("kernel0", ""), n.faulty("disk", `, "dataDir": "on the disk"`), n.faulty("kernel", "")}
		},
		"host-local is the second's": func(n *node) []string {
			return []string{n.faulty("kernel", ""), n.bridgePlugin(""), n.faulty("kernel2", "")}
		},
	}
	for what, chain := range chains {
		for _, verb := range []string{"ADD", "failing ADD", "DEL"} {
			t.Run(verb+", "+what, func(t *testing.T) {
				t.Parallel()
				everyPoint(t, 6, func(t *testing.T, at int) bool {
					p, _, killed := crash{verb, chain}.at(t, at)
					live := !killed && verb == "ADD"
					p.powerOff()
					p.until("sweep", nil)
					p.nothingOnDisk()
					if live && p.tombstone(p.key()) == nil {
						t.Error("the sweep released nothing")
					}
					return killed
				})
			})
		}
	}
}

// powerOff takes what a loss of power may take: the versions of entries that were not synced, lock
// files, network namespaces, and what delegates have in the kernel, as those named kernel have. The
// journal's entries are of an earlier boot then.
func (p *pod) powerOff() {
	p.Helper()
	for _, pattern := range []string{
		filepath.Join(p.stateDir, "locks", "*"),
		filepath.Join(p.faultyDir(), "taken", "*.kernel*"), filepath.Join(p.faultyDir(), "taken", "*.last*"),
	} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			p.Fatal(err)
		}
		for _, file := range files {
			if err := os.Remove(file); err != nil {
				p.Fatal(err)
			}
		}
	}
	p.dropNetNS()
	if p.entry() != nil {
		p.edit(func(g *journal.Generation) { g.Host.BootID = earlier })
	}
}
