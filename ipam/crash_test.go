package ipam

import (
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// killBeforeWrite runs host-local up to the creation of a reservation's file, and kills it there.
// It stops host-local at each of its system calls.
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
		// The process ends once each of its threads is seen to end.
		for stopped := 0; stopped != pid; {
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

// TestHostLocalKilled: host-local dies between creating and writing a reservation. Its own DEL does
// not find it; Plan and Apply do, and host-local gives the address out again.
func TestHostLocalKilled(t *testing.T) {
	h := newHostLocal(t, `"subnet": "10.9.9.0/30"`)
	file := filepath.Join(h.pool(), "10.9.9.2")
	killBeforeWrite(t, h.call("ADD", "a"), file)
	if info, err := os.Stat(file); err != nil || info.Size() != 0 {
		t.Fatalf("%v, %v; want an empty file", info, err)
	}
	if failed := h.do("DEL", "a"); failed != "" {
		t.Fatal(failed)
	}
	if full, err := Exhausted(h.config, "podnet"); !full || err != nil {
		t.Errorf("exhausted: %t, %v", full, err)
	}
	if h.do("ADD", "b") == "" {
		t.Fatal("b got an address")
	}
	found, err := Scan(h.pool())
	if err != nil || len(found) != 1 || !found[0].Ownerless() || found[0].Address != netip.MustParseAddr("10.9.9.2") {
		t.Fatalf("%+v, %v", found, err)
	}
	plan := Plan(found, func(Reservation) (bool, string) { t.Error("asked"); return false, "" })
	if released, err := Apply(t.Context(), h.pool(), plan); len(released) != 1 || err != nil {
		t.Fatalf("%+v, %v", released, err)
	}
	if failed := h.do("ADD", "b"); failed != "" {
		t.Error(failed)
	}
}
