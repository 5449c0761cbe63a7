package install

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/plugin/netconf"
)

// binaryEnv is the environment variable with the path of the plugin to install, if the plugin is
// not next to this program.
const binaryEnv = "UNWIND_BINARY"

// EnterHost continues this program in the host's mount and network namespaces, where the runtime
// runs, because a container cannot see whether a namespace is gone. It needs root's capabilities,
// and the host's PID namespace (hostPID: true), where it finds the namespaces of process 1.
//
// A thread can enter a mount namespace only if it shares its root and working directory with no
// other thread. So one thread enters the namespaces and executes the program again, which moves the
// whole program. It executes /proc/self/exe, because the program's path may not exist on the host.
// With inChild, a child process executes the program (see runOnHost). Of the files opened here,
// only the plugin's stays open in the new program, whose children do not inherit it. The calls
// without inChild:
//
//	open("/proc/1/ns/mnt"), open("/proc/1/ns/net"), open(unwind), fcntl(F_SETFD),
//	unshare(CLONE_FS), setns, setns, execve
func EnterHost(ctx context.Context, inChild bool) error {
	if os.Getpid() == 1 {
		return term.Usage("--host: unwindctl is process 1 of the container's own PID namespace, so " +
			"it cannot find the host's namespaces; set hostPID: true in the pod")
	}
	if same("/proc/1/ns/mnt", "/proc/self/ns/mnt") && same("/proc/1/ns/net", "/proc/self/ns/net") {
		keepOpenFile()
		return nil // this is the host, or this process has already entered it
	}
	theirs, err := open("/proc/1/ns/mnt", "/proc/1/ns/net")
	if err != nil {
		return term.Usage("--host: cannot open the host's namespaces: %w; set hostPID: true and "+
			"privileged: true in the pod", err)
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("--host: %w", err)
	}
	var binary []int
	if os.Getenv(binaryEnv) == "" {
		binary, _ = open(filepath.Join(filepath.Dir(self), netconf.Name))
	}
	if inChild {
		return runOnHost(ctx, theirs, binary)
	}
	env := os.Environ()
	if len(binary) > 0 {
		env = append(env, fmt.Sprintf("%s=%s%d", binaryEnv, openFiles, binary[0]))
		if _, err := unix.FcntlInt(uintptr(binary[0]), unix.F_SETFD, 0); err != nil {
			return fmt.Errorf("--host: fcntl: %w", err)
		}
	}
	if err := enter(theirs); err != nil {
		return err
	}
	return fmt.Errorf("--host: cannot restart unwindctl in the host's namespaces: %w",
		syscall.Exec(thisProgram, os.Args, env))
}

// thisProgram is the path of this program's file in any mount namespace.
const thisProgram = "/proc/self/exe"

// enter moves the calling thread, but no other thread of this process, into namespaces.
func enter(namespaces []int) error {
	runtime.LockOSThread() // only this thread enters the namespaces, so it must run no other goroutine
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("--host: unshare: %w", err)
	}
	for _, fd := range namespaces {
		if err := unix.Setns(fd, 0); err != nil {
			return term.Usage("--host: cannot enter the host's namespaces: %w; set privileged: true "+
				"in the pod", err)
		}
	}
	return nil
}

// runOnHost runs this program in a child on the host, and returns the child's outcome. This process
// stays in its container, because kubectl exec enters the namespaces of a container's first process
// and would not find /unwindctl on the host.
//
// When ctx ends, the child gets SIGTERM. No matter how this process ends, the child ends with it.
func runOnHost(ctx context.Context, namespaces, binary []int) error {
	cmd := exec.CommandContext(ctx, thisProgram)
	cmd.Args = os.Args
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	// In its own process group, the child does not receive a terminal's signals twice.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if len(binary) > 0 {
		cmd.ExtraFiles = []*os.File{os.NewFile(uintptr(binary[0]), netconf.Name)}
		cmd.Env = append(os.Environ(), binaryEnv+"="+openFiles+"3")
	}
	ended := make(chan error)
	// The kernel sends Pdeathsig when the thread that started the child exits. So this thread waits
	// for the child. It must not be the main thread, because other processes see the main thread's
	// namespaces as this process's.
	go func() {
		err := enter(namespaces)
		if err == nil {
			err = cmd.Run()
		}
		ended <- err
	}()
	err := <-ended
	if cmd.ProcessState == nil {
		return err
	}
	code := cmd.ProcessState.ExitCode()
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		code = 128 + int(status.Signal()) // as shells do
	}
	return term.Coded{Code: code}
}

// openFiles is the directory that contains a path for each open file of this process.
const openFiles = "/proc/self/fd/"

// keepOpenFile prevents child programs from inheriting the file that binaryEnv may name.
func keepOpenFile() {
	number, is := strings.CutPrefix(os.Getenv(binaryEnv), openFiles)
	if fd, err := strconv.Atoi(number); is && err == nil {
		unix.CloseOnExec(fd)
	}
}

// open opens files with O_CLOEXEC, so that programs that this one executes do not inherit them.
func open(paths ...string) (fds []int, err error) {
	for _, path := range paths {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, &os.PathError{Op: "open", Path: path, Err: err}
		}
		fds = append(fds, fd)
	}
	return fds, nil
}

func same(a, b string) bool {
	inA, errA := os.Stat(a)
	inB, errB := os.Stat(b)
	return errA == nil && errB == nil && os.SameFile(inA, inB)
}
