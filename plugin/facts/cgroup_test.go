package facts

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"cni-unwind/testdata/sandbox"
)

const sandboxID = "d66c0f41dfc8d0199ad675f1f60e319bc48e53c28e496e1fc9eb2ce29ec4182e"

// TestNamesContainer has the cgroups that runtimes make, and others.
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

// TestContainerRuns: a process in a cgroup that names its container shows that the container runs.
func TestContainerRuns(t *testing.T) {
	sandbox.Need(t)
	process := exec.Command("sleep", "600")
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = process.Process.Kill(); _ = process.Wait() })
	runs := func() bool {
		is, err := (&View{}).ContainerRuns(sandboxID)
		if err != nil {
			t.Fatal(err)
		}
		return is
	}
	if runs() {
		t.Error("it runs before its process is in its cgroup")
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
			if move(dir); !runs() {
				t.Errorf("a process in %s is not seen", dir)
			}
			if move(root); runs() {
				t.Errorf("a process that has left %s is seen", dir)
			}
		}
	}
	if !found {
		t.Skip("no cgroup can be made")
	}
}
