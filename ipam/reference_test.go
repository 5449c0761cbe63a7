package ipam

import (
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"cni-unwind/ipam/ipamtest"
	"cni-unwind/plugin/plugintest/sandbox"
)

// TestReleaseFromHostLocal releases the addresses that host-local itself allocated to one of two
// attachments. host-local's own DEL then finds nothing to release, and does not change the pool.
func TestReleaseFromHostLocal(t *testing.T) {
	t.Parallel()
	sandbox.Need(t)
	h := ipamtest.New(t, `"ranges": [[{"subnet": "10.1.0.0/29"}], [{"subnet": "fd00::/125"}]]`)
	for _, id := range []string{"a", "b"} {
		if failed := h.Run("ADD", id); failed != "" {
			t.Fatal(failed)
		}
	}
	held, err := HeldBy(h.Pool(), "a", "eth0")
	want := []netip.Addr{netip.MustParseAddr("10.1.0.2"), netip.MustParseAddr("fd00::2")}
	slices.SortFunc(held, netip.Addr.Compare)
	if !slices.Equal(held, want) || err != nil {
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

// TestHostLocalKilled: host-local is killed after it has created a reservation's file, but before
// it writes the owner. host-local's own DEL does not find the empty file. Scan finds it, and Apply
// removes it. Then host-local can allocate the address again.
func TestHostLocalKilled(t *testing.T) {
	sandbox.Need(t)
	h := ipamtest.New(t, `"subnet": "10.9.9.0/30"`)
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

// FuzzReservation puts a file with an arbitrary name and content into a pool. The file is a
// reservation only if its name is an address. Release for one owner removes no other owner's file.
func FuzzReservation(f *testing.F) {
	for _, name := range []string{"10.1.0.2", "fd00::2", "::ffff:10.1.0.2", "fe80::1%eth0", "lock", "last_reserved_ip.0", "10.1.0.02"} {
		f.Add(name, []byte("a\r\neth0"))
		f.Add(name, []byte("a"))
		f.Add(name, []byte("\r\n"))
	}
	f.Add("10.1.0.2", []byte(" a \r\n eth0 \r\n b"))
	f.Add("10.1.0.3", []byte(strings.Repeat("x", maxOwner+1)))
	f.Fuzz(func(t *testing.T, name string, content []byte) {
		if name == "" || strings.ContainsAny(name, "/\x00") || name == "." || name == ".." || len(name) > 255 {
			t.Skip()
		}
		pool := t.TempDir()
		if err := os.WriteFile(filepath.Join(pool, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
		found, _ := Scan(pool)
		address, err := netip.ParseAddr(name)
		if len(found) > 1 || len(found) == 1 && (err != nil || found[0].Address != address || found[0].Empty() && found[0].Owner != Owner{}) {
			t.Fatalf("Scan takes the file %q for %+v", name, found)
		}
		for _, owner := range []Owner{{"a", "eth0"}, {"b", "eth0"}} {
			held, _ := HeldBy(pool, owner.ContainerID, owner.IfName)
			if is := len(found) == 1 && found[0].Owner.Is(owner.ContainerID, owner.IfName); (len(held) == 1) != is {
				t.Errorf("%s holds %v of %+v", owner, held, found)
			}
		}
		if _, err := Release(t.Context(), pool, Owner{"b", "eth0"}); err != nil && len(content) <= maxOwner {
			t.Error(err)
		}
		_, err = os.Lstat(filepath.Join(pool, name))
		if ours := len(found) == 1 && found[0].Owner.Is("b", "eth0"); os.IsNotExist(err) != ours {
			t.Errorf("after a release for b: %v, of %+v", err, found)
		}
	})
}
