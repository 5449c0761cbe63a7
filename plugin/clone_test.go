package plugin

import (
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/undo"
	"cni-unwind/testdata/sandbox"
)

// otherMachine returns the name of a machine that is not this one.
func otherMachine(t *testing.T) string {
	kind, _, _ := strings.Cut(host.This().Machine, ":")
	if kind == "" {
		t.Skip("this machine has no name")
	}
	return kind + ":another"
}

// TestForeign: the disk comes from another machine, as a clone or a backup. No DEL of its pods
// runs, since the original may use the addresses. A sweep removes what host-local keeps on this
// disk for exactly these owners.
func TestForeign(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ verb, pod string }{
		{"STATUS", "live"}, {"GC", "live"}, {"sweep", "live"}, {"GC", "DEL pending"}, {"GC", "ADD failed"}, {"GC", "ADD cut off"},
	} {
		t.Run(c.verb+", "+c.pod, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			chain := []string{n.bridgePlugin(""), n.faulty("p1", "")}
			list := n.unwind(chain...)
			p := n.pod("a")
			n.plan(map[string]map[string]map[string]string{
				"DEL pending": {"p1": {"DEL": "fail"}},
				"ADD failed":  {"p1": {"ADD": "fail-effect", "DEL": "fail"}},
				"ADD cut off": {"p1": {"ADD": "kill-parent-effect"}},
			}[c.pod])
			if _, err := p.add(list); (err != nil) != strings.HasPrefix(c.pod, "ADD") {
				t.Fatalf("ADD: %v", err)
			}
			if c.pod == "DEL pending" {
				if err := p.del(list); err == nil {
					t.Fatal("the DEL succeeded")
				}
			}
			n.plan(nil)
			machine := otherMachine(t)
			p.edit(func(g *journal.Generation) { g.Host.BootID, g.Host.Machine = earlier, machine })
			p.dropNetNS()
			owners := map[string]string{"aa": "eth0", "a": "eth1", "b": "eth0"}
			kept := map[string]string{}
			pool := filepath.Join(n.dataDir(), n.network)
			for i, id := range slices.Sorted(maps.Keys(owners)) {
				ip := n.prefix(4, byte(100+i)).Addr().String()
				n.write(filepath.Join(pool, ip), id+"\r\n"+owners[id])
				kept[ip] = id + " " + owners[id]
			}
			// Old releases of host-local wrote this form.
			n.write(filepath.Join(pool, n.prefix(4, 99).Addr().String()), "a")
			n.forgetCalls()

			n.until(c.verb, chain)
			n.wantCalls("on another machine")
			if got := n.reserved(); !maps.Equal(got, kept) {
				t.Errorf("reserved: %v, want %v", got, kept)
			}
			if tomb := n.tombstone(p.key()); tomb == nil || !strings.Contains(tomb.Reason, "another machine") {
				t.Errorf("tombstone %+v", tomb)
			}
			p.mustDel(list)
			n.wantCalls("the runtime's DEL")
			if locks := n.names(filepath.Join(n.stateDir, "locks")); len(locks) > 0 {
				t.Errorf("%d lock files are left", len(locks))
			}
		})
	}
}

// TestUnknownMachine: of a machine whose name is of another kind than this one's, nothing is known,
// so nothing is done.
func TestUnknownMachine(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	chain := []string{n.faulty("p0", "")}
	list := n.unwind(chain...)
	p := n.pod("a")
	p.mustAdd(list)
	p.edit(func(g *journal.Generation) { g.Host.BootID, g.Host.Machine = earlier, "serial:another" })
	for _, sweep := range sweeps {
		sweep(n, chain)
	}
	if found := n.sweep(undo.DefaultBudgets); len(found) != 1 || found[0].Fate != alive.Unknown || len(p.dels()) > 0 || p.entry() == nil {
		t.Errorf("found: %+v, DELs: %q", found, p.dels())
	}
	p.mustDel(list)
	n.nothingLeft()
}

// TestForeignCutOff: the ADD of a new sandbox finds the old one on another machine's disk, and
// unwind is killed at each point of it. The next sweep continues, and no DEL of the old one ever
// runs.
func TestForeignCutOff(t *testing.T) {
	t.Parallel()
	machine := otherMachine(t)
	everyPoint(t, 7, func(t *testing.T, at int) bool {
		n := newNode(t)
		chain := []string{n.faulty("p0", `, "ipam": `+n.hostLocal(n.subnet))}
		list := n.unwind(chain...)
		a := n.pod("a")
		a.mustAdd(list)
		before(a)
		a.edit(func(g *journal.Generation) { g.Host.Machine = machine })
		b := a.nextSandbox("b")
		err := n.killedAt(at, func() error {
			_, err := b.add(list)
			return err
		})
		b.mustDel(list)
		n.until("GC", chain)
		if dels := a.dels(); len(dels) > 0 {
			t.Errorf("DELs of the old one: %q", dels)
		}
		// The file is the original's.
		if err := os.Remove(filepath.Join(n.faultyDir(), "taken", "a.eth0.p0")); err != nil {
			t.Error(err)
		}
		// A kill between the journal and the lock file leaves that file until the runtime's DEL.
		a.mustDel(list)
		n.nothingLeft()
		return wasKilled(err)
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
