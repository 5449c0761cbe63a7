package host

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/testdata/sandbox"
)

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m)) }

// TestOneLookAtProcesses: one look at the processes serves all attachments of a sweep for a while.
// Then a process that has entered a network namespace is seen.
func TestOneLookAtProcesses(t *testing.T) {
	t.Parallel()
	sandbox.Need(t)
	path := filepath.Join(t.TempDir(), "netns")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("unshare", "--net="+path, "true").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Cleanup(func() { _ = unix.Unmount(path, unix.MNT_DETACH) })
	empty, err := Identify(path)
	if err != nil {
		t.Fatal(err)
	}
	own, err := Identify("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	v := &View{}
	looked := func() time.Time {
		if pid, err := v.ProcessIn(own, false); pid == 0 || err != nil {
			t.Errorf("process %d is in this process's own network namespace (%v)", pid, err)
		}
		return v.looked
	}
	first := looked()
	if pid, err := v.ProcessIn(empty, false); pid != 0 || err != nil {
		t.Errorf("process %d is in an empty network namespace (%v)", pid, err)
	}
	if again := looked(); again != first && time.Since(first) < viewAge {
		t.Error("it looked again at once")
	}
	inside := exec.Command("nsenter", "--net="+path, "cat")
	stdin, err := inside.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := inside.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = stdin.Close(); _ = inside.Wait() })
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		link, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", inside.Process.Pid))
		if err == nil && link == LinkOf(empty) {
			break
		}
		if time.Now().After(end) {
			t.Fatal("no process has entered")
		}
	}
	v.looked = v.looked.Add(-viewAge)
	if pid, err := v.ProcessIn(empty, false); pid != inside.Process.Pid || err != nil {
		t.Errorf("process %d is in the network namespace (%v), want %d", pid, err, inside.Process.Pid)
	}
}

// TestProcessesThatMayNotBeInspected: one that shares its net/dev with the namespace, or of which that
// is not known, may be in it.
func TestProcessesThatMayNotBeInspected(t *testing.T) {
	t.Parallel()
	v := &View{looked: time.Now().Add(time.Hour), links: map[string]bool{"net:[3]": true}, closed: map[uint64]bool{7: true}, shownAll: true}
	for _, tt := range []struct {
		id   journal.NetNS
		none bool
	}{
		{journal.NetNS{Ino: 9, NetDev: 8}, true}, {journal.NetNS{Ino: 9, NetDev: 7}, false}, {journal.NetNS{Ino: 9}, false},
		{journal.NetNS{Ino: 3, NetDev: 8}, false},
	} {
		if got := v.noProcessIn(tt.id); got != tt.none {
			t.Errorf("%+v: %t, want %t", tt.id, got, tt.none)
		}
	}
	v.shownAll = false
	if v.noProcessIn(journal.NetNS{Ino: 9, NetDev: 8}) {
		t.Error("there may be others")
	}
}
