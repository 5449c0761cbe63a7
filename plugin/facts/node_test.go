package facts

import (
	"os"
	"strings"
	"testing"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
)

func TestOtherHost(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		ours, theirs string
		want         decide.Truth
	}{
		{"dmi:1", "dmi:1", decide.False}, {"dmi:1", "dmi:2", decide.True}, {"machine-id:1", "machine-id:1", decide.False}, {"machine-id:1", "machine-id:2", decide.True},
		{"dmi:1", "machine-id:1", decide.Unclear}, {"machine-id:1", "dmi:1", decide.Unclear}, {"dmi:1", "machine-id:2", decide.Unclear},
		{"", "", decide.Unclear}, {"", "dmi:1", decide.Unclear}, {"dmi:1", "", decide.Unclear},
	} {
		o := &Node{Host: journal.Host{Machine: c.ours}}
		if got := o.otherHost(&journal.Record{Added: journal.Added{Host: journal.Host{Machine: c.theirs}}}); got != c.want {
			t.Errorf("this machine %q, the entry's %q: %d, want %d", c.ours, c.theirs, got, c.want)
		}
	}
}

// TestGraceLeft: an attachment's age is measured with CLOCK_BOOTTIME, whatever the wall clock was
// at its ADD. The grace period is the configured one if the attachment is in the configured
// network, else the one recorded by its ADD.
func TestGraceLeft(t *testing.T) {
	t.Parallel()
	const year = 365 * 24 * time.Hour
	n := &Node{Network: "podnet", GracePeriod: 10 * time.Minute}
	for _, c := range []struct {
		network   string
		boot, age time.Duration // the age by CLOCK_BOOTTIME and by the wall clock
		young     bool
	}{
		{"podnet", 0, year, true}, {"podnet", 9 * time.Minute, -year, true}, {"podnet", 11 * time.Minute, 0, false},
		{"podnet", 11 * time.Minute, -year, false}, {"other", 11 * time.Minute, year, true}, {"other", 2 * time.Hour, 0, false},
	} {
		at := journal.Time{Boot: journal.BootNanos() - int64(c.boot), Wall: time.Now().Add(-c.age)}
		e := &journal.Record{Key: journal.Key{Network: c.network}, Added: journal.Added{GracePeriod: time.Hour, At: at}, Updated: at}
		if young := n.GraceLeft(e) > 0; young != c.young {
			t.Errorf("%+v: %t", c, young)
		}
	}
}

// TestMachineOf: the DMI UUID identifies a machine, whatever its machine-id is. Without a valid
// UUID, the machine-id identifies it.
func TestMachineOf(t *testing.T) {
	for _, c := range []struct{ uuid, id, want string }{
		{"4C4C4544-0042-3510-8052-B4C04F4E3232", "abc", "dmi:4c4c4544-0042-3510-8052-b4c04f4e3232"},
		{"4c4c4544-0042-3510-8052-b4c04f4e3232", "", "dmi:4c4c4544-0042-3510-8052-b4c04f4e3232"},
		{"00000000-0000-0000-0000-000000000000", "abc", "machine-id:abc"},
		{"FFFFFFFF-FFFF-FFFF-FFFF-FFFFFFFFFFFF", "abc", "machine-id:abc"},
		{"", "abc", "machine-id:abc"}, {"", "", ""},
	} {
		if got := machineOf(c.uuid, c.id); got != c.want {
			t.Errorf("UUID %q, machine-id %q: %q, want %q", c.uuid, c.id, got, c.want)
		}
	}
	uuid, _ := os.ReadFile("/sys/class/dmi/id/product_uuid")
	id, _ := os.ReadFile("/etc/machine-id")
	if got, want := This().Machine, machineOf(strings.TrimSpace(string(uuid)), strings.TrimSpace(string(id))); got != want {
		t.Errorf("this machine: %q, want %q", got, want)
	}
}
