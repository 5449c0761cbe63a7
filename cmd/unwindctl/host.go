package main

import (
	"errors"
	"fmt"
	"os"
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
// program once that thread executes it anew: from an open file, as its path is another file there, or none.
//
// Of what it opens, the plugin to install alone stays open in that program, and in none that this one starts.
//
//	open("/proc/1/ns/mnt"), open("/proc/1/ns/net"), open("/proc/self/exe"), open(unwind), unshare(CLONE_FS), setns, setns, execve
func enterHost() error {
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
	exe, err := open("/proc/self/exe")
	if err != nil {
		return fmt.Errorf("--host: %w", err)
	}
	env := os.Environ()
	if os.Getenv(binaryEnv) == "" {
		if binary, err := open(filepath.Join(filepath.Dir(self), plugin.Name)); err == nil {
			env = append(env, fmt.Sprintf("%s=%s%d", binaryEnv, openFiles, binary[0]))
			if _, err := unix.FcntlInt(uintptr(binary[0]), unix.F_SETFD, 0); err != nil {
				return fmt.Errorf("--host: fcntl: %w", err)
			}
		}
	}
	runtime.LockOSThread() // the namespaces are this thread's until it executes
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("--host: unshare: %w", err)
	}
	for _, fd := range theirs {
		if err := unix.Setns(fd, 0); err != nil {
			return fmt.Errorf("--host: entering the host's namespaces: %w; run it with privileged: true", err)
		}
	}
	return fmt.Errorf("--host: %w", syscall.Exec(fmt.Sprintf("%s%d", openFiles, exe[0]), os.Args, env))
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
