// Package sandbox runs the tests of a package in mount, PID and network namespaces of their own.
// However the tests end, everything that they created on their host (bridges, rules, mounts,
// processes) disappears with the namespaces. The tests don't see the machine's containers, network
// namespaces or installed unwind. Just after a boot, they also run in a time namespace (see
// LongUp).
package sandbox

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// marker is the environment variable with the role of a process of this program. It is empty in the
// process that go test starts, "init" in the first process of the namespaces, and "tests" in the
// process that runs the tests.
const marker = "UNWIND_TEST_SANDBOX"

// Need skips the test if there is no sandbox: with -short, or if the user is not root.
func Need(t testing.TB) {
	t.Helper()
	name, _, _ := strings.Cut(t.Name(), "/")
	if _, marked := concurrent.Load(name); !has() || testing.Short() && !marked {
		t.Skip("this test creates network namespaces, as root: make test")
	}
}

// Concurrent is like Need, for a test in which several goroutines of one process work in parallel.
// The process may be this one or the plugin under test. With the race detector, such a test also
// runs with -short. In the other tests that need a sandbox, the race detector can find nothing.
func Concurrent(t *testing.T) {
	t.Helper()
	if Raced {
		concurrent.Store(t.Name(), true)
	}
	Need(t)
}

// SkipRaced skips the test if the race detector is on. It is for a test that is a long computation
// in one goroutine. With the race detector, the computation would take ten times as long, and it
// cannot have a race.
func SkipRaced(t *testing.T) {
	t.Helper()
	if Raced {
		t.Skip("a long computation in one goroutine: make test")
	}
}

// concurrent contains the names of the tests that called Concurrent.
var concurrent sync.Map

func has() bool { return (!testing.Short() || Raced) && os.Geteuid() == 0 }

// Run runs the tests in namespaces of their own, and returns their exit code. It starts this
// program again as the first process of the PID namespace. That process starts the tests and reaps
// orphaned processes. When it ends, the kernel kills all other processes of the namespace.
func Run(m *testing.M) int { return run(m, "") }

// RunInMemory is like Run, but with the tests' temporary files in memory. On a disk, hundreds of
// journals that sync at the same time would keep it busy for seconds, and tests would exceed their
// deadlines. Files in memory survive a SIGKILL, as files on a disk do. TestPowerLoss of package
// journal covers a power loss.
func RunInMemory(m *testing.M) int { return run(m, "/dev/shm") }

// run implements Run and RunInMemory. memory is the path of a file system in memory for temporary
// files, or "" for the disk.
func run(m *testing.M, memory string) int {
	flag.Parse()
	if !has() {
		return m.Run()
	}
	switch os.Getenv(marker) {
	case "tests":
		return m.Run()
	case "init":
		return first(memory)
	}
	if youngMachine() {
		runtime.LockOSThread()
		if err := LongUp(); err != nil {
			return failed(fmt.Errorf("a machine that has not been up for %v: %w", OldEnough, err))
		}
	}
	cmd, err := startAgain("init", &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL,
	})
	if err != nil {
		return failed(err)
	}
	return reap(cmd.Process.Pid)
}

// first is the first process of the namespaces: it prepares them and starts the tests.
func first(memory string) int {
	if err := prepare(memory); err != nil {
		return failed(err)
	}
	cmd, err := startAgain("tests", &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL})
	if err != nil {
		return failed(err)
	}
	return reap(cmd.Process.Pid)
}

func failed(err error) int {
	fmt.Fprintln(os.Stderr, "sandbox (these tests make namespaces and must be run as root):", err)
	return 1
}

// startAgain starts this program with the same arguments in another role.
func startAgain(as string, attr *syscall.SysProcAttr) (*exec.Cmd, error) {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), marker+"="+as)
	cmd.SysProcAttr = attr
	runtime.LockOSThread() // the kernel sends Pdeathsig when this thread ends
	return cmd, cmd.Start()
}

// reap reaps children until the process pid has ended, and returns the exit code of that process.
func reap(pid int) int {
	for {
		var status unix.WaitStatus
		ended, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case err == unix.EINTR:
		case err != nil:
			fmt.Fprintln(os.Stderr, "sandbox:", err)
			return 1
		case ended == pid && status.Signaled():
			return 128 + int(status.Signal())
		case ended == pid:
			return status.ExitStatus()
		}
	}
}

// prepare sets up the mounts and brings up the loopback interface.
func prepare(memory string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("mount --make-rprivate /: %w", err)
	}
	if err := unix.Unmount("/proc", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount /proc: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	if err := dropNamespaces(); err != nil {
		return err
	}
	if err := makeMountPoint("/var/lib/cni"); err != nil { // for host-local's pools
		return err
	}
	for _, dir := range []string{memory, "/run", "/var/lib/cni", "/etc/cni", "/opt/cni"} {
		if _, err := os.Stat(dir); err != nil {
			continue
		}
		if err := mountTmpfs(dir); err != nil {
			return err
		}
	}
	if memory != "" {
		if err := os.Setenv("TMPDIR", memory); err != nil {
			return err
		}
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(lo)
}

func mountTmpfs(dir string) error {
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777"); err != nil {
		return fmt.Errorf("mount %s: %w", dir, err)
	}
	return nil
}

// makeMountPoint makes sure that a directory exists in this mount namespace, without creating it on
// the machine: if it is missing, makeMountPoint mounts a tmpfs over its parent, and bind-mounts the
// parent's entries there.
func makeMountPoint(dir string) error {
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	parent := filepath.Dir(dir)
	machines, err := os.Open(parent)
	if err != nil {
		return err
	}
	defer machines.Close()
	entries, err := machines.ReadDir(-1)
	if err != nil {
		return err
	}
	if err := mountTmpfs(parent); err != nil {
		return err
	}
	for _, entry := range entries {
		from := fmt.Sprintf("/proc/self/fd/%d/%s", machines.Fd(), entry.Name())
		if err := lend(from, filepath.Join(parent, entry.Name()), entry.Type()); err != nil {
			return fmt.Errorf("%s: %w", filepath.Join(parent, entry.Name()), err)
		}
	}
	return os.Mkdir(dir, 0o755)
}

// lend bind-mounts a directory or file of the machine at another path, but copies a symbolic link.
func lend(from, to string, kind fs.FileMode) error {
	var err error
	switch kind {
	case fs.ModeSymlink:
		target, err := os.Readlink(from)
		return errors.Join(err, os.Symlink(target, to))
	case fs.ModeDir:
		err = os.Mkdir(to, 0o755)
	default:
		err = os.WriteFile(to, nil, 0o600)
	}
	return errors.Join(err, unix.Mount(from, to, "", unix.MS_BIND|unix.MS_REC, ""))
}

// dropNamespaces unmounts the network namespaces of the machine's containers. It ignores errors: a
// mount that another mount covers cannot be unmounted, but the tests cannot reach it either.
func dropNamespaces() error {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(mounts)) {
		// 36 35 0:4 net:[4026532281] /run/netns/blue rw shared:1 - nsfs nsfs rw
		if f := strings.Fields(line); strings.Contains(line, " - nsfs ") {
			_ = unix.Unmount(f[4], unix.MNT_DETACH)
		}
	}
	return nil
}
