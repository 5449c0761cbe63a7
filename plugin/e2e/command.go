package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// commandTimeout bounds a command on a node; DELs and sweeps are slow while plugins fail. It is
// longer than kubectl's --timeout, so that kubectl can report what it waits for.
const commandTimeout = 150 * time.Second

// File returns the path of a node's file as seen from outside the node.
func (n *Node) File(path ...string) string {
	return filepath.Join(append([]string{n.Root}, path...)...)
}

// Write writes a whole file of the node, so that a runtime that watches its directory never sees
// half of it.
func (n *Node) Write(path, text string) {
	n.Helper()
	dir, name := filepath.Split(n.File(path))
	temp := filepath.Join(dir, "."+name+".new")
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(temp, []byte(text), 0o644), os.Rename(temp, filepath.Join(dir, name))); err != nil {
		n.Fatal(err)
	}
}

// listen creates a socket on the node, and replaces an existing one. Close doesn't remove its path,
// because Close would look for it outside the node.
func (n *Node) listen(socket string) (listener *net.UnixListener) {
	n.Helper()
	n.do(func() (err error) {
		_ = os.Remove(socket)
		listener, err = net.ListenUnix("unix", &net.UnixAddr{Name: socket})
		return err
	})
	listener.SetUnlinkOnClose(false)
	return listener
}

// Start starts a program on the node.
func (n *Node) Start(cmd *exec.Cmd) error {
	cmd.Env = append(os.Environ(), cmd.Env...)
	return n.try(cmd.Start)
}

// Try runs a program on the node and returns what it prints.
func (n *Node) Try(name string, args ...string) (stdout, stderr string, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), commandTimeout)
	defer cancel()
	var out, errs strings.Builder
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err = n.Start(cmd); err == nil {
		err = cmd.Wait()
	}
	return out.String(), errs.String(), err
}

// Run runs a program on the node, and fails the test if it fails.
func (n *Node) Run(name string, args ...string) string {
	n.Helper()
	stdout, stderr, err := n.Try(name, args...)
	if err != nil {
		n.Fatalf("%s %s: %v\n%s%s", filepath.Base(name), strings.Join(args, " "), err, stdout, stderr)
	}
	return stdout
}

// Unwindctl runs the operator's program on the node.
func (n *Node) Unwindctl(args ...string) string {
	n.Helper()
	return n.Run(Path(n, "bin/unwindctl"), args...)
}

// KillPlugins kills all plugins that run on the node, unwind before its delegates.
func (n *Node) KillPlugins() {
	n.Helper()
	for _, program := range []string{"unwind", "*"} {
		for _, pid := range n.processes(program) {
			if err := unix.Kill(pid, unix.SIGKILL); err != nil && err != unix.ESRCH {
				n.Fatal(err)
			}
		}
	}
}

// processes returns the PIDs, as seen from outside the node, of the node's processes whose program
// is a plugin that matches the pattern.
func (n *Node) processes(pattern string) (pids []int) {
	n.Helper()
	node, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", n.first.Pid))
	if err != nil {
		n.Fatal(err)
	}
	exes, _ := filepath.Glob("/proc/[0-9]*/exe")
	for _, exe := range exes {
		dir := filepath.Dir(exe)
		if ns, err := os.Readlink(filepath.Join(dir, "ns/pid")); err != nil || ns != node {
			continue
		}
		program, err := os.Readlink(exe)
		if err != nil {
			continue // the process has ended
		}
		if ok, _ := filepath.Match(pattern, filepath.Base(program)); !ok {
			continue
		}
		if _, err := os.Lstat(n.File(PluginDir, filepath.Base(program))); err != nil {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil {
			n.Fatal(err)
		}
		pids = append(pids, pid)
	}
	return pids
}
