package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/sandbox"
)

// elsewhere lists namespaces from which an operator, or an agent in a pod, may read the host's
// journal. In setup, $PINS is the directory in which the network namespaces are mounted.
var elsewhere = []struct {
	name  string
	flags []string // of unshare
	enter []string // of nsenter; nil: the same as flags
	setup string
	pins  bool // the mounts of the network namespaces are visible from there
}{
	{"mount", []string{"--mount"}, nil, `umount -l "$PINS"/*`, false},
	{"PID, with the host's /proc", []string{"--pid"}, nil, ``, true},
	{"mount and PID, with the host's /proc", []string{"--mount", "--pid"}, nil, `umount -l "$PINS"/*`, false},
	{"mount and PID, with a /proc of its own", []string{"--mount", "--pid"}, nil,
		`mount -t proc proc /proc && umount -l "$PINS"/*`, false},
	{"network", []string{"--net"}, nil, ``, true},
	{"time", []string{"--time", "--boottime=100000000"}, []string{"--time"}, ``, true},
	{"a pod", []string{"--mount", "--pid", "--net", "--ipc", "--uts"}, nil,
		`mount -t proc proc /proc && umount -l "$PINS"/*`, false},
	{"a pod with hostPID", []string{"--mount", "--net", "--ipc", "--uts"}, nil, `umount -l "$PINS"/*`, false},
	{"a pod with hostNetwork and hostPID, and a machine-id of its own", []string{"--mount"}, nil,
		`umount -l "$PINS"/* && echo 0123456789abcdef0123456789abcdef >"$PINS.id" && mount --bind "$PINS.id" /etc/machine-id`, false},
}

// TestElsewhere: a sweep in other namespaces cannot judge attachments that were added on the host,
// and changes nothing. The same holds for a sweep on the host if the ADDs ran in other namespaces.
func TestElsewhere(t *testing.T) {
	t.Parallel()
	for i, c := range elsewhere {
		for j, added := range []string{"added on the host", "added there"} {
			if !sandbox.Sampled(sandbox.Rounds(3, 2, 1), i, j) {
				continue
			}
			if added == "added there" && strings.Contains(c.name, "the host's /proc") {
				continue // no plugin can run there, because it cannot find its own network namespace
			}
			t.Run(c.name+", "+added, func(t *testing.T) {
				t.Parallel()
				if slices.Contains(c.flags, "--time") {
					if _, err := os.Stat("/proc/self/ns/time"); err != nil {
						t.Skip("this kernel has no time namespaces")
					}
				}
				n := newMachine(t)
				n.netns("gone", "there")
				enter := c.enter
				if enter == nil {
					enter = c.flags
				}
				setup := c.setup
				if added == "added there" {
					setup = strings.ReplaceAll(setup, `umount -l "$PINS"/*`, "true")
				}
				there := n.newPlace(c.flags, enter, fmt.Sprintf("PINS=%s; true; %s", filepath.Join(n.dir, "netns"), setup))
				if added == "added on the host" {
					n.addKinds(home)
					n.addEarlier()
					n.leftAlone(there)
					n.leftAlone(there.confined())
					n.damagedStays(there)
					n.judged(home)
					return
				}
				n.addKinds(there)
				if !c.pins {
					unmountAll(filepath.Join(n.dir, "netns")) // so that the namespaces seem gone on the host
				}
				n.leftAlone(home)
				n.judged(there)
			})
		}
	}
}

// TestConfinedSweep: a sweep without CAP_SYS_PTRACE releases no attachment in state live, because a
// process that it cannot inspect, such as process 1, may be in the network namespace. Nor does it
// release attachments from an earlier boot.
func TestConfinedSweep(t *testing.T) {
	t.Parallel()
	n := newMachine(t)
	n.netns("gone", "there")
	n.addKinds(home)
	n.addEarlier()
	out := n.sweep(home.confined())
	if ids := n.ids(); out.code != 1 || !slices.Equal(ids, []string{"earlier", "gone", "there"}) {
		t.Errorf("the journal has %v; exit code %d\n%s%s", ids, out.code, out.stdout, out.stderr)
	}
	n.judged(home)
}

// addKinds adds an attachment in each state except abandoned, and a second live one, "gone". It
// then removes the network namespace of "gone".
func (n *machine) addKinds(where place) {
	n.Helper()
	n.add(where, "there", n.pin("there"))
	n.add(where, "gone", n.pin("gone"))
	n.plan(map[string]string{"ADD": "fail-effect", "DEL": "fail"})
	if out := n.verb(where, "ADD", "rolling-back", n.pin("there")); out.code != 1 {
		n.Fatalf("ADD: %+v", out)
	}
	n.plan(map[string]string{"DEL": "fail"})
	n.add(where, "deleting", n.pin("there"))
	if out := n.verb(where, "DEL", "deleting", n.pin("there")); out.code != 1 {
		n.Fatalf("DEL: %+v", out)
	}
	n.plan(map[string]string{"ADD": "kill-parent-effect"})
	n.verb(where, "ADD", "adding", n.pin("there"))
	n.plan(nil)
	states := map[string]journal.State{}
	for _, e := range n.entries() {
		states[e.ContainerID] = e.State
	}
	want := map[string]journal.State{
		"there": "live", "gone": "live", "rolling-back": "rolling-back", "deleting": "deleting", "adding": "adding",
	}
	if fmt.Sprint(states) != fmt.Sprint(want) {
		n.Fatalf("the journal has %v, want %v", states, want)
	}
	n.drop("gone", where)
	eventually(n, "the killed ADD's lock free", func() bool {
		lock, err := n.store.LookAtLock(journal.Key{Network: network, ContainerID: "adding", IfName: "eth0"})
		return !lock.Held && err == nil
	})
}

// addEarlier adds an attachment whose record is from an earlier boot.
func (n *machine) addEarlier() {
	n.Helper()
	n.add(home, "earlier", n.pin("there"))
	n.edit("earlier", func(e *journal.Record) { e.Added.Host.BootID = "earlier" })
}

// leftAlone checks that sweeps in the given place change nothing, and print for each attachment why
// they cannot judge it.
func (n *machine) leftAlone(where place) {
	n.Helper()
	before, dels := n.file(), n.calls("DEL")
	ids := n.ids()
	for _, args := range [][]string{{"--dry-run"}, {}, {"--force"}, {"--network", network, "--valid-attachments", n.listOf("elsewhere")}} {
		out := n.sweep(where, args...)
		results := out.results()
		for _, id := range ids {
			const why = "cannot tell from these namespaces whether it is live"
			if r := results[id]; r[0] != "kept" || !strings.HasPrefix(r[1], why) {
				n.Errorf("sweep %v of %s: %q, want kept, %s", args, id, r, why)
			}
		}
		want := fmt.Sprintf("error: kept %d attachments in state unknown\n", len(ids))
		if out.code != 1 || out.stderr != want {
			n.Errorf("sweep %v: exit code %d, %q, want 1, %q", args, out.code, out.stderr, want)
		}
	}
	if got := n.calls("DEL"); got != dels {
		n.Errorf("%d DELs were run", got-dels)
	}
	if !bytes.Equal(n.file(), before) {
		n.Error("the journal was changed")
	}
}

// damagedStays checks that a sweep in the given place reports a damaged journal, but neither
// changes it nor sets it aside.
func (n *machine) damagedStays(where place) {
	n.Helper()
	whole := n.file()
	damaged := bytes.Clone(whole)
	copy(damaged[4096*2:], bytes.Repeat([]byte{0xff}, len(damaged)-4096*2))
	n.writeFile(damaged)
	out := n.sweep(where)
	if out.code != 1 || out.stdout != "" || !strings.Contains(out.stderr, "error: journal: journal.db is damaged") {
		n.Errorf("sweep of a damaged journal: %+v", out)
	}
	if !bytes.Equal(n.file(), damaged) {
		n.Error("the damaged journal was changed")
	}
	if files, err := filepath.Glob(n.store.Path() + "?*"); err != nil || len(files) > 0 {
		n.Errorf("beside the journal: %v (%v)", files, err)
	}
	n.writeFile(whole)
}

// judged checks that a sweep in the given place releases all dead attachments, and keeps the live
// one.
func (n *machine) judged(where place) {
	n.Helper()
	out := n.sweep(where)
	if ids := n.ids(); out.code != 0 || !slices.Equal(ids, []string{"there"}) {
		n.Errorf("the journal has %v, want [there]; exit code %d\n%s%s", ids, out.code, out.stdout, out.stderr)
	}
	taken, err := os.ReadDir(filepath.Join(n.dir, "taken"))
	if err != nil || len(taken) != 1 {
		n.Errorf("%v are taken (%v)", taken, err)
	}
}

// file returns the bytes of the journal.
func (n *machine) file() []byte {
	n.Helper()
	data, err := os.ReadFile(n.store.Path())
	check(n, err)
	return data
}

func (n *machine) writeFile(data []byte) {
	n.Helper()
	check(n, os.WriteFile(n.store.Path(), data, 0o600))
}

// listOf writes a list of valid attachments, and returns its path.
func (n *machine) listOf(ids ...string) string {
	n.Helper()
	valid := []netconf.Attachment{}
	for _, id := range ids {
		valid = append(valid, netconf.Attachment{ContainerID: id, IfName: "eth0"})
	}
	data, err := json.Marshal(valid)
	path := filepath.Join(n.dir, "list.json")
	check(n, err)
	check(n, os.WriteFile(path, data, 0o600))
	return path
}
