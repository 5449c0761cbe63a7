package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Node is a machine: namespaces of its own, held by a first process that reaps, and a disk that outlives a reboot.
//
//	/run                            a tmpfs
//	/etc, /opt, /var/lib, /var/log  those of the machine below, and what the node writes above
//	/opt/cni/bin                    links to the reference plugins, faulty and unwind
//	/var/lib/cni, containerd, …     folders on the disk
type Node struct {
	testing.TB
	Dir string // the disk; outside of it as inside
	// Root is the node's file system as others see it, for files and sockets.
	Root string

	first *os.Process   // its first process
	said  *bufio.Reader // its standard output
	work  chan func()   // to be run on the node's thread
	boots int
}

// commandTimeout bounds a command on a node; DELs and sweeps take their time while plugins fail.
const commandTimeout = 2 * time.Minute

// The folders of CNI on a node.
const (
	ConfDir   = "/etc/cni/net.d"
	PluginDir = "/opt/cni/bin"
)

// dataDirs are on the disk itself: an overlay is no place for a container's overlay, and has other inodes.
var dataDirs = []string{"cni", "containerd", "containers", "kubelet", "etcd"}

// NewNode makes a node that ends with the test.
func NewNode(t testing.TB) *Node {
	t.Helper()
	dir, err := os.MkdirTemp("", "unwind-e2e-")
	if err != nil {
		t.Fatal(err)
	}
	n := &Node{TB: t, Dir: dir, work: make(chan func())}
	if err := os.Mkdir(n.faultyDir(), 0o755); err != nil {
		t.Fatal(err)
	}
	program := tool(t, "bin/pause")
	ready := make(chan error)
	go n.thread(program, ready)
	t.Cleanup(n.close)
	if err := <-ready; err != nil {
		t.Fatalf("a node (which takes root): %v", err)
	}
	n.do(n.boot)
	n.installPlugins()
	return n
}

// thread starts the first process and works in its namespaces until there is no more work. The thread ends with it, and with
// the thread the first process (PDEATHSIG goes by the thread), and with that all processes and mounts of the node.
func (n *Node) thread(program string, ready chan<- error) {
	runtime.LockOSThread() // and never unlocked: no one else gets a thread that is elsewhere
	if err := n.start(program); err != nil {
		ready <- err
		return
	}
	ready <- n.enter(n.first.Pid, "mnt", "net", "pid")
	for f := range n.work {
		f()
	}
}

func (n *Node) start(program string) error {
	cmd := exec.Command(program, "node")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID, Pdeathsig: syscall.SIGKILL,
	}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return err
	}
	n.first, n.said = cmd.Process, bufio.NewReader(out)
	n.Root = fmt.Sprintf("/proc/%d/root", n.first.Pid)
	return n.isReady()
}

// isReady waits for the word of the first process.
func (n *Node) isReady() error {
	_, err := n.said.ReadString('\n')
	return err
}

// enter moves the calling thread into namespaces of a process, which is 1 where the node is seen from inside.
func (n *Node) enter(pid int, names ...string) error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil { // setns(2): a mount namespace takes a thread that shares no folder
		return err
	}
	var files []*os.File
	for _, name := range names {
		f, err := os.Open(fmt.Sprintf("/proc/%d/ns/%s", pid, name))
		if err != nil {
			return err
		}
		defer f.Close()
		files = append(files, f)
	}
	for _, f := range files {
		if err := unix.Setns(int(f.Fd()), 0); err != nil {
			return fmt.Errorf("setns %s: %w", f.Name(), err)
		}
	}
	return nil
}

// do runs a function on the node's thread: what it opens, and what it starts, is the node's.
func (n *Node) do(f func() error) {
	n.Helper()
	if err := n.try(f); err != nil {
		n.Fatal(err)
	}
}

func (n *Node) try(f func() error) error {
	done := make(chan error)
	n.work <- func() { done <- f() }
	return <-done
}

// boot mounts what a machine has after its start; the first process has begun with /proc. It runs once in the life of the mount namespace.
func (n *Node) boot() error {
	steps := []struct {
		source, target, fstype string
		flags                  uintptr
	}{
		{"tmpfs", n.Dir + "/above", "tmpfs", 0},
		{"tmpfs", "/run", "tmpfs", 0},
	}
	for _, s := range steps {
		if err := errors.Join(os.MkdirAll(s.target, 0o755), mount(s.source, s.target, s.fstype, s.flags, "")); err != nil {
			return err
		}
	}
	for _, dir := range []string{"/etc", "/opt", "/var/lib", "/var/log"} {
		if err := n.overlay(dir); err != nil {
			return err
		}
	}
	for _, name := range dataDirs {
		disk, target := filepath.Join(n.Dir, name), "/var/lib/"+name
		if err := errors.Join(os.MkdirAll(disk, 0o755), os.RemoveAll(target), os.MkdirAll(target, 0o755),
			mount(disk, target, "", unix.MS_BIND, "")); err != nil {
			return err
		}
	}
	if err := errors.Join(os.RemoveAll("/etc/cni"), os.RemoveAll("/opt/cni"),
		os.MkdirAll(ConfDir, 0o755), os.MkdirAll(PluginDir, 0o755)); err != nil {
		return err
	}
	return n.network()
}

// network has the node forward packets, as the machines of Kubernetes do.
func (n *Node) network() error {
	lo, err := netlink.LinkByName("lo")
	return errors.Join(err, netlink.LinkSetUp(lo),
		os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0),
		os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0))
}

// overlay puts a layer of the node's own over a folder of the machine.
func (n *Node) overlay(dir string) error {
	base := filepath.Join(n.Dir, "above", strings.ReplaceAll(dir, "/", "_"))
	upper, work := base+".upper", base+".work"
	return errors.Join(os.MkdirAll(upper, 0o755), os.MkdirAll(work, 0o755),
		mount("overlay", dir, "overlay", 0, fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", dir, upper, work)))
}

func mount(source, target, fstype string, flags uintptr, options string) error {
	if err := unix.Mount(source, target, fstype, flags, options); err != nil {
		return fmt.Errorf("mount %s: %w", target, err)
	}
	return nil
}

// installPlugins links the plugins to where runtimes look for them, so that a test can take one away.
func (n *Node) installPlugins() {
	n.Helper()
	plugins, err := filepath.Glob(filepath.Join(Path(n, ".tools/cni"), "[a-z]*"))
	if err != nil || len(plugins) == 0 {
		n.Fatalf("no reference plugins: %v", err)
	}
	for _, p := range append(plugins, tool(n, "bin/faulty"), Path(n, "bin/unwind")) {
		if err := os.Symlink(p, n.File(PluginDir, filepath.Base(p))); err != nil {
			n.Fatal(err)
		}
	}
}

// Reboot is a loss of power and a start: all processes end, /run and the kernel's network are empty, the disk is as it was, and
// the boot has another ID.
func (n *Node) Reboot() {
	n.Helper()
	n.Run(tool(n, "bin/pause"), "kill-all")
	n.do(n.unmountAll)
	if err := errors.Join(n.first.Signal(unix.SIGUSR1), n.isReady()); err != nil {
		n.Fatal(err)
	}
	n.boots++
	n.do(func() error {
		id := filepath.Join(n.Dir, fmt.Sprintf("boot_id.%d", n.boots))
		text := fmt.Sprintf("00000000-0000-4000-8000-%012d\n", n.boots)
		return errors.Join(n.enter(1, "net"), n.network(), os.WriteFile(id, []byte(text), 0o444),
			mount(id, "/proc/sys/kernel/random/boot_id", "", unix.MS_BIND, ""))
	})
}

// EmptyDisk removes all that is in a folder of the disk, such as "containerd".
func (n *Node) EmptyDisk(name string) {
	n.Helper()
	entries, err := os.ReadDir(filepath.Join(n.Dir, name))
	for _, e := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join(n.Dir, name, e.Name())))
	}
	if err != nil {
		n.Fatal(err)
	}
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

// processes returns the processes of the node, by their numbers here, that run a plugin.
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
			continue // it has ended
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

// unmountAll lets go of what runtimes mounted, and empties /run.
func (n *Node) unmountAll() error {
	mounts, err := os.ReadFile("/proc/1/mounts")
	if err != nil {
		return err
	}
	lines := strings.Split(strings.TrimSpace(string(mounts)), "\n")
	slices.Reverse(lines)
	for _, line := range lines {
		at := strings.Fields(line)[1]
		if strings.HasPrefix(at, "/run/") || strings.Count(at, "/") > 3 && strings.HasPrefix(at, "/var/lib/") {
			_ = unix.Unmount(at, unix.MNT_DETACH) // one below another may be gone with it
		}
	}
	entries, err := os.ReadDir("/run")
	for _, e := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join("/run", e.Name())))
	}
	return err
}

// close ends all of the node, and removes its disk and its cgroups.
func (n *Node) close() {
	close(n.work)
	if n.first != nil {
		_ = n.first.Kill()
		_, _ = n.first.Wait()
	}
	n.removeCgroups()
	if err := os.RemoveAll(n.Dir); err != nil {
		n.Error(err)
	}
}

// Cgroup is where the node's pods are.
func (n *Node) Cgroup() string { return "/" + filepath.Base(n.Dir) }

// removeCgroups removes those of the node's pods in all hierarchies, innermost first.
func (n *Node) removeCgroups() {
	for _, pattern := range []string{"/sys/fs/cgroup" + n.Cgroup(), "/sys/fs/cgroup/*" + n.Cgroup()} {
		tops, _ := filepath.Glob(pattern)
		for _, top := range tops {
			var dirs []string
			_ = filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
				if err == nil && d.IsDir() {
					dirs = append(dirs, path)
				}
				return nil
			})
			slices.Reverse(dirs)
			for _, dir := range dirs {
				if err := os.Remove(dir); err != nil {
					n.Log(err)
				}
			}
		}
	}
}

// File returns how others reach a file of the node.
func (n *Node) File(path ...string) string {
	return filepath.Join(append([]string{n.Root}, path...)...)
}

// Write writes a file of the node, as a whole: a runtime that watches its folder never sees half of it.
func (n *Node) Write(path, text string) {
	n.Helper()
	dir, name := filepath.Split(n.File(path))
	temp := filepath.Join(dir, "."+name+".new")
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(temp, []byte(text), 0o644), os.Rename(temp, filepath.Join(dir, name))); err != nil {
		n.Fatal(err)
	}
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
