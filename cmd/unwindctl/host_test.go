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

	"cni-unwind/plugin"
)

// container is a place as a DaemonSet's container has it: the host's PID namespace, and a file system with nothing but the two
// programs and /proc (and what the programs of the tests are linked with).
type container struct {
	place
	root string
}

// newContainer makes a container. Its programs are those of the tests. Nothing of it is seen on the host.
func (n *node) newContainer(flags ...string) container {
	n.Helper()
	self, err := os.Executable()
	root := filepath.Join(n.dir, "root")
	if err == nil {
		err = os.Mkdir(root, 0o755)
	}
	if err != nil {
		n.Fatal(err)
	}
	setup := fmt.Sprintf(`cd %s && mount -t tmpfs root . && cd . && cd %[1]s && mkdir proc && mount --rbind /proc proc &&
		for f in unwindctl unwind; do touch $f && mount --bind %s $f || exit 1; done &&
		for d in /lib /lib64 /usr/lib; do if [ -d $d ]; then mkdir -p .$d && mount --rbind $d .$d || exit 1; fi; done`, root, self)
	return container{n.newPlace(flags, flags, setup), root}
}

// command runs unwindctl there.
func (c container) command(n *node, args ...string) *exec.Cmd {
	return c.place.command(n, "chroot", append([]string{c.root, "/unwindctl"}, args...)...)
}

// TestHost: with --host, what a command does it does on the host, and sees what the runtime sees.
func TestHost(t *testing.T) {
	t.Parallel()
	n := newAgentNode(t)
	n.netns("live")
	n.add(home, "live", n.pin("live"))
	n.addDead("dead")
	c := n.newContainer("--mount", "--net")
	for _, args := range [][]string{
		{"list", "--state-dir", n.state},
		{"install", "--conf-dir", n.confDir(), "--bin-dir", n.binDir(), "--state-dir", n.state},
	} {
		if out := n.run(c.command(n, args...)); out.says("podnet") || n.installed() != "" {
			t.Fatalf("%v without --host is no test: %+v", args, out)
		}
	}

	if out := n.must(c.command(n, "--host", "list", "--state-dir", n.state)); !strings.Contains(out, "dead") {
		t.Errorf("list: %s", out)
	}
	out := n.must(c.command(n, "--host", "install", "--conf-dir", n.confDir(), "--bin-dir", n.binDir(), "--state-dir", n.state))
	self, _ := os.Executable()
	want, err := os.ReadFile(self)
	got, gotErr := os.ReadFile(filepath.Join(n.binDir(), plugin.Name))
	if err != nil || gotErr != nil || !bytes.Equal(got, want) || n.installed() != first {
		t.Errorf("install: the plugin has %d bytes of %d (%v), the conflist is %q\n%s", len(got), len(want), gotErr, n.installed(), out)
	}
	n.plan(map[string]string{"DEL": "fail"})
	if out := n.run(c.command(n, "--host", "sweep", "--state-dir", n.state)); out.code != 1 || out.results()["dead"][0] != "pending" {
		t.Errorf("a sweep that leaves something: %+v", out)
	}
	n.plan(nil)
	if out := n.run(c.command(n, "--host", "sweep", "--state-dir", n.state)); out.code != 0 || fmt.Sprint(n.ids()) != "[live]" {
		t.Errorf("sweep: %+v; the journal has %v", out, n.ids())
	}
	if out := n.run(c.command(n, "--host", "sweep", "--state-dir", n.state, "--valid", "/none")); out.code != 2 {
		t.Errorf("a usage error: %+v", out)
	}
	flags := []string{"--net"}
	other := n.newPlace(flags, flags, "true")
	if out := n.sweep(other, network+"/live/eth0"); out.code != 1 {
		t.Errorf("from another network namespace: %+v", out)
	}
	if out := n.sweep(other, "--host", network+"/live/eth0"); out.code != 0 || out.results()["live"][0] != "live" {
		t.Errorf("from another network namespace, with --host: %+v", out)
	}
	if out := n.must(home.command(n, filepath.Join(n.bin, "unwindctl"), "--host", "list", "--state-dir", n.state)); !strings.Contains(out, "live") {
		t.Errorf("on the host: %s", out)
	}
}

// TestHostRun: the agent in a container with the host's network. The process that was started stays in the container, where
// kubectl exec finds the programs then; its child is the agent, keeps what it opens to itself, and ends as it is told to.
func TestHostRun(t *testing.T) {
	t.Parallel()
	n := newAgentNode(t)
	n.addDead("a")
	n.plan(map[string]string{"DEL": "hold"})
	c := n.newContainer("--mount")
	r := n.startOnHost(c)
	held := filepath.Join(n.dir, "held", "DEL.a.p")
	eventually(t, "a DEL under way", func() bool { return exists(held) })
	pid := r.cmd.Process.Pid
	if !same(fmt.Sprintf("/proc/%d/ns/mnt", pid), fmt.Sprintf("/proc/%d/ns/mnt", c.pid)) {
		t.Error("the first process has left the container")
	}
	if out := n.must(n.execIn(pid, c.root, "/unwindctl", "--host", "list", "--state-dir", n.state)); !strings.Contains(out, "podnet") {
		t.Errorf("a command beside the agent: %s", out)
	}
	n.descriptors(n.child(pid))
	if code := r.signal(syscall.SIGTERM, 300*time.Millisecond); code != -2 {
		t.Errorf("it ended with code %d while the DEL was under way", code)
	}
	n.remove(held)
	select {
	case <-r.ended:
	case <-time.After(30 * time.Second):
		t.Fatal("it does not end")
	}
	if code := r.cmd.ProcessState.ExitCode(); code != 0 || len(n.ids()) > 0 {
		t.Errorf("exit code %d; the journal has %v\n%s", code, n.ids(), r.log())
	}
}

// TestHostRunEnds: the agent on the host and the process in the container end together, with the same code.
func TestHostRunEnds(t *testing.T) {
	t.Parallel()
	n := newAgentNode(t)
	c := n.newContainer("--mount")
	r := n.startOnHost(c)
	child := n.child(r.cmd.Process.Pid)
	t.Cleanup(func() {
		if t.Failed() {
			_ = syscall.Kill(child, syscall.SIGKILL)
		}
	})
	r.signal(syscall.SIGKILL, 10*time.Second)
	eventually(t, "the agent ends with the container", func() bool { return !exists(fmt.Sprintf("/proc/%d/exe", child)) })

	r = n.startOnHost(c)
	if err := syscall.Kill(n.child(r.cmd.Process.Pid), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-r.ended
	if code := r.cmd.ProcessState.ExitCode(); code != 128+9 {
		t.Errorf("the agent was killed: exit code %d", code)
	}
	out := n.run(c.command(n, "--host", "run", "--interval", "1ms"))
	if out.code != exitUsage || strings.Count(out.stderr, "error:") != 1 {
		t.Errorf("a usage error: %+v", out)
	}
}

// startOnHost starts the agent in a container, and returns when it has installed unwind on the host.
func (n *node) startOnHost(c container) *running {
	n.Helper()
	r := n.start(c.command(n, "--host", "run", "--conf-dir", n.confDir(), "--bin-dir", n.binDir(), "--state-dir", n.state,
		"--cri", "none", "--interval", "1s", "--listen", ""))
	n.await(first)
	return r
}

// execIn is a command in the mount namespace of a process, as kubectl exec starts one in that of a container's first process.
func (n *node) execIn(pid int, root string, args ...string) *exec.Cmd {
	return place{pid, []string{"--mount"}}.command(n, "chroot", append([]string{root}, args...)...)
}

// child returns the process that another has started.
func (n *node) child(pid int) int {
	n.Helper()
	var children []string
	eventually(n, "a child", func() bool {
		lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
		for _, list := range lists {
			data, _ := os.ReadFile(list)
			children = append(children, strings.Fields(string(data))...)
		}
		return len(children) > 0
	})
	child, err := strconv.Atoi(children[0])
	if err != nil || len(children) > 1 {
		n.Fatalf("children: %v (%v)", children, err)
	}
	return child
}

// descriptors sees that a process has the plugin to install open, and no namespace, and that it passes nothing of that on.
func (n *node) descriptors(pid int) {
	n.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	files, err := os.ReadDir(dir)
	if err != nil {
		n.Fatal(err)
	}
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

// TestHostErrors: what --host lacks is said, and nothing is done.
func TestHostErrors(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	unwindctl := filepath.Join(n.bin, "unwindctl")
	there := n.newPlace([]string{"--mount", "--net"}, []string{"--mount", "--net"}, "true")
	for _, c := range []struct {
		name string
		cmd  *exec.Cmd
		want string
	}{
		{"the container's own PID namespace",
			home.command(n, "unshare", "--mount", "--pid", "--net", "--fork", "--mount-proc", unwindctl, "--host", "list", "--state-dir", n.state),
			"error: --host: this is the first process of its own PID namespace; run it with hostPID: true\n"},
		{"no privileges",
			there.command(n, "setpriv", "--inh-caps=-all", "--bounding-set=-all", unwindctl, "--host", "list", "--state-dir", n.state),
			"error: --host: the host's namespaces: open /proc/1/ns/mnt: permission denied; run it with hostPID: true and privileged: true\n"},
		{"not all privileges",
			there.command(n, "setpriv", "--inh-caps=-sys_admin", "--bounding-set=-sys_admin", unwindctl, "--host", "list", "--state-dir", n.state),
			"error: --host: entering the host's namespaces: operation not permitted; run it with privileged: true\n"},
	} {
		out := n.run(c.cmd)
		if out.code != 1 || !strings.HasPrefix(out.stderr, c.want) || out.stdout != "" {
			t.Errorf("%s: exit code %d, %s%s", c.name, out.code, out.stdout, out.stderr)
		}
	}
}
