// Package sandbox runs tests in a network and a mount namespace of their own, so that what they
// create on the "host" (bridges, rules, mounts, processes) is gone when they end, however they end.
package sandbox

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// marker tells a process of this program its role: "" for the one that was started, then "init" and
// "tests".
const marker = "UNWIND_TEST_SANDBOX"

// Run runs the tests in namespaces of their own. It starts this program again as their first
// process, which starts the tests, reaps what they leave and ends it. Run returns the exit code.
func Run(m *testing.M) int { return sandbox{}.run(m) }

// RunInMemory is Run with the tests' files in memory. Hundreds of journals that sync at once keep a
// disk busy for seconds, and then deadlines decide the outcome of a test. A killed process loses no
// more in memory than on a disk; the journal's own test covers a loss of power. Every Linux has the
// directory, so none is left behind.
func RunInMemory(m *testing.M) int { return sandbox{memory: "/dev/shm"}.run(m) }

// RunAsMachine is Run with a PID namespace too, for tests that look at process 1: on a machine it
// is in the machine's namespaces.
func RunAsMachine(m *testing.M) int { return sandbox{machine: true}.run(m) }

type sandbox struct {
	memory  string // where to mount a file system in memory, or ""
	machine bool   // a PID namespace, too
}

// Need skips a test that has no namespaces of its own: with -short, and for a user who is not root.
func Need(t testing.TB) {
	t.Helper()
	if !has() {
		t.Skip("it makes network namespaces, as root: make test")
	}
}

func has() bool { return !testing.Short() && os.Geteuid() == 0 }

func (s sandbox) run(m *testing.M) int {
	if flag.Parse(); !has() {
		return m.Run()
	}
	var err error
	var cmd *exec.Cmd
	switch os.Getenv(marker) {
	case "tests":
		return m.Run()
	case "init":
		return s.init()
	default:
		attr := &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGTERM}
		if s.machine {
			attr.Cloneflags |= syscall.CLONE_NEWPID
			attr.Pdeathsig = syscall.SIGKILL // and with their first process all others end
		}
		cmd, err = startAgain("init", attr)
	}
	if err != nil {
		return failed(err)
	}
	return reap(cmd.Process.Pid)
}

// init runs the tests, and ends when they end, or on a signal, also that of its parent's death.
func (s sandbox) init() int {
	told := make(chan os.Signal, 1)
	signal.Notify(told, unix.SIGTERM, unix.SIGINT, unix.SIGHUP)
	// A process that loses its parent becomes a child of this one, so none escapes.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return failed(err)
	}
	if err := s.prepare(); err != nil {
		return failed(err)
	}
	cmd, err := startAgain("tests", &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL})
	if err != nil {
		return failed(err)
	}
	code := make(chan int)
	go func() { code <- reap(cmd.Process.Pid) }()
	defer endChildren()
	select {
	case c := <-code:
		return c
	case <-told:
		_ = cmd.Process.Kill()
		return <-code
	}
}

// endChildren kills every child, and every child that it inherits by that.
func endChildren() {
	for {
		stats, _ := filepath.Glob("/proc/[0-9]*/stat")
		for _, path := range stats {
			var pid, parent int
			var state string
			stat, _ := os.ReadFile(path) // 7 (name) S 1 …
			_, rest, _ := strings.Cut(string(stat[strings.LastIndexByte(string(stat), ')')+1:]), " ")
			_, _ = fmt.Sscan(filepath.Base(filepath.Dir(path)), &pid)
			if _, err := fmt.Sscan(rest, &state, &parent); err == nil && parent == os.Getpid() {
				_ = unix.Kill(pid, unix.SIGKILL)
			}
		}
		for {
			if ended, err := unix.Wait4(-1, nil, unix.WNOHANG, nil); err == unix.ECHILD {
				return
			} else if ended <= 0 {
				break
			}
		}
		time.Sleep(5 * time.Millisecond)
	}
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
	runtime.LockOSThread() // Pdeathsig is bound to the thread
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

// prepare keeps mounts inside the namespace, has /proc show the processes of a PID namespace,
// mounts the directory in memory and brings the loopback up.
func (s sandbox) prepare() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("mount --make-rprivate /: %w", err)
	}
	if s.machine {
		if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
			return fmt.Errorf("mount /proc: %w", err)
		}
	}
	if s.machine { // neither tests nor sweeps see what the machine's own plugins and libcni keep
		const dir = "/var/lib/cni"
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755"); err != nil {
			return fmt.Errorf("mount %s: %w", dir, err)
		}
	}
	if memory := s.memory; memory != "" {
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
