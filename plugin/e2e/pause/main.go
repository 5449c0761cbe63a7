// Pause is the first process of the pods and nodes of the end-to-end tests: it reaps orphans until
// it gets a signal to end.
//
// "pause node" is the first process of new mount and PID namespaces, and mounts /proc for them. On
// SIGUSR1, which a test sends to reboot a node, it moves into a new network namespace; the old one
// ends with the other processes in it. "pause kill-all" kills all other processes that it sees
// except the first, and returns when they are gone.
package main

import (
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// init keeps main on the thread that /proc shows for this process.
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

// killAll kills until no process is left: on a busy machine, a killed process keeps its cgroup, its
// sockets and its locks for some time.
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

// mountProc mounts /proc for this process's PID namespace, and keeps its mounts from propagating to
// the machine.
func mountProc() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	return unix.Mount("proc", "/proc", "proc", 0, "")
}

func newNetNS() error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return err
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
