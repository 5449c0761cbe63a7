package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"cni-unwind/plugin"
)

// binaryEnv names the file of the plugin that install puts in place, where it is not beside this program.
const binaryEnv = "UNWIND_BINARY"

// enterHost has this program go on in the host's mount and network namespaces, where the runtime runs: from a container
// nothing can be told of what is gone. It needs the host's PID namespace (hostPID: true), whose first process is in those
// namespaces, and root's capabilities.
//
// A mount namespace can be entered by a thread that shares its root and working folder with no other, and counts for the whole
// program once that thread executes it anew: by /proc/self/exe, as its path is another file there, or none. What is to stay is
// executed in a child (see stay).
//
// Of what it opens, the plugin to install alone stays open in that program, and in none that this one starts.
//
//	open("/proc/1/ns/mnt"), open("/proc/1/ns/net"), open(unwind), unshare(CLONE_FS), setns, setns, execve
func enterHost(ctx context.Context, stays bool) error {
	if os.Getpid() == 1 {
		return errors.New("--host: this is the first process of its own PID namespace; run it with hostPID: true")
	}
	if same("/proc/1/ns/mnt", "/proc/self/ns/mnt") && same("/proc/1/ns/net", "/proc/self/ns/net") {
		return keepOpenFile() // this is the host, or it was entered already
	}
	theirs, err := open("/proc/1/ns/mnt", "/proc/1/ns/net")
	if err != nil {
		return fmt.Errorf("--host: the host's namespaces: %w; run it with hostPID: true and privileged: true", err)
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("--host: %w", err)
	}
	var binary []int
	if os.Getenv(binaryEnv) == "" {
		binary, _ = open(filepath.Join(filepath.Dir(self), plugin.Name))
	}
	if stays {
		return stay(ctx, theirs, binary)
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
	return fmt.Errorf("--host: %w", syscall.Exec(thisProgram, os.Args, env))
}

// thisProgram is this program's file, in whatever mount namespace.
const thisProgram = "/proc/self/exe"

// enter moves the calling thread, and nothing else of this process, into namespaces.
func enter(namespaces []int) error {
	runtime.LockOSThread() // the namespaces are this thread's, and it must serve no other goroutine
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("--host: unshare: %w", err)
	}
	for _, fd := range namespaces {
		if err := unix.Setns(fd, 0); err != nil {
			return fmt.Errorf("--host: entering the host's namespaces: %w; run it with privileged: true", err)
		}
	}
	return nil
}

// stay runs this program in a child on the host, and returns how that ended. This process stays in its container: kubectl exec
// enters the namespaces of a container's first process, and where that has left for the host, /unwindctl is not there.
//
// The end of ctx is passed on as SIGTERM. However this process ends, the child ends with it.
func stay(ctx context.Context, namespaces, binary []int) error {
	cmd := exec.CommandContext(ctx, thisProgram)
	cmd.Args = os.Args
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	// In a process group of its own, it does not get a terminal's signals a second time.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if len(binary) > 0 {
		cmd.ExtraFiles = []*os.File{os.NewFile(uintptr(binary[0]), plugin.Name)}
		cmd.Env = append(os.Environ(), binaryEnv+"="+openFiles+"3")
	}
	ended := make(chan error)
	go func() { // Pdeathsig goes by the thread that starts the child; the main thread's namespaces are the process's, for others
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
	return wentOn{cmd.ProcessState}
}

// wentOn is the error of a program that went on in a child, which has said all.
type wentOn struct{ *os.ProcessState }

func (wentOn) Error() string { return "" }

// ExitCode is the child's, or a shell's for one that a signal has ended.
func (w wentOn) ExitCode() int {
	if status, ok := w.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return 128 + int(status.Signal())
	}
	return w.ProcessState.ExitCode()
}

// openFiles has a path for each file that this process has open.
const openFiles = "/proc/self/fd/"

// keepOpenFile keeps the open file that binaryEnv names, if it does, out of the programs that this one starts.
func keepOpenFile() error {
	number, is := strings.CutPrefix(os.Getenv(binaryEnv), openFiles)
	if fd, err := strconv.Atoi(number); is && err == nil {
		unix.CloseOnExec(fd)
	}
	return nil
}

// open opens files that are closed in the program that this one executes.
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
