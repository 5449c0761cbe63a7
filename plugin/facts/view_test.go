package facts

import (
	"errors"
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
	empty, err := Look(path, "")
	if err != nil {
		t.Fatal(err)
	}
	own, err := Look("/proc/self/ns/net", "")
	if err != nil {
		t.Fatal(err)
	}
	v := &View{}
	looked := func() time.Time {
		if is, err := v.ProcessIn(own.Netns, false); !is || err != nil {
			t.Errorf("no process is in this process's own network namespace (%v)", err)
		}
		return v.members.looked
	}
	first := looked()
	if is, err := v.ProcessIn(empty.Netns, false); is || err != nil {
		t.Errorf("a process is in an empty network namespace: %t (%v)", is, err)
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
	for end := time.Now().Add(sandbox.Patience); ; time.Sleep(10 * time.Millisecond) {
		link, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", inside.Process.Pid))
		if err == nil && link == LinkOf(empty.Netns) {
			break
		}
		if time.Now().After(end) {
			t.Fatal("no process has entered")
		}
	}
	v.members.looked = v.members.looked.Add(-viewAge)
	if is, err := v.ProcessIn(empty.Netns, false); !is || err != nil {
		t.Errorf("process %d is not seen in the network namespace (%v)", inside.Process.Pid, err)
	}
}

// TestUnseenProcess: while a process may not be inspected, no namespace is known to be without one.
func TestUnseenProcess(t *testing.T) {
	t.Parallel()
	v := &View{members: seen[map[string][]string]{looked: time.Now().Add(time.Hour), err: errors.New("process 7")}}
	if is, err := v.ProcessIn(journal.NetNS{Ino: 9}, false); is || err == nil {
		t.Errorf("a process inside: %t (%v)", is, err)
	}
}
