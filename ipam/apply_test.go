package ipam

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cni-unwind/plugin/plugintest/sandbox"
)

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m)) }

// TestApplyInPart: if Apply cannot release some reservations, it releases the others, and returns
// an error for each that it could not release. If a reservation got an owner, changed its owner or
// was removed since the scan, Apply skips it without an error.
func TestApplyInPart(t *testing.T) {
	sandbox.Need(t)
	pool := newPool(t, files{
		"10.1.0.2": "a\r\neth0", "10.1.0.3": "", "10.1.0.4": "b\r\neth0", "10.1.0.5": "", "10.1.0.6": "c\r\neth0", "10.1.0.7": "d",
		"10.1.0.8": "a\r\neth0", "fd00::2": "a\r\neth0", "lock": "", "last_reserved_ip.0": "10.1.0.7",
	})
	found, err := Scan(pool)
	check(t, err)
	var plan []Reservation
	for _, r := range found {
		if r.Owner.ContainerID != "d" {
			plan = append(plan, r)
		}
	}
	if len(plan) != 7 {
		t.Fatalf("%d planned of %d: %+v", len(plan), len(found), plan)
	}
	files{"10.1.0.4": "other\r\neth0", "10.1.0.5": "new\r\neth0"}.Fill(t, pool)
	check(t, os.Remove(filepath.Join(pool, "10.1.0.8")))
	undeletable := filepath.Join(pool, "10.1.0.6")
	check(t, unix.Mount(undeletable, undeletable, "", unix.MS_BIND, ""))
	t.Cleanup(func() { _ = unix.Unmount(undeletable, unix.MNT_DETACH) })
	released, err := Apply(t.Context(), pool, plan)
	if err == nil || !strings.Contains(err.Error(), undeletable) || strings.Count(err.Error(), "10.1.0.") != 1 {
		t.Errorf("error %v, want one that names %s", err, undeletable)
	}
	var gone []string
	for _, r := range released {
		gone = append(gone, r.Address.String())
	}
	if want := []string{"10.1.0.2", "10.1.0.3", "fd00::2"}; !slices.Equal(gone, want) {
		t.Errorf("released %v, want %v", gone, want)
	}
	left := files{"10.1.0.4": "other\r\neth0", "10.1.0.5": "new\r\neth0", "10.1.0.6": "c\r\neth0", "10.1.0.7": "d",
		"lock": "", "last_reserved_ip.0": "10.1.0.7"}
	wantFiles(t, pool, "left", left)
}

// TestNoPool: a pool that does not exist has no reservations, and no function creates it. If the
// pool is a file, the error names the file.
func TestNoPool(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	missing, file := filepath.Join(dir, "missing"), filepath.Join(dir, "file")
	check(t, os.WriteFile(file, []byte("a\r\neth0"), 0o600))
	for name, ask := range map[string]func(pool string) (int, error){
		"Scan":   func(pool string) (int, error) { found, err := Scan(pool); return len(found), err },
		"HeldBy": func(pool string) (int, error) { held, err := HeldBy(pool, "a", "eth0"); return len(held), err },
		"Release": func(pool string) (int, error) {
			found, err := Release(t.Context(), pool, attachment)
			return len(found), err
		},
	} {
		if n, err := ask(missing); n > 0 || err != nil {
			t.Errorf("%s of a pool that does not exist: %d, %v", name, n, err)
		}
		if n, err := ask(file); n > 0 || err == nil || !strings.Contains(err.Error(), file) {
			t.Errorf("%s of a pool that is a file: %d, %v", name, n, err)
		}
	}
	if _, given, err := OwnerOf(missing, netip.MustParseAddr("10.1.0.2")); given || err != nil {
		t.Errorf("OwnerOf in a pool that does not exist: given %t, %v", given, err)
	}
	wantFiles(t, dir, "left", files{"file": "a\r\neth0"})
}

// TestScanOfOthers: for a file that host-local cannot have written, Scan returns an error. It also
// returns the reservations in all other files.
func TestScanOfOthers(t *testing.T) {
	t.Parallel()
	pool := newPool(t, files{"10.1.0.2": strings.Repeat("x", maxOwner+1), "10.1.0.3": "a\r\neth0", "10.1.0.4": strings.Repeat("x", maxOwner)})
	found, err := Scan(pool)
	if len(found) != 2 || found[0].Owner.ContainerID != "a" || err == nil || !strings.Contains(err.Error(), filepath.Join(pool, "10.1.0.2")) {
		t.Errorf("%+v, %v", found, err)
	}
}
