package e2e

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// diskPattern is the prefix of the names of the nodes' disk directories and cgroups.
const diskPattern = "unwind-node-"

// newDisk creates the directory of a node's disk, and locks it. The lock is released when the
// returned file is closed or this process ends.
func newDisk(t testing.TB) (dir string, lock *os.File) {
	t.Helper()
	clearDisks(t)
	dir, err := os.MkdirTemp("", diskPattern)
	if err != nil {
		t.Fatal(err)
	}
	lock, err = os.Open(dir)
	if err == nil {
		err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir, lock
}

// clearDisks removes the disks and the cgroups of nodes whose test process was killed. It skips an
// empty directory, because a test may have just created it, and not locked it yet.
func clearDisks(t testing.TB) {
	t.Helper()
	dirs, _ := filepath.Glob(filepath.Join(os.TempDir(), diskPattern+"*"))
	for _, dir := range dirs {
		f, err := os.Open(dir)
		if err != nil {
			continue // the directory no longer exists
		}
		names, _ := f.Readdirnames(1)
		if len(names) > 0 && unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			t.Logf("removing %s, left by a test that was killed", dir)
			removeAllCgroups(t, dir)
			if err := os.RemoveAll(dir); err != nil {
				t.Log(err)
			}
		}
		_ = f.Close()
	}
}

// removeAllCgroups removes the node's own cgroup. It also removes the cgroups in /k8s.io, which
// containerd creates for containers to which the kubelet gives no cgroup (containerd
// pkg/oci/spec.go populateDefaultUnixSpec). The caller must first end all processes in them.
func removeAllCgroups(t testing.TB, disk string) {
	removeCgroups(t, "/"+filepath.Base(disk))
	containers, _ := filepath.Glob(filepath.Join(disk, "containerd/io.containerd.grpc.v1.cri/*/*"))
	for _, dir := range containers {
		removeCgroups(t, "/k8s.io/"+filepath.Base(dir))
	}
	for _, pattern := range []string{"/sys/fs/cgroup/k8s.io", "/sys/fs/cgroup/*/k8s.io"} {
		tops, _ := filepath.Glob(pattern)
		for _, top := range tops {
			_ = os.Remove(top) // fails if other programs have containers in it
		}
	}
}

// removeCgroups removes a cgroup and its descendants from all hierarchies, innermost first. The
// caller must first end all processes in them.
func removeCgroups(t testing.TB, name string) {
	for _, pattern := range []string{"/sys/fs/cgroup" + name, "/sys/fs/cgroup/*" + name} {
		tops, _ := filepath.Glob(pattern)
		for _, top := range tops {
			var dirs []string
			_ = filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
				if err == nil && d.IsDir() {
					dirs = append(dirs, path)
				}
				return nil
			})
			slices.Reverse(dirs)
			for _, dir := range dirs {
				if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
					t.Log(err)
				}
			}
		}
	}
}

// EmptyDisk removes everything in a directory of the disk, such as "containerd".
func (n *Node) EmptyDisk(name string) {
	n.Helper()
	entries, err := os.ReadDir(filepath.Join(n.Dir, name))
	for _, e := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join(n.Dir, name, e.Name())))
	}
	if err != nil {
		n.Fatal(err)
	}
}
