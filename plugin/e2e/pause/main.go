// Pause is the first process of each pod and each node in the end-to-end tests. It reaps orphans
// until it receives SIGTERM or SIGINT.
//
// "pause node" is the first process of a node. It mounts /proc for the node's mount and PID
// namespaces. On SIGUSR1, which a test sends to reboot the node, it moves into a new network
// namespace. "pause kill-all" kills all processes in its PID namespace except the first and
// itself, and returns once they have ended.
package main

import (
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// init keeps main on the main thread, whose namespaces /proc/PID/ns shows.
func init() { runtime.LockOSThread() }

func main() {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "kill-all":
			exitOn(killAll())
			return
		case "node":
			exitOn(mountProc())
		}
	}
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, unix.SIGTERM, unix.SIGINT, unix.SIGCHLD, unix.SIGUSR1)
	fmt.Println("ready")
	for s := range signals {
		switch s {
		case unix.SIGCHLD:
			reap()
		case unix.SIGUSR1:
			exitOn(newNetNS())
		default:
			return
		}
	}
}

// killAll kills all processes except the first and itself, and waits until they have ended: on a
// busy machine, a killed process keeps its cgroup, its sockets and its locks for some time.
func killAll() error {
	for {
		err := unix.Kill(-1, unix.SIGKILL)
		if err == unix.ESRCH { // kill(2): no other process
			return nil
		}
		if err != nil {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// mountProc mounts /proc for this process's PID namespace. It first makes all mounts private, so
// that none propagates to the machine.
func mountProc() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	return unix.Mount("proc", "/proc", "proc", 0, "")
}

// newNetNS moves all threads of this process into a new network namespace, because the old
// namespace exists as long as any thread is in it.
func newNetNS() error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return err
	}
	created, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return err
	}
	defer created.Close()
	_, _, errno := syscall.AllThreadsSyscall(unix.SYS_SETNS, created.Fd(), unix.CLONE_NEWNET, 0)
	if errno != 0 {
		return errno
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return err
	}
	_, err = fmt.Println("ready")
	return err
}

func reap() {
	for {
		pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
		if pid <= 0 && err != unix.EINTR {
			return
		}
	}
}

func exitOn(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "pause:", err)
		os.Exit(1)
	}
}
