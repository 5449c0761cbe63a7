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

// commandTimeout bounds a command on a node. It allows for DELs and sweeps that are slow because
// plugins fail. It exceeds kubectl's --timeout, so that kubectl can report what it is waiting for.
const commandTimeout = 150 * time.Second

// File returns the path at which a file of the node is visible outside the node.
func (n *Node) File(path ...string) string {
	return filepath.Join(append([]string{n.Root}, path...)...)
}

// Write writes a file of the node atomically: a runtime that watches the directory never reads a
// half-written file.
func (n *Node) Write(path, text string) {
	n.Helper()
	dir, name := filepath.Split(n.File(path))
	temp := filepath.Join(dir, "."+name+".new")
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(temp, []byte(text), 0o644), os.Rename(temp, filepath.Join(dir, name))); err != nil {
		n.Fatal(err)
	}
}

// listen creates a socket on the node, and replaces an existing one. Closing the listener does not
// remove the socket's file: Close runs outside the node, and would remove the file at the same path
// on the machine.
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

// Try runs a program on the node and returns its output.
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

// Run runs a program on the node, and fails the test if the program fails.
func (n *Node) Run(name string, args ...string) string {
	n.Helper()
	stdout, stderr, err := n.Try(name, args...)
	if err != nil {
		n.Fatalf("%s %s: %v\n%s%s", filepath.Base(name), strings.Join(args, " "), err, stdout, stderr)
	}
	return stdout
}

// Unwindctl runs unwindctl on the node, and fails the test if unwindctl fails.
func (n *Node) Unwindctl(args ...string) string {
	n.Helper()
	return n.Run(Path(n, "bin/unwindctl"), args...)
}

// KillPlugins kills all plugins that run on the node: first unwind, then the plugins of its chain.
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

// processes returns the PIDs, as the test sees them, of the plugins that run on the node and whose
// names match the pattern.
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
