package ipam

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"cni-unwind/testdata/hostlocal"
)

var (
	attachment = Owner{"a", "eth0"}
	address2   = netip.MustParseAddr("10.1.0.2")
)

const held = "a\r\neth0\r\nheld"

// TestHold holds an address that is free, and no other, and leaves the file of another untouched.
func TestHold(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, address string
		before        files
		made          string // the file
		taken         bool
	}{
		{name: "free", address: "10.1.0.2", made: "10.1.0.2"},
		{name: "in another form", address: "::ffff:10.1.0.2", made: "10.1.0.2"},
		{name: "left by a crash", address: "10.1.0.2", before: files{"10.1.0.2": held}, made: "10.1.0.2"},
		{name: "held for another", address: "10.1.0.2", before: files{"10.1.0.2": "b\r\neth0\r\nheld"}, taken: true},
		{name: "of another", address: "10.1.0.2", before: files{"10.1.0.2": "b\r\neth0"}, taken: true},
		{name: "of the owner", address: "10.1.0.2", before: files{"10.1.0.2": "a\r\neth0"}, taken: true},
		{name: "empty", address: "10.1.0.2", before: files{"10.1.0.2": ""}, taken: true},
		{name: "a link", address: "10.1.0.2", before: files{"10.1.0.2": "link to nowhere"}, taken: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			pool := newPool(t, tt.before)
			release, err := Hold(t.Context(), pool, attachment, netip.MustParseAddr(tt.address))
			if errors.Is(err, fs.ErrExist) != tt.taken || (err != nil) != tt.taken {
				t.Fatalf("%v; want that it is taken: %t", err, tt.taken)
			}
			want := files{"lock": ""}
			for name, content := range tt.before {
				want[name] = content
			}
			if !tt.taken {
				want[tt.made] = held
			}
			wantFiles(t, pool, "held", want)
			if tt.taken {
				return
			}
			if info, err := os.Stat(filepath.Join(pool, tt.made)); err != nil || info.Mode() != 0o600 {
				t.Errorf("%v, %v; want the mode of host-local's files", info.Mode(), err)
			}
			for range 2 {
				check(t, release(t.Context()))
				delete(want, tt.made)
				wantFiles(t, pool, "released", want)
			}
		})
	}
}

// TestHoldFails: without a pool, its lock or a complete owner, nothing is made.
func TestHoldFails(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	files{"locked": "folder", "file": "", "whole": "folder"}.Fill(t, dir)
	defer holdLock(t, filepath.Join(dir, "locked"))()
	for _, tt := range []struct {
		name, pool string
		owner      Owner
		want       error // nil: any
	}{
		{"no pool", "none", attachment, fs.ErrNotExist},
		{"a file", "file", attachment, nil},
		{"locked", "locked", attachment, context.DeadlineExceeded},
		{"no container ID", "whole", Owner{"", "eth0"}, errUnnamed},
		{"no interface", "whole", Owner{"a", ""}, errUnnamed},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		release, err := Hold(ctx, filepath.Join(dir, tt.pool), tt.owner, address2)
		cancel()
		if _, releaseErr := Release(t.Context(), filepath.Join(dir, "whole"), tt.owner); errors.Is(tt.want, errUnnamed) != errors.Is(releaseErr, errUnnamed) {
			t.Errorf("%s: released: %v", tt.name, releaseErr)
		}
		if release != nil || err == nil || tt.want != nil && !errors.Is(err, tt.want) {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
	wantFiles(t, dir, "made", files{"locked": "folder", "file": "", "whole": "folder"})
	if left := filesOf(t, filepath.Join(dir, "whole")); len(left) > 0 {
		t.Errorf("made %v", left)
	}
}

// TestDropHeld removes what was held for an owner, at some addresses or at all, and nothing else.
func TestDropHeld(t *testing.T) {
	t.Parallel()
	before := files{"10.1.0.2": held, "10.1.0.3": held, "fd00::2": held, "10.1.0.4": "b\r\neth0\r\nheld", "10.1.0.5": "a\r\nnet1\r\nheld",
		"10.1.0.6": "a\r\neth0", "10.1.0.7": "", "10.1.0.8": "a\r\neth0\r\nheld\r\n!", "10.1.0.9": "a\r\nheld", "notes": held}
	for _, tt := range []struct {
		name, of string
		want     []string // removed
	}{
		{"all", "", []string{"10.1.0.2", "10.1.0.3", "fd00::2"}},
		{"one", "10.1.0.3", []string{"10.1.0.3"}},
		{"some", "10.1.0.2 fd00::2 10.1.0.99", []string{"10.1.0.2", "fd00::2"}},
		{"of others", "10.1.0.4 10.1.0.5 10.1.0.6 10.1.0.7 10.1.0.8 10.1.0.9", nil},
	} {
		pool := newPool(t, before)
		var of []netip.Addr
		for _, address := range strings.Fields(tt.of) {
			of = append(of, netip.MustParseAddr(address))
		}
		check(t, DropHeld(t.Context(), pool, attachment, of...))
		left := filesOf(t, pool)
		delete(left, "lock")
		for _, name := range tt.want {
			left[name] = held
		}
		if diff := cmp.Diff(before, left); diff != "" || len(filesOf(t, pool)) > len(before)-len(tt.want)+1 {
			t.Errorf("%s: (-want +got):\n%s", tt.name, diff)
		}
	}
	if err := DropHeld(t.Context(), filepath.Join(t.TempDir(), "none"), attachment); err != nil {
		t.Errorf("without a pool: %v", err)
	}
}

// TestHeldIsNobodys: the owner has lost a held address, so nothing takes it for the owner's, nor for
// one that a crash of host-local left.
func TestHeldIsNobodys(t *testing.T) {
	t.Parallel()
	pool := newPool(t, files{"10.1.0.2": held})
	found, err := Scan(pool)
	if len(found) != 1 || err != nil || !found[0].IsHeld() || found[0].HeldFor != attachment || found[0].Empty() || found[0].Owner != (Owner{}) {
		t.Errorf("%+v, %v", found, err)
	}
	if owner, ok, err := OwnerOf(pool, address2); ok || err != nil {
		t.Errorf("owner %v, %v", owner, err)
	}
	if has, err := HeldBy(pool, "a", "eth0"); len(has) > 0 || err != nil {
		t.Errorf("has %v, %v", has, err)
	}
	for _, of := range [][]netip.Addr{nil, {address2}} {
		if released, err := Release(t.Context(), pool, attachment, of...); len(released) > 0 || err != nil {
			t.Errorf("released: %+v, %v", released, err)
		}
	}
	wantFiles(t, pool, "left", files{"10.1.0.2": held})
}

// TestHoldFromHostLocal: while an address is held, host-local gives it to nobody, also not to one
// who asks for it; its DEL and CHECK of the owner do not find it, and its ADD of the owner gets
// another. After that, host-local gives the address out again.
func TestHoldFromHostLocal(t *testing.T) {
	t.Parallel()
	h := hostlocal.New(t, `"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.2", "rangeEnd": "10.1.0.4"`)
	must := func(verb, id string) {
		t.Helper()
		if failed := h.Run(verb, id); failed != "" {
			t.Fatalf("%s of %s: %s", verb, id, failed)
		}
	}
	must("ADD", "a")
	if _, err := Hold(t.Context(), h.Pool(), attachment, address2); !errors.Is(err, fs.ErrExist) {
		t.Fatalf("held what the owner has: %v", err)
	}
	must("DEL", "a")
	release, err := Hold(t.Context(), h.Pool(), attachment, address2)
	check(t, err)
	must("DEL", "a")
	if h.Run("CHECK", "a") == "" {
		t.Error("a CHECK of the owner passes")
	}
	must("ADD", "b")
	must("ADD", "a")
	want := files{"lock": "", "last_reserved_ip.0": "10.1.0.4", "10.1.0.2": held, "10.1.0.3": "b\r\neth0", "10.1.0.4": "a\r\neth0"}
	wantFiles(t, h.Pool(), "held", want)
	if failed := h.Run("ADD", "c"); !strings.Contains(failed, "no IP addresses available") {
		t.Errorf("ADD in a pool that is full: %q", failed)
	}
	c := h.Command("ADD", "c")
	c.Env = append(c.Env, "CNI_ARGS=IP=10.1.0.2")
	if out, err := c.Output(); err == nil || !strings.Contains(string(out), "10.1.0.2") {
		t.Errorf("ADD that asks for it: %s, %v", out, err)
	}
	check(t, release(t.Context()))
	must("ADD", "c")
	if owner, ok, err := OwnerOf(h.Pool(), address2); owner.ContainerID != "c" || !ok || err != nil {
		t.Errorf("%v, %v; want c", owner, err)
	}
}
