package ipam

import (
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"cni-unwind/testdata/hostlocal"
)

// TestReleaseFromHostLocal releases the address that host-local itself gave to one attachment of
// two. host-local then gives it to the next, and its own DEL finds nothing to do.
func TestReleaseFromHostLocal(t *testing.T) {
	t.Parallel()
	h := hostlocal.New(t, `"ranges": [[{"subnet": "10.1.0.0/29"}], [{"subnet": "fd00::/125"}]]`)
	for _, id := range []string{"a", "b"} {
		if failed := h.Run("ADD", id); failed != "" {
			t.Fatal(failed)
		}
	}
	held, err := HeldBy(h.Pool(), "a", "eth0")
	want := []netip.Addr{netip.MustParseAddr("10.1.0.2"), netip.MustParseAddr("fd00::2")}
	if slices.SortFunc(held, netip.Addr.Compare); !slices.Equal(held, want) || err != nil {
		t.Errorf("a holds %v, %v; want %v", held, err, want)
	}
	_, err = Release(t.Context(), h.Pool(), attachment)
	check(t, err)
	left := files{"lock": "", "last_reserved_ip.0": "10.1.0.3", "last_reserved_ip.1": "fd00::3",
		"10.1.0.3": "b\r\neth0", "fd00::3": "b\r\neth0"}
	wantFiles(t, h.Pool(), "left", left)
	if failed := h.Run("DEL", "a"); failed != "" {
		t.Errorf("host-local's DEL: %s", failed)
	}
	wantFiles(t, h.Pool(), "left by the DEL", left)
}

// TestHostLocalKilled: host-local dies between creating and writing a reservation. Its own DEL does
// not find it; Scan and Apply do, and host-local gives the address out again.
func TestHostLocalKilled(t *testing.T) {
	h := hostlocal.New(t, `"subnet": "10.9.9.0/30"`)
	file := filepath.Join(h.Pool(), "10.9.9.2")
	add := h.Command("ADD", "a")
	strace := []string{"-f", "-qq", "-o", "/dev/null", "-P", file, "-e", "inject=write:signal=KILL"}
	traced := exec.Command("strace", append(strace, add.Args...)...)
	traced.Env, traced.Stdin = add.Env, add.Stdin
	if out, err := traced.CombinedOutput(); err == nil || traced.ProcessState.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("host-local was not killed as it wrote %s: %v, %s", file, err, out)
	}
	if info, err := os.Stat(file); err != nil || info.Size() != 0 {
		t.Fatalf("%v, %v; want an empty file", info, err)
	}
	if failed := h.Run("DEL", "a"); failed != "" {
		t.Fatal(failed)
	}
	if h.Run("ADD", "b") == "" {
		t.Fatal("b got an address")
	}
	found, err := Scan(h.Pool())
	if err != nil || len(found) != 1 || !found[0].Empty() || found[0].Address != netip.MustParseAddr("10.9.9.2") {
		t.Fatalf("%+v, %v", found, err)
	}
	if released, err := Apply(t.Context(), h.Pool(), found); len(released) != 1 || err != nil {
		t.Fatalf("%+v, %v", released, err)
	}
	if failed := h.Run("ADD", "b"); failed != "" {
		t.Error(failed)
	}
}
