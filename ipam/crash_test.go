package ipam

import (
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

// TestHostLocalKilled: host-local dies between creating and writing a reservation. Its own DEL does
// not find it; Plan and Apply do, and host-local gives the address out again.
func TestHostLocalKilled(t *testing.T) {
	h := newHostLocal(t, `"subnet": "10.9.9.0/30"`)
	file := filepath.Join(h.pool(), "10.9.9.2")
	add := h.call("ADD", "a")
	strace := []string{"-f", "-qq", "-o", "/dev/null", "-P", file, "-e", "inject=write:signal=KILL"}
	traced := exec.Command("strace", append(strace, add.Args...)...)
	traced.Env, traced.Stdin = add.Env, add.Stdin
	if out, err := traced.CombinedOutput(); err == nil || traced.ProcessState.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("host-local was not killed as it wrote %s: %v, %s", file, err, out)
	}
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
