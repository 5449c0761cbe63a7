// Package sandbox gives tests a network, a mount and a PID namespace of their own, so that what they make on the "host" (bridges,
// rules, mounts, processes) is gone when they end, however they end.
package sandbox

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// marker tells a process of this program which one it is: "" the one that was started, then "init" and "tests".
const marker = "UNWIND_TEST_SANDBOX"

// Run runs the tests in namespaces of their own: this program is started again as their first process, which starts the
// tests and reaps what they leave. It returns the exit code.
func Run(m *testing.M) int { return run(m, "") }

// RunInMemory is Run, with the tests' files in memory. Hundreds of journals that sync at once keep a disk busy for seconds,
// and then deadlines decide what a test sees. A process that is killed loses no more there than on a disk; what a loss of
// power leaves is for the journal's own test.
func RunInMemory(m *testing.M) int { return run(m, "/dev/shm") }

// run takes the folder to mount a file system in memory at, or "". It is one that every Linux has, so none is left behind.
func run(m *testing.M, memory string) int {
	var err error
	var cmd *exec.Cmd
	switch os.Getenv(marker) {
	case "tests":
		return m.Run()
	case "init":
		if err = prepare(memory); err == nil {
			cmd, err = startAgain("tests", &syscall.SysProcAttr{})
		}
	default:
		cmd, err = startAgain("init", &syscall.SysProcAttr{
			Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID, Pdeathsig: syscall.SIGKILL,
		})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "sandbox (these tests make namespaces and must be run as root):", err)
		return 1
	}
	return reap(cmd.Process.Pid)
}

// startAgain starts this program with the same arguments as another of its processes.
func startAgain(as string, attr *syscall.SysProcAttr) (*exec.Cmd, error) {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), marker+"="+as)
	cmd.SysProcAttr = attr
	runtime.LockOSThread() // Pdeathsig goes by the thread
	return cmd, cmd.Start()
}

// reap waits for every child until the given one has ended, and returns its exit code.
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

// prepare keeps our mounts to ourselves, shows our processes in /proc, mounts the folder in memory and brings the loopback up.
func prepare(memory string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("mount --make-rprivate /: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	if memory != "" {
		if err := unix.Mount("tmpfs", memory, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777"); err != nil {
			return fmt.Errorf("mount %s: %w", memory, err)
		}
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
