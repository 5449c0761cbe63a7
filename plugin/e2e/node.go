package e2e

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cni-unwind/plugin/plugintest/sandbox"
)

// Node simulates a machine. It has its own namespaces, whose first process reaps orphans, and a
// disk, which survives a reboot. These are its directories:
//
//	/run                            a tmpfs
//	/etc, /opt, /usr/local/bin, …   an overlay of the node's files over the machine's
//	/opt/cni/bin                    links to the reference plugins, faulty and unwind
//	/var/lib/cni, containerd, …     directories on the disk
type Node struct {
	testing.TB
	Dir string // the disk's directory; the path is the same inside and outside the node
	// Root is the path of the node's root directory from outside the node.
	Root string

	lock  *os.File      // locks the disk: see newDisk
	first *os.Process   // the node's first process
	said  *bufio.Reader // the output of the first process
	work  chan func()   // functions for the node's thread
	boots int
	pool  string // the directory with host-local's files

	netName string
}

// The CNI directories of a node.
const (
	ConfDir   = "/etc/cni/net.d"
	PluginDir = "/opt/cni/bin"
)

// dataDirs are directories in /var/lib that the node bind-mounts from its disk, over the overlay.
// On an overlay, a container's own overlay cannot be created, and files have other inode numbers
// than on the disk.
var dataDirs = []string{"cni", "containerd", "containers", "kubelet", "etcd"}

// NewNode creates a node that ends with the test.
func NewNode(t testing.TB) *Node {
	t.Helper()
	return newNode(t, func() error { return nil })
}

// NewLongUpNode creates a node that has been up for more than an hour: see sandbox.LongUp.
func NewLongUpNode(t testing.TB) *Node {
	t.Helper()
	return newNode(t, sandbox.LongUp)
}

// newNode creates a node. The node's thread runs prepare before everything else.
func newNode(t testing.TB, prepare func() error) *Node {
	t.Helper()
	dir, lock := newDisk(t)
	n := &Node{TB: t, Dir: dir, lock: lock, work: make(chan func()), pool: Network{}.pool(), netName: NetworkName}
	if err := os.Mkdir(n.faultyDir(), 0o755); err != nil {
		t.Fatal(err)
	}
	program := tool(t, "bin/pause")
	ready := make(chan error)
	go n.thread(prepare, program, ready)
	t.Cleanup(n.close)
	if err := <-ready; err != nil {
		t.Fatalf("a node (which takes root): %v", err)
	}
	n.do(n.boot)
	n.installPlugins()
	return n
}

// thread starts the node's first process. Then it runs the functions from n.work in that process's
// namespaces until n.work is closed. When the thread ends, the kernel kills the first process
// (PDEATHSIG), and so also ends all other processes and all mounts of the node.
func (n *Node) thread(prepare func() error, program string, ready chan<- error) {
	// This goroutine never unlocks its thread, because no other goroutine may run in the namespaces.
	runtime.LockOSThread()
	err := prepare()
	if err == nil {
		err = n.start(program)
	}
	if err != nil {
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

// isReady waits until the first process reports that it is ready.
func (n *Node) isReady() error {
	_, err := n.said.ReadString('\n')
	return err
}

// enter moves the calling thread into the named namespaces of a process. It looks pid up in /proc:
// in the node's mount namespace, PID 1 is the node's first process.
func (n *Node) enter(pid int, names ...string) error {
	// setns(2): a thread that enters a mount namespace must not share its fs attributes with other
	// threads.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
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

// do runs a function on the node's thread, so that the function opens the node's files and starts
// processes on the node.
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

// boot mounts the file systems of a booted machine, except /proc, which the first process mounts. A
// node calls boot only once, because its mount namespace survives a reboot.
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
	for _, dir := range []string{"/etc", "/opt", "/usr/local/bin", "/var/lib", "/var/log"} {
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

// network sets up the loopback interface, and makes the node forward packets, as Kubernetes nodes
// do.
func (n *Node) network() error {
	lo, err := netlink.LinkByName("lo")
	return errors.Join(err, netlink.LinkSetUp(lo),
		os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0),
		os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0))
}

// overlay mounts the node's own layer over a directory of the machine.
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

// installPlugins creates links in PluginDir to the plugins, so that a test can remove a plugin from
// the node.
func (n *Node) installPlugins() {
	n.Helper()
	for _, p := range []string{tool(n, "bin/faulty"), Path(n, "bin/unwind")} {
		n.link(p)
	}
	n.UpgradePlugins()
}

// UpgradePlugins installs the current reference plugins, which `make tools` builds.
func (n *Node) UpgradePlugins() {
	n.Helper()
	n.usePlugins(Path(n, ".tools/cni"))
}

// DowngradePlugins installs the previous release of the reference plugins.
func (n *Node) DowngradePlugins() {
	n.Helper()
	n.usePlugins(tool(n, "plugins-before"))
}

func (n *Node) usePlugins(dir string) {
	n.Helper()
	plugins, err := filepath.Glob(filepath.Join(dir, "[a-z]*"))
	if err != nil || len(plugins) == 0 {
		n.Fatalf("no reference plugins: %v", err)
	}
	for _, p := range plugins {
		n.link(p)
	}
}

// link creates a link in PluginDir to a plugin, and replaces an existing link.
func (n *Node) link(plugin string) {
	n.Helper()
	to := n.File(PluginDir, filepath.Base(plugin))
	if err := errors.Join(os.RemoveAll(to), os.Symlink(plugin, to)); err != nil {
		n.Fatal(err)
	}
}

// Reboot simulates a power loss and a boot. It kills all processes except the node's first, empties
// /run, creates a new network namespace and changes the boot ID. The disk keeps its contents.
func (n *Node) Reboot() {
	n.Helper()
	n.Run(tool(n, "bin/pause"), "kill-all")
	n.do(n.unmountAll)
	if err := errors.Join(n.first.Signal(unix.SIGUSR1), n.isReady()); err != nil {
		n.Fatal(err)
	}
	n.boots++
	removeAllCgroups(n, n.Dir)
	n.do(func() error {
		id := filepath.Join(n.Dir, fmt.Sprintf("boot_id.%d", n.boots))
		text := fmt.Sprintf("00000000-0000-4000-8000-%012d\n", n.boots)
		return errors.Join(n.enter(1, "net"), n.network(), os.WriteFile(id, []byte(text), 0o444),
			mount(id, "/proc/sys/kernel/random/boot_id", "", unix.MS_BIND, ""))
	})
}

// EmptyRun unmounts the runtimes' file systems and empties /run, without a reboot.
func (n *Node) EmptyRun() {
	n.Helper()
	n.do(n.unmountAll)
}

// unmountAll unmounts the runtimes' file systems and empties /run.
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
			_ = unix.Unmount(at, unix.MNT_DETACH) // fails if the mount disappeared together with its parent
		}
	}
	entries, err := os.ReadDir("/run")
	for _, e := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join("/run", e.Name())))
	}
	return err
}

// close ends the node, and removes its disk and its cgroups.
func (n *Node) close() {
	close(n.work)
	if n.first != nil {
		_ = n.first.Kill()
		_, _ = n.first.Wait()
	}
	removeAllCgroups(n, n.Dir)
	_ = n.lock.Close()
	if err := os.RemoveAll(n.Dir); err != nil {
		n.Error(err)
	}
}

// Cgroup returns the cgroup of the node's pods.
func (n *Node) Cgroup() string { return "/" + filepath.Base(n.Dir) }
