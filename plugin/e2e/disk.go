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

// diskPattern is the prefix of the names of nodes' disk directories and of their pods' cgroups.
const diskPattern = "unwind-node-"

// newDisk creates the directory of a node's disk. The returned file holds a lock on it as long as
// this process lives.
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

// clearDisks removes the disks of killed tests, which leave nothing else of their nodes. It skips
// an empty directory, because a test that has just created it may not have locked it yet.
func clearDisks(t testing.TB) {
	t.Helper()
	dirs, _ := filepath.Glob(filepath.Join(os.TempDir(), diskPattern+"*"))
	for _, dir := range dirs {
		f, err := os.Open(dir)
		if err != nil {
			continue // it no longer exists
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

// removeAllCgroups removes the cgroups of a node that has ended: its own, and those that containerd
// created next to it for containers for which the kubelet names no cgroup (containerd
// pkg/oci/spec.go populateDefaultUnixSpec).
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

// removeCgroups removes a cgroup and its children from all hierarchies, innermost first. They have
// no processes any more.
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
