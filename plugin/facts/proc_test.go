package facts

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/plugintest/sandbox"
)

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m)) }

// TestOneLookAtProcesses: a View reads /proc once for all attachments of a sweep, and uses the
// result for the duration viewAge. Then it reads /proc again, and finds a process that has entered
// a network namespace in the meantime.
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
	empty, err := InterfaceAt(path, "")
	if err != nil {
		t.Fatal(err)
	}
	own, err := InterfaceAt("/proc/self/ns/net", "")
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
		t.Error("the View read /proc again within viewAge")
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
		if err == nil && link == linkOf(empty.Netns) {
			break
		}
		if time.Now().After(end) {
			t.Fatal("nsenter did not enter the network namespace in time")
		}
	}
	v.members.looked = v.members.looked.Add(-viewAge)
	if is, err := v.ProcessIn(empty.Netns, false); !is || err != nil {
		t.Errorf("process %d was not found in the network namespace (%v)", inside.Process.Pid, err)
	}
}

// TestUnseenProcess: if one process cannot be inspected, ProcessIn returns an error for every
// namespace: that process may be in any of them.
func TestUnseenProcess(t *testing.T) {
	t.Parallel()
	v := &View{members: seen[map[string][]string]{looked: time.Now().Add(time.Hour), err: errors.New("process 7")}}
	if is, err := v.ProcessIn(journal.NetNS{Ino: 9}, false); is || err == nil {
		t.Errorf("ProcessIn: %t (%v), want an error", is, err)
	}
}

const sandboxID = "d66c0f41dfc8d0199ad675f1f60e319bc48e53c28e496e1fc9eb2ce29ec4182e"

// TestNamesContainer covers the cgroup paths of runtimes, and paths that only resemble them.
func TestNamesContainer(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		line, id string
		want     bool
	}{
		{"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice/cri-containerd-ID.scope", sandboxID, true},
		{"0::/kubepods.slice/kubepods-pod1_2.slice/crio-ID.scope", sandboxID, true},
		{"0::/kubepods.slice/kubepods-pod1_2.slice/crio-ID.scope/container", sandboxID, true},
		{"1:name=systemd:/kubepods/besteffort/pod1-2/ID", sandboxID, true},
		{"5:cpuacct,cpu:/kubepods/besteffort/pod1-2/crio-ID", sandboxID, true},
		{"4:memory:/system.slice/kubepods-pod1_2.slice:cri-containerd:ID", sandboxID, true},
		{"0::/../../machine.slice/libpod-ID.scope/container", sandboxID, true},
		{"0::/default/ID", sandboxID, true},
		{"0::/default/a", "a", true},
		{"0::/user.slice/user-1000.slice/session-a.scope", "a", false},
		{"0::/default/1ID", sandboxID, false},
		{"0::/default/ID1", sandboxID, false},
		{"0::/default/x-ID1.scope", sandboxID, false},
		{"0::/default/ID.service", sandboxID, false},
		{"0::/", sandboxID, false},
	} {
		if got := namesContainer(strings.ReplaceAll(tt.line, "ID", sandboxID), tt.id); got != tt.want {
			t.Errorf("%s: %t", tt.line, got)
		}
	}
}

// TestContainerRuns: a container counts as running while a process is in a cgroup whose path
// contains the container ID.
func TestContainerRuns(t *testing.T) {
	sandbox.Need(t)
	process := exec.Command("sleep", "600")
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = process.Process.Kill(); _ = process.Wait() })
	runs := func() bool {
		is, err := (&View{}).containerRuns(sandboxID)
		if err != nil {
			t.Fatal(err)
		}
		return is
	}
	if runs() {
		t.Error("the container runs before a process is in its cgroup")
	}
	found := false
	for _, name := range []string{"cri-containerd-" + sandboxID + ".scope", sandboxID} {
		for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd"} {
			dir := filepath.Join(root, name)
			if _, err := os.Stat(filepath.Join(root, "cgroup.procs")); err != nil || os.Mkdir(dir, 0o755) != nil {
				continue
			}
			found = true
			move := func(dir string) {
				t.Helper()
				if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(process.Process.Pid)), 0); err != nil {
					t.Fatal(err)
				}
			}
			t.Cleanup(func() { _ = os.Remove(dir) })
			move(dir)
			if !runs() {
				t.Errorf("a process in %s was not found", dir)
			}
			move(root)
			if runs() {
				t.Errorf("a process was found in %s after it left", dir)
			}
		}
	}
	if !found {
		t.Skip("cannot create a cgroup")
	}
}

// TestMemberOfReaped: a process is reaped while memberOf reads its network namespace. The kernel
// may then return EACCES, as for a process that may not be inspected. memberOf must not return an
// error: the process has ended.
func TestMemberOfReaped(t *testing.T) {
	t.Parallel()
	rounds := 300
	if testing.Short() {
		rounds = 30
	}
	for range rounds {
		cmd := exec.Command("/bin/true")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		reaped := make(chan struct{})
		go func() {
			_ = cmd.Wait()
			close(reaped)
		}()
		for ended := false; !ended; {
			select {
			case <-reaped:
				ended = true
			default:
			}
			if _, _, err := memberOf(cmd.Process.Pid); err != nil {
				t.Fatal(err)
			}
		}
	}
}
