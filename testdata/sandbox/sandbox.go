// Package sandbox gives tests a network and a mount namespace of their own, so that what they make on the "host" (bridges,
// rules, mounts) is gone when they end, however they end.
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

// marker is set in the environment of the process that runs in the namespaces.
const marker = "UNWIND_TEST_SANDBOX"

// Run runs the tests in namespaces of their own: this program is started again in them. It returns the exit code.
func Run(m *testing.M) int {
	if os.Getenv(marker) == "" {
		return enter()
	}
	if err := prepare(); err != nil {
		fmt.Fprintln(os.Stderr, "sandbox:", err)
		return 1
	}
	return m.Run()
}

func enter() int {
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "these tests make network namespaces: run them as root")
		return 1
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), marker+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL,
	}
	runtime.LockOSThread() // Pdeathsig goes by the thread
	if err := cmd.Run(); cmd.ProcessState == nil {
		fmt.Fprintln(os.Stderr, "sandbox:", err)
		return 1
	}
	return cmd.ProcessState.ExitCode()
}

// prepare keeps our mounts to ourselves, shows the /sys of our network and brings the loopback up.
func prepare() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("mount --make-rprivate /: %w", err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(lo)
}
