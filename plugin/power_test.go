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
	atEveryPoint(t, 6, `
	one-in 2
	either ADD: let verb add a
	or failing ADD: let verb add a; plan last ADD fail-effect
	or DEL: let verb del a
	either all in the kernel: let chain bridge | firewall | kernel0 | kernel
	or a delegate in the middle keeps something on the disk: let chain bridge | kernel0 | disk, "dataDir": "on the disk" | kernel
	or host-local is the second's: let chain kernel | bridge | kernel2 | kernel3
	chain $chain
	if failing: chain $chain | last
	if DEL: add a
	kill any $at tries $verb; plan
	off a; until sweep; on-disk
	if ADD: released
	leaves`, acts{
		"off":     func(s *story, w []string) { s.who(w[0]).powerOff() },
		"on-disk": func(s *story, _ []string) { s.nothingOnDisk() },
		"released": func(s *story, _ []string) {
			live := !s.killed && s.added["a"] != nil
			s.want(!live || s.tombstone(s.who("a").key()) != nil, "the sweep released nothing")
		},
	})
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
		must(p, err)
		for _, file := range files {
			must(p, os.Remove(file))
		}
	}
	p.dropNetNS()
	if p.entry() != nil {
		p.edit(func(e *journal.Entry) { e.Host.BootID = earlier })
	}
}
