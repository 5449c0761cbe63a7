package ipam

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// hostLocal prepares a call of the real host-local.
func hostLocal(t testing.TB, dataDir, subnet, verb, id string) *exec.Cmd {
	t.Helper()
	binary, err := filepath.Abs("../.tools/cni/host-local")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(binary)
	cmd.Env = []string{"CNI_COMMAND=" + verb, "CNI_CONTAINERID=" + id, "CNI_NETNS=/none", "CNI_IFNAME=eth0", "CNI_PATH=/none"}
	cmd.Stdin = strings.NewReader(config(dataDir, subnet))
	return cmd
}

func config(dataDir, subnet string) string {
	return fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "net", "type": "x", "ipam": {"type": "host-local", "subnet": %q, "dataDir": %q}}`,
		subnet, dataDir)
}

// killBeforeWrite runs host-local up to where the file of a reservation is made, and kills it there: it is stopped at each
// of its system calls.
func killBeforeWrite(t *testing.T, cmd *exec.Cmd, file string) {
	t.Helper()
	runtime.LockOSThread() // only this thread may trace it
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Ptrace: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	var status unix.WaitStatus
	defer func() {
		_ = syscall.Kill(pid, syscall.SIGKILL)
		for stopped := 0; stopped != pid; { // the process ends when we have seen each of its threads end
			var err error
			if stopped, err = unix.Wait4(-1, &status, unix.WALL, nil); err != nil && err != unix.EINTR {
				break
			}
		}
		_ = cmd.Process.Release()
	}()
	if _, err := unix.Wait4(pid, &status, 0, nil); err != nil {
		t.Fatal(err)
	}
	if err := unix.PtraceSetOptions(pid, unix.PTRACE_O_TRACECLONE|unix.PTRACE_O_TRACESYSGOOD|unix.PTRACE_O_EXITKILL); err != nil {
		t.Fatal(err)
	}
	for stopped := pid; ; {
		if _, err := os.Lstat(file); err == nil {
			return
		}
		signal := 0
		if status.Stopped() && status.StopSignal()&^0x80 != unix.SIGTRAP && status.StopSignal() != unix.SIGSTOP {
			signal = int(status.StopSignal())
		}
		_ = unix.PtraceSyscall(stopped, signal) // its thread may have ended
		var err error
		for stopped, err = unix.Wait4(-1, &status, unix.WALL, nil); err == unix.EINTR; {
			stopped, err = unix.Wait4(-1, &status, unix.WALL, nil)
		}
		if err != nil {
			t.Fatalf("host-local ended before it made %s: %v", file, err)
		}
	}
}

// TestHostLocalKilled: host-local dies between making and writing a reservation. Its own DEL does not find it; Plan and Apply
// do, and the address is given out again.
func TestHostLocalKilled(t *testing.T) {
	dataDir := t.TempDir()
	pool := filepath.Join(dataDir, "net")
	file := filepath.Join(pool, "10.9.9.2")
	killBeforeWrite(t, hostLocal(t, dataDir, "10.9.9.0/30", "ADD", "a"), file)
	if info, err := os.Stat(file); err != nil || info.Size() != 0 {
		t.Fatalf("%v, %v; want an empty file", info, err)
	}
	if out, err := hostLocal(t, dataDir, "10.9.9.0/30", "DEL", "a").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if full, err := Exhausted([]byte(config(dataDir, "10.9.9.0/30")), "net"); !full || err != nil {
		t.Errorf("exhausted: %t, %v", full, err)
	}
	if out, err := hostLocal(t, dataDir, "10.9.9.0/30", "ADD", "b").CombinedOutput(); err == nil {
		t.Fatalf("b got an address: %s", out)
	}
	found, err := Scan(pool)
	if err != nil || len(found) != 1 || !found[0].Ownerless() || found[0].Address != netip.MustParseAddr("10.9.9.2") {
		t.Fatalf("%+v, %v", found, err)
	}
	plan := Plan(found, func(Reservation) (bool, string) { t.Error("asked"); return false, "" })
	if released, err := Apply(t.Context(), pool, plan); len(released) != 1 || err != nil {
		t.Fatalf("%+v, %v", released, err)
	}
	if out, err := hostLocal(t, dataDir, "10.9.9.0/30", "ADD", "b").CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}
