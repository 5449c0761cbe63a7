package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/nodetest"
	"cni-unwind/plugin/plugintest/sandbox"
)

// container imitates a DaemonSet's container with hostPID: it has the host's PID namespace, and its
// file system contains only unwindctl, unwind and /proc.
type container struct {
	place
	root string
}

// newContainer creates a container with the programs under test. Its file system is not visible on
// the host.
func (n *machine) newContainer(flags ...string) container {
	n.Helper()
	root := filepath.Join(n.dir, "root")
	check(n, os.Mkdir(root, 0o755))
	setup := fmt.Sprintf(`cd %s && mount -t tmpfs root . && cd . && cd %[1]s && mkdir proc && mount --rbind /proc proc &&
		for f in unwindctl unwind; do touch $f && mount --bind %s/$f $f || exit 1; done`, root, n.bin)
	return container{n.newPlace(flags, flags, setup), root}
}

// command returns a command that runs unwindctl in the container.
func (c container) command(n *machine, args ...string) *exec.Cmd {
	return c.place.command(n, "chroot", append([]string{c.root, "/unwindctl"}, args...)...)
}

// TestHost: with --host, commands read and change the host's files, and use the host's namespaces.
func TestHost(t *testing.T) {
	t.Parallel()
	n := newAgentMachine(t)
	n.netns("live")
	n.add(home, "live", n.pin("live"))
	n.addDead("dead")
	for _, plugin := range []string{"bridge", "portmap"} { // the plugins of the provider's chain
		n.Write(filepath.Join(n.BinDir(), plugin), nodetest.FakePlugin)
	}
	c := n.newContainer("--mount", "--net")
	for _, args := range [][]string{
		{"list", "--state-dir", n.state},
		{"install", "--conf-dir", n.ConfDir(), "--cni-bin-dir", n.BinDir(), "--state-dir", n.state},
	} {
		if out := n.run(c.command(n, args...)); out.says("podnet") || n.Installed() != "" {
			t.Fatalf("%v without --host is no test: %+v", args, out)
		}
	}

	if out := n.must(c.command(n, "--host", "list", "--state-dir", n.state)); !strings.Contains(out, "dead") {
		t.Errorf("list: %s", out)
	}
	out := n.must(c.command(n, "--host", "install", "--conf-dir", n.ConfDir(), "--cni-bin-dir", n.BinDir(), "--state-dir", n.state))
	want, err := os.ReadFile(filepath.Join(n.bin, netconf.Name))
	got, gotErr := os.ReadFile(filepath.Join(n.BinDir(), netconf.Name))
	if err != nil || gotErr != nil || !bytes.Equal(got, want) || n.Installed() != nodetest.First {
		t.Errorf("install: the plugin has %d bytes of %d (%v), the conflist is %q\n%s", len(got), len(want), gotErr, n.Installed(), out)
	}
	n.plan(map[string]string{"DEL": "fail"})
	if out := n.run(c.command(n, "--host", "sweep", "--state-dir", n.state)); out.code != 1 || out.results()["dead"][0] != "pending" {
		t.Errorf("a sweep that leaves something: %+v", out)
	}
	n.plan(nil)
	if out := n.run(c.command(n, "--host", "sweep", "--state-dir", n.state)); out.code != 0 || fmt.Sprint(n.ids()) != "[live]" {
		t.Errorf("sweep: %+v; the journal has %v", out, n.ids())
	}
	if out := n.run(c.command(n, "--host", "sweep", "--state-dir", n.state, "--valid-attachments", "/none")); out.code != 2 {
		t.Errorf("a usage error: %+v", out)
	}
	flags := []string{"--net"}
	other := n.newPlace(flags, flags, "true")
	if out := n.sweep(other, network+"/live/eth0"); out.code != 1 {
		t.Errorf("from another network namespace: %+v", out)
	}
	if out := n.sweep(other, "--host", network+"/live/eth0"); out.code != 0 || out.results()["live"][0] != "kept" {
		t.Errorf("from another network namespace, with --host: %+v", out)
	}
	if out := n.must(n.unwindctl("--host", "list", "--state-dir", n.state)); !strings.Contains(out, "live") {
		t.Errorf("on the host: %s", out)
	}
}

// TestHostRun: with --host, the process of `unwindctl run` stays in the container, so that kubectl
// exec can start more programs there. Its child is the agent, which runs on the host. After a
// signal, the agent ends as soon as its running DEL has ended.
func TestHostRun(t *testing.T) {
	t.Parallel()
	n := newAgentMachine(t)
	n.addDead("a")
	n.plan(map[string]string{"DEL": "hold"})
	c := n.newContainer("--mount")
	r := n.startOnHost(c)
	held := filepath.Join(n.dir, "held", "DEL.a.p")
	eventually(t, "a DEL under way", func() bool { return durable.Exists(held) })
	pid := r.cmd.Process.Pid
	if !sameFile(fmt.Sprintf("/proc/%d/ns/mnt", pid), fmt.Sprintf("/proc/%d/ns/mnt", c.pid)) {
		t.Error("the first process has left the container")
	}
	inside := place{pid: pid, enter: []string{"--mount"}} // as kubectl exec enters a container
	if out := n.must(inside.command(n, "chroot", c.root, "/unwindctl", "--host", "list", "--state-dir", n.state)); !strings.Contains(out, "podnet") {
		t.Errorf("a command beside the agent: %s", out)
	}
	n.descriptors(n.child(pid))
	if code := r.signal(syscall.SIGTERM, 300*time.Millisecond); code != -2 {
		t.Errorf("it ended with code %d while the DEL was under way", code)
	}
	n.Remove(held)
	if code := r.wait(sandbox.Patience); code != 0 || len(n.ids()) > 0 {
		t.Errorf("exit code %d; the journal has %v\n%s", code, n.ids(), r.log())
	}
}

// TestHostRunEnds: the agent on the host and the process in the container end together, with the
// same exit code.
func TestHostRunEnds(t *testing.T) {
	t.Parallel()
	n := newAgentMachine(t)
	c := n.newContainer("--mount")
	r := n.startOnHost(c)
	child := n.child(r.cmd.Process.Pid)
	t.Cleanup(func() {
		if t.Failed() {
			_ = syscall.Kill(child, syscall.SIGKILL)
		}
	})
	r.signal(syscall.SIGKILL, sandbox.Patience)
	eventually(t, "the agent ends with the container", func() bool { return !durable.Exists(fmt.Sprintf("/proc/%d/exe", child)) })

	r = n.startOnHost(c)
	check(t, syscall.Kill(n.child(r.cmd.Process.Pid), syscall.SIGKILL))
	if code := r.wait(sandbox.Patience); code != 128+9 {
		t.Errorf("the agent was killed: the program in the container has the exit code %d", code)
	}
	out := n.run(c.command(n, "--host", "run", "--interval", "1ms"))
	if out.code != 2 || strings.Count(out.stderr, "error:") != 1 {
		t.Errorf("a usage error: %+v", out)
	}
}

// startOnHost starts the agent in a container, and returns once the agent has installed unwind on
// the host.
func (n *machine) startOnHost(c container) *running {
	n.Helper()
	r := n.start(c.command(n, "--host", "run", "--conf-dir", n.ConfDir(), "--cni-bin-dir", n.BinDir(), "--state-dir", n.state,
		"--cri", "none", "--interval", "1s", "--listen", ""))
	n.await(nodetest.First)
	return r
}

// child waits until a process has a child that is the agent, and returns the child's ID. It ignores
// a child that Go starts only to test pidfds.
func (n *machine) child(pid int) int {
	n.Helper()
	var children []string
	eventually(n, "a child", func() bool {
		lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
		for _, list := range lists {
			data, _ := os.ReadFile(list)
			for _, child := range strings.Fields(string(data)) {
				environ, _ := os.ReadFile("/proc/" + child + "/environ")
				if strings.Contains("\x00"+string(environ), "\x00UNWIND_BINARY=") {
					children = append(children, child)
				}
			}
		}
		return len(children) > 0
	})
	child, err := strconv.Atoi(children[0])
	if err != nil || len(children) > 1 {
		n.Fatalf("children: %v (%v)", children, err)
	}
	return child
}

// descriptors checks that a process has a descriptor for the plugin that it installs, but none for
// a mount namespace. Descriptors for the plugin and for network namespaces must be close-on-exec.
func (n *machine) descriptors(pid int) {
	n.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	files, err := os.ReadDir(dir)
	check(n, err)
	plugins := 0
	for _, f := range files {
		link, _ := os.Readlink(filepath.Join(dir, f.Name()))
		info, _ := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%s", pid, f.Name()))
		_, flags, _ := strings.Cut(string(info), "flags:\t")
		mode, _, _ := strings.Cut(flags, "\n")
		bits, _ := strconv.ParseInt(mode, 8, 64)
		if strings.HasPrefix(link, "mnt:") || strings.HasPrefix(link, "net:") && bits&syscall.O_CLOEXEC == 0 {
			n.Errorf("it has %s open", link)
		}
		if strings.HasSuffix(link, "/unwind") {
			plugins++
			if bits&syscall.O_CLOEXEC == 0 {
				n.Errorf("it passes %s on", link)
			}
		}
	}
	if plugins == 0 {
		n.Error("it does not have the plugin open")
	}
}

func sameFile(a, b string) bool {
	inA, errA := os.Stat(a)
	inB, errB := os.Stat(b)
	return errA == nil && errB == nil && os.SameFile(inA, inB)
}

// TestInContainer: in a container that has neither a conflist nor a journal, commands fail for that
// reason. They print nothing about the node, which may have both.
func TestInContainer(t *testing.T) {
	t.Parallel()
	n := newMachine(t)
	c := n.newContainer("--mount", "--net")
	for _, args := range []string{"list", "sweep", "sweep --dry-run --cri auto", "ipam", "ipam --json", "history"} {
		out := n.run(c.command(n, strings.Fields(args)...))
		if out.code != 1 || out.stdout != "" || !strings.Contains(out.stderr, "error: this container has neither a conflist in "+
			"/etc/cni/net.d nor a journal in /var/lib/cni/unwind, so it does not show the state of the node\nhint: run this on the node") {
			t.Errorf("%s: %+v", args, out)
		}
	}
	if out := n.run(c.command(n, "list", "--state-dir", "/")); out.code != 0 {
		t.Errorf("a directory that is given: %+v", out)
	}
}
