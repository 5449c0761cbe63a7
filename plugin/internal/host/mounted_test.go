package host

import (
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cni-unwind/testdata/sandbox"
)

// TestCovered: the interfaces of network namespaces are seen whose mounts are below others, in mount
// trees that are shared with other mount namespaces and in private ones. The mounts stay as they are.
func TestCovered(t *testing.T) {
	sandbox.Need(t) // not parallel: no other test mounts anything meanwhile
	for name, kind := range map[string]uintptr{"shared": unix.MS_SHARED, "private": unix.MS_PRIVATE} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			mount := func(source, target, fstype string, flags uintptr) {
				t.Helper()
				if err := unix.Mount(source, target, fstype, flags, ""); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = unix.Unmount(target, unix.MNT_DETACH) })
			}
			mount("tmpfs", dir, "tmpfs", 0)
			mount("", dir, "", kind)
			deep := filepath.Join(dir, "netns", "deep")
			if err := os.MkdirAll(deep, 0o700); err != nil {
				t.Fatal(err)
			}
			netns := func(path string, host int) {
				t.Helper()
				if err := os.WriteFile(path, nil, 0o600); err != nil {
					t.Fatal(err)
				}
				out, err := exec.Command("unshare", "--net="+path, "ip", "address", "add", fmt.Sprintf("127.7.0.%d/32", host), "dev", "lo").CombinedOutput()
				if err != nil {
					t.Fatalf("%v: %s", err, out)
				}
				t.Cleanup(func() { _ = unix.Unmount(path, unix.MNT_DETACH) })
			}
			netns(filepath.Join(dir, "netns", "a"), 1)
			netns(filepath.Join(dir, "netns", "b"), 2)
			netns(filepath.Join(dir, "netns", "d"), 4)
			mount("/dev/null", filepath.Join(dir, "netns", "d"), "", unix.MS_BIND) // its path itself
			mount(filepath.Join(dir, "netns"), filepath.Join(dir, "netns"), "", unix.MS_BIND)
			netns(filepath.Join(dir, "netns", "c"), 3) // goes with the cover of a and b
			mount("tmpfs", filepath.Join(dir, "netns"), "tmpfs", 0)
			mount("tmpfs", filepath.Join(dir, "netns"), "tmpfs", 0) // at the same path again
			mount("tmpfs", dir, "tmpfs", 0)                         // further up
			before := mountsAt(t, dir)
			var seen []string
			all, err := (&View{}).All(slog.Default())
			for _, i := range all {
				for _, a := range i.Addresses {
					if netip.MustParsePrefix("127.7.0.0/24").Contains(a) {
						seen = append(seen, a.String())
					}
				}
			}
			slices.Sort(seen)
			if want := []string{"127.7.0.1", "127.7.0.2", "127.7.0.3", "127.7.0.4"}; !slices.Equal(seen, want) || err != nil {
				t.Errorf("saw %q (%v), want %q", seen, err, want)
			}
			if after := mountsAt(t, dir); !slices.Equal(after, before) {
				t.Errorf("the mounts were\n%s\nand are\n%s", strings.Join(before, "\n"), strings.Join(after, "\n"))
			}
		})
	}
}

// mountsAt returns the lines of the mounts below a directory.
func mountsAt(t *testing.T, dir string) []string {
	t.Helper()
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(strings.Split(string(data), "\n"), func(line string) bool { return !strings.Contains(line, dir) })
}
