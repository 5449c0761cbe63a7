package ipam

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"cni-unwind/ipam/ipamtest"
	"cni-unwind/plugin/plugintest/sandbox"

	"github.com/google/go-cmp/cmp"
)

type files = ipamtest.Files

var (
	attachment = Owner{"a", "eth0"}
	address2   = netip.MustParseAddr("10.1.0.2")
)

func newPool(t *testing.T, files files) string {
	t.Helper()
	pool := filepath.Join(t.TempDir(), "podnet")
	check(t, os.Mkdir(pool, 0o755))
	files.Fill(t, pool)
	return pool
}

// filesOf returns the files of a pool, in the format of ipamtest.Files.
func filesOf(t *testing.T, pool string) files {
	t.Helper()
	found := files{}
	entries, err := os.ReadDir(pool)
	check(t, err)
	for _, e := range entries {
		path := filepath.Join(pool, e.Name())
		switch {
		case e.IsDir():
			found[e.Name()] = "folder"
		case e.Type() == fs.ModeSymlink:
			target, err := os.Readlink(path)
			check(t, err)
			found[e.Name()] = "link to " + target
		case e.Type() == fs.ModeNamedPipe:
			found[e.Name()] = "pipe"
		default:
			data, err := os.ReadFile(path)
			check(t, err)
			found[e.Name()] = string(data)
		}
	}
	return found
}

func wantFiles(t *testing.T, pool, when string, want files) {
	t.Helper()
	if diff := cmp.Diff(want, filesOf(t, pool)); diff != "" {
		t.Errorf("%s (-want +got):\n%s", when, diff)
	}
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestPool: Pool returns the directory that host-local itself uses for a network. It returns "" for
// a relative dataDir, another plugin, or an invalid configuration.
func TestPool(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, plugin, config, want string }{
		{"default", "host-local", `{"ipam": {"type": "host-local"}}`, "/var/lib/cni/networks/podnet"},
		{"dataDir", "host-local", `{"ipam": {"type": "host-local", "dataDir": "/run/ipam/"}}`, "/run/ipam/podnet"},
		{"a relative dataDir", "host-local", `{"ipam": {"type": "host-local", "dataDir": "ipam"}}`, ""},
		{"no ipam", "host-local", `{}`, "/var/lib/cni/networks/podnet"},
		{"another IPAM", "static", `{"ipam": {"type": "static"}}`, ""},
		{"an ipam key that is a string", "host-local", `{"ipam": "host-local"}`, ""},
	} {
		if got := Pool(tt.plugin, json.RawMessage(tt.config), "podnet"); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

// TestOwnerOf covers each kind of file that an address may have. If a file cannot be read, OwnerOf
// returns an error instead of an empty owner.
func TestOwnerOf(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, address, content string // content is what the file 10.1.0.2 contains
		want                   Owner
		given, fails           bool
	}{
		{name: "owned", address: "10.1.0.2", content: "a\r\neth0", want: Owner{"a", "eth0"}, given: true},
		{name: "the address in another form", address: "::ffff:10.1.0.2", content: "a\r\neth0", want: Owner{"a", "eth0"}, given: true},
		{name: "spaces around the owner", address: "10.1.0.2", content: " a \r\n eth0\n", want: Owner{"a", "eth0"}, given: true},
		{name: "legacy", address: "10.1.0.2", content: "a", want: Owner{"a", ""}, given: true},
		{name: "empty", address: "10.1.0.2"},
		{name: "not allocated", address: "10.1.0.3", content: "a\r\neth0"},
		{name: "a named pipe", address: "10.1.0.2", content: "pipe", fails: true},
		{name: "a link", address: "10.1.0.2", content: "link to 10.1.0.9", fails: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			pool := newPool(t, files{"10.1.0.2": tt.content, "10.1.0.9": "z\r\neth0"})
			owner, given, err := OwnerOf(pool, netip.MustParseAddr(tt.address))
			if owner != tt.want || given != tt.given || (err != nil) != tt.fails {
				t.Errorf("%+v, given %t, %v; want %+v, given %t", owner, given, err, tt.want, tt.given)
			}
		})
	}
}

// odd contains files that are not the attachment's: files without an owner, files of other owners,
// and files that are not host-local's. Release leaves them in place, and never fails because of
// them.
var odd = files{
	"lock": "", "last_reserved_ip.0": "a\r\neth0", "last_reserved_ip.1": "a\r\neth0", "notes": "a\r\neth0",
	"10.1.0.20": "", "10.1.0.21": "folder", "10.1.0.22": "link to notes", "10.1.0.23": "link to nowhere",
	"10.1.0.4.old": "a\r\neth0", "010.1.0.4": "a\r\neth0", "::ffff:10.1.0.4": "a\r\neth0", "fd00::0004": "a\r\neth0",
	"fd00::4%eth0": "a\r\neth0",
	"sub":          "folder", "10.1.0.30": "b\r\neth0", "10.1.0.31": "a\r\neth1", "10.1.0.32": "ab\r\neth0", "10.1.0.33": "b",
}

// TestRelease: Release removes an attachment's reservations, in both formats of host-local, and
// nothing else.
func TestRelease(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		own  files
	}{
		{"none", files{}},
		{"one", files{"10.1.0.4": "a\r\neth0"}},
		{"two addresses", files{"10.1.0.4": "a\r\neth0", "10.1.0.99": "a\r\neth0"}},
		{"the legacy format", files{"10.1.0.4": "a"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			pool := newPool(t, odd)
			tt.own.Fill(t, pool)
			var want []netip.Addr
			for name := range tt.own {
				want = append(want, netip.MustParseAddr(name))
			}
			held, err := HeldBy(pool, "a", "eth0")
			slices.SortFunc(held, netip.Addr.Compare)
			slices.SortFunc(want, netip.Addr.Compare)
			if !slices.Equal(held, want) || err != nil {
				t.Errorf("held: %v, %v; want %v", held, err, want)
			}
			for range 2 {
				if _, err := Release(t.Context(), pool, attachment); err != nil {
					t.Error(err)
				}
				wantFiles(t, pool, "left", odd)
			}
		})
	}
}

// holdLock takes host-local's lock of a pool, as another process would, and returns a function that
// releases it.
func holdLock(t *testing.T, pool string) (unlock func()) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(pool, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	check(t, err)
	check(t, syscall.Flock(int(f.Fd()), syscall.LOCK_EX))
	t.Cleanup(func() { _ = f.Close() })
	return func() { _ = f.Close() }
}

// releaseBeside releases the attachment's reservations in another goroutine.
func releaseBeside(ctx context.Context, pool string) <-chan error {
	released := make(chan error, 1)
	go func() {
		_, err := Release(ctx, pool, attachment)
		released <- err
	}()
	return released
}

// TestReleaseIsBounded: while another process holds the pool's lock, Release waits until its
// context ends, and releases no address. The thread of Release remains in flock(2) until it gets
// the lock, and then releases the lock immediately.
func TestReleaseIsBounded(t *testing.T) {
	t.Parallel()
	pool := newPool(t, files{"10.1.0.2": "a\r\neth0"})
	unlock := holdLock(t, pool)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	released := releaseBeside(ctx, pool)
	select {
	case err := <-released:
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), pool) {
			t.Errorf("%v, want a deadline error that names the pool", err)
		}
	case <-time.After(sandbox.Patience):
		t.Fatal("Release still waits for the lock")
	}
	if _, given, err := OwnerOf(pool, netip.MustParseAddr("10.1.0.2")); !given || err != nil {
		t.Errorf("after a Release without the lock: given %t, %v", given, err)
	}
	sandbox.AwaitWaiters(t, 0, filepath.Join(pool, "lock"), 1, 1) // flock(2) cannot be canceled
	unlock()
	sandbox.AwaitWaiters(t, 0, filepath.Join(pool, "lock"), 0, 0)
	check(t, <-releaseBeside(t.Context(), pool))
	if _, given, err := OwnerOf(pool, netip.MustParseAddr("10.1.0.2")); given || err != nil {
		t.Errorf("after a Release with the lock: given %t, %v", given, err)
	}
}

// TestReleaseOne: Release of one address removes the address's file if the file names the
// attachment. It also removes a file that is empty or contains only the beginning of the
// attachment's name, as after a power loss. Any other file stays.
func TestReleaseOne(t *testing.T) {
	t.Parallel()
	for content, want := range map[string]bool{"a\r\neth0": true, "a": true, "a\r\neth1": false, "b\r\neth0": false,
		"": true, "\x00\x00\x00": true, "a\r": true, "a\r\neth": true, "a\r\neth\x00": true, "ab": false, "a\r\nnet": false, "a\r\neth0\x00": true} {
		pool := newPool(t, files{"10.1.0.2": content, "10.1.0.3": "a\r\neth0"})
		has, hasErr := HasFileOf(pool, attachment, address2)
		if has != want || hasErr != nil {
			t.Errorf("%q: HasFileOf %t, %v", content, has, hasErr)
		}
		released, err := Release(t.Context(), pool, attachment, address2)
		_, statErr := os.Stat(filepath.Join(pool, "10.1.0.2"))
		_, otherErr := os.Stat(filepath.Join(pool, "10.1.0.3"))
		if (len(released) == 1) != want || err != nil || os.IsNotExist(statErr) != want || otherErr != nil {
			t.Errorf("%q: released %+v, %v; %v, %v", content, released, err, statErr, otherErr)
		}
	}
}

// TestNoFile: an address without a file belongs to nobody. Release refuses an owner that lacks the
// container ID or the interface.
func TestNoFile(t *testing.T) {
	t.Parallel()
	pool := newPool(t, files{})
	if has, err := HasFileOf(pool, attachment, address2); has || err != nil {
		t.Errorf("HasFileOf without a file: %t, %v", has, err)
	}
	for _, owner := range []Owner{{"", "eth0"}, {"a", ""}} {
		if _, err := Release(t.Context(), pool, owner); err == nil {
			t.Errorf("Release accepts the owner %+v", owner)
		}
	}
}

// TestMadeAgain: if an address has been released and allocated again since the scan, its
// reservation's file is a new one, and Apply keeps that file.
func TestMadeAgain(t *testing.T) {
	t.Parallel()
	pool := newPool(t, files{"10.1.0.2": "a\r\neth0"})
	path := filepath.Join(pool, "10.1.0.2")
	info, err := os.Stat(path)
	check(t, err)
	found, err := Scan(pool)
	check(t, err)
	if !found[0].Made().Equal(info.ModTime()) {
		t.Errorf("made %s; want %s", found[0].Made(), info.ModTime())
	}
	files{"new": "a\r\neth0"}.Fill(t, pool) // the first file still exists, so the inode differs
	check(t, os.Rename(filepath.Join(pool, "new"), path))
	if released, err := Apply(t.Context(), pool, found); len(released) > 0 || err != nil {
		t.Errorf("released a reservation that was allocated again: %+v, %v", released, err)
	}
}
