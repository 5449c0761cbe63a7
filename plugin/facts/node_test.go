package facts

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/plugintest/sandbox"
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
		if got := o.otherHost(&journal.Entry{Added: journal.Added{Host: journal.Host{Machine: c.theirs}}}); got != c.want {
			t.Errorf("here %q, there %q: %d, want %d", c.ours, c.theirs, got, c.want)
		}
	}
}

// TestGraceLeft: an attachment's age goes by CLOCK_BOOTTIME, whatever the wall clock was at its ADD. The
// grace period is its network's present one, or for another network that of its ADD.
func TestGraceLeft(t *testing.T) {
	t.Parallel()
	const year = 365 * 24 * time.Hour
	n := &Node{Network: "podnet", GracePeriod: 10 * time.Minute}
	for _, c := range []struct {
		network   string
		boot, age time.Duration // the age by CLOCK_BOOTTIME, and by the wall clock
		young     bool
	}{
		{"podnet", 0, year, true}, {"podnet", 9 * time.Minute, -year, true}, {"podnet", 11 * time.Minute, 0, false},
		{"podnet", 11 * time.Minute, -year, false}, {"other", 11 * time.Minute, year, true}, {"other", 2 * time.Hour, 0, false},
	} {
		at := journal.Time{Boot: journal.BootNanos() - int64(c.boot), Wall: time.Now().Add(-c.age)}
		e := &journal.Entry{Key: journal.Key{Network: c.network}, Added: journal.Added{GracePeriod: time.Hour, At: at}, Updated: at}
		if young := n.GraceLeft(e) > 0; young != c.young {
			t.Errorf("%+v: %t", c, young)
		}
	}
}

// TestMachineOf: a machine is known by its DMI UUID, whatever its machine-id is. Without a valid UUID
// it is known by its machine-id.
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
		t.Errorf("here: %q, want %q", got, want)
	}
}

// TestNames has what a path says of an ADD: by the namespace that it leads to, or else by the path.
func TestNames(t *testing.T) {
	t.Parallel()
	sandbox.Need(t)
	dir := t.TempDir()
	if err := os.Symlink(dir, dir+".link"); err != nil {
		t.Fatal(err)
	}
	its, other := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	netnsAt(t, its, "eth0")
	netnsAt(t, other, "eth0")
	place, err := Open(its, "eth0") // the namespace exists as long as this is open, and a path leads to it
	if err != nil {
		t.Fatal(err)
	}
	defer place.Close()
	was := place.Seen.Netns
	later := was
	later.Cookie++
	noCookie := was
	noCookie.Cookie = 0
	gone := journal.NetNS{Path: its, Dev: was.Dev, Ino: 1, Cookie: 1}
	at := func(netns journal.NetNS, path string) journal.NetNS { netns.Path = path; return netns }
	for _, tt := range []struct {
		name  string
		e     journal.NetNS
		boot  string
		path  string
		again bool
		want  bool
	}{
		{"it leads there", was, "this", its, false, true},
		{"another path leads there", at(was, "/x"), "this", its, true, true},
		{"a link leads there", was, "this", dir + ".link/a", false, true},
		{"it leads to another one", was, "this", other, false, false},
		{"it leads nowhere", at(was, "/x"), "this", "/x", false, true},
		{"it leads nowhere, by a link", at(gone, dir+"/none"), "this", dir + ".link/none", false, true},
		{"another one leads nowhere", was, "this", "/x", false, false},
		{"another one is there by now", gone, "this", its, false, true},
		{"another one is there, of a later ADD", gone, "this", its, true, false},
		{"another one is there, but its own exists", at(was, other), "this", other, false, false},
		{"the number is used again", later, "this", its, false, true},
		{"the number is used again, by a later ADD", later, "this", its, true, false},
		{"no cookie, the same path", noCookie, "this", its, true, true},
		{"no cookie, another path", at(noCookie, "/x"), "this", its, false, false},
		{"not identified", journal.NetNS{Path: its}, "this", its, false, true},
		{"no path on record", journal.NetNS{}, "this", its, true, true},
		{"an earlier boot", was, "another", its, false, true},
		{"an earlier boot, a later ADD", was, "another", its, true, false},
	} {
		n := nodeAt(t)
		seen, _ := Look(tt.path, "eth0")
		seen.Again = tt.again
		e := &journal.Entry{Key: attachment, Added: journal.Added{NetNS: tt.e, Host: journal.Host{BootID: tt.boot}}}
		if got := n.Names(e, seen); got != tt.want {
			t.Errorf("%s: %t", tt.name, got)
		}
	}
}
