package plugin

import (
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/undo"
	"cni-unwind/testdata/sandbox"
)

// TestForeign: the disk comes from another machine, as a clone or a backup. No DEL of its pods
// runs, since the original may use the addresses. A sweep removes what host-local keeps on this
// disk for exactly these owners: $ip99 is in the form that old releases of host-local wrote.
func TestForeign(t *testing.T) {
	stories(t, `
	chain bridge | p1; let by GC
	either live, STATUS: let by STATUS; add a
	or live, GC: add a
	or live, sweep: let by sweep; add a
	or DEL pending: add a; plan p1 DEL fail; fails del a
	or ADD failed: plan p1 ADD fail-effect, p1 DEL fail; fails add a
	or ADD cut off: plan p1 ADD kill-parent-effect; killed add a; free a
	plan; clone a; drop a
	reserve $ip100 a eth1; reserve $ip101 aa eth0; reserve $ip102 b eth0; reserve $ip99 a
	forgets; until $by; calls
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

// TestForeignCutOff: the ADD of a new sandbox finds the old one on another machine's disk, and
// unwind is killed at each point of it. The next sweep continues, and no DEL of the old one ever
// runs, so that its file, which is the original's, stays. A kill between the journal and the lock
// file leaves that file until the runtime's DEL.
func TestForeignCutOff(t *testing.T) {
	t.Parallel()
	atEveryPoint(t, 7, `
	chain p0, "ipam": $hostlocal
	add a; reboot a; clone a
	sandbox a b; kill any $at add b
	del b; until GC
	undeleted a; taken a.eth0.p0; lose $dir/faulty/taken/a.eth0.p0
	del a`)
}

// TestUnknownMachine: of a machine whose name is of another kind than this one's, nothing is known,
// so nothing is done.
func TestUnknownMachine(t *testing.T) {
	stories(t, `
	chain p0; add a; other-kind a
	sweeps undeleted a
	found-unknown; entry a; del a`, acts{
		"other-kind": func(s *story, w []string) {
			s.who(w[0]).edit(func(g *journal.Generation) { g.Host.BootID, g.Host.Machine = earlier, "serial:another" })
		},
		"found-unknown": func(s *story, _ []string) {
			found := s.node.sweep(undo.DefaultBudgets)
			s.want(len(found) == 1 && found[0].Fate == alive.Unknown, "%+v", found)
		},
	})
}

// TestThisMachine: a machine is known by its DMI UUID, even if its machine-id changes at each boot.
// Without a valid UUID it is known by its machine-id.
func TestThisMachine(t *testing.T) {
	sandbox.Need(t)
	t.Parallel()
	for _, c := range []struct{ uuid, id, want string }{
		{"4C4C4544-0042-3510-8052-B4C04F4E3232\n", "abc\n", "dmi:4c4c4544-0042-3510-8052-b4c04f4e3232"},
		{"4c4c4544-0042-3510-8052-b4c04f4e3232\n", "def\n", "dmi:4c4c4544-0042-3510-8052-b4c04f4e3232"},
		{"00000000-0000-0000-0000-000000000000\n", "abc\n", "machine-id:abc"},
		{"FFFFFFFF-FFFF-FFFF-FFFF-FFFFFFFFFFFF\n", "abc\n", "machine-id:abc"},
		{"", "abc\n", "machine-id:abc"}, {"", "", ""},
	} {
		got := make(chan string)
		go func() {
			runtime.LockOSThread() // and never unlocked: the thread ends with its mounts
			got <- machineOf(c.uuid, c.id)
		}()
		if got := <-got; got != c.want {
			t.Errorf("UUID %q, machine-id %q: %q, want %q", c.uuid, c.id, got, c.want)
		}
	}
}

// machineOf returns the name of a machine with these files. It leaves its thread in a mount
// namespace of its own.
func machineOf(uuid, id string) string {
	const dmi = "/sys/class/dmi/id"
	err := unix.Unshare(unix.CLONE_NEWNS)
	for _, dir := range []string{"/sys", "/etc"} {
		if err == nil {
			err = unix.Mount("tmpfs", dir, "tmpfs", 0, "")
		}
	}
	if err == nil {
		err = os.MkdirAll(dmi, 0o755)
	}
	for path, content := range map[string]string{dmi + "/product_uuid": uuid, "/etc/machine-id": id} {
		if err == nil && content != "" {
			err = os.WriteFile(path, []byte(content), 0o600)
		}
	}
	if err != nil {
		return err.Error()
	}
	return host.This().Machine
}
