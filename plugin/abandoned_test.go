package plugin

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
)

// parent is a way in which a runtime starts an ADD: directly, or by shell commands in which $0 is
// the path of unwind.
type parent struct {
	name     string
	commands string
	dies     bool // whether the shell dies with the runtime
}

var parents = []parent{
	{"directly", ``, false},
	{"by a shell", `"$0"; true`, false},
	{"by a shell that dies", `"$0"; true`, true},
	{"in a PID namespace", `unshare --pid --fork --mount-proc sh -c '"$0"; true' "$0"; true`, false},
	{"by a parent that ends", `exec 3<&0; ("$0" <&3 &)`, false},
}

// startAdd starts the pod's ADD in the given way. die imitates the death of the runtime: it closes
// the pipe for the result of the ADD and, if parent.dies is set, kills the shell.
func (p *pod) startAdd(parent parent) (die func()) {
	p.Helper()
	in := p.input("ADD", p.entryOf(p.chainOf(p.plugins()...), nil))
	cmd := exec.Command(filepath.Join(p.path[0], netconf.Name))
	if parent.commands != "" {
		cmd = exec.Command("sh", "-c", parent.commands, cmd.Path)
	}
	cmd.Env = append(os.Environ(), p.env...)
	for name, value := range in.env {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	p.write(filepath.Join(p.dir, "stdin"), in.stdin)
	stdin, err := os.Open(filepath.Join(p.dir, "stdin"))
	must(p, err)
	reader, stdout, err := os.Pipe()
	must(p, err)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, stdout, p.stderr()
	must(p, cmd.Start())
	must(p, errors.Join(stdin.Close(), stdout.Close()))
	go func() { _, _ = io.Copy(io.Discard, reader) }()
	go func() { _ = cmd.Wait() }()
	p.Cleanup(func() { // the plugins' children may still run
		p.killProcesses()
		_ = reader.Close()
	})
	return func() {
		must(p, reader.Close())
		if parent.dies {
			must(p, cmd.Process.Kill())
		}
	}
}

// awaitProcessEnd waits until no process of the node's ADDs has this name.
func (n *node) awaitProcessEnd(name string) {
	n.Helper()
	eventually(n, name+" ends", func() bool { return len(n.processes(name)) == 0 })
}

// killProcesses kills the processes of the node's ADDs: all, or those with one of the names.
func (n *node) killProcesses(names ...string) {
	for _, pid := range n.processes(names...) {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

// processes returns the processes of the node's ADDs: all, or those with one of the names.
func (n *node) processes(names ...string) (pids []int) {
	n.Helper()
	all, err := facts.Processes()
	must(n, err)
	for _, pid := range all {
		environ, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		ours := bytes.Contains(environ, []byte("CNI_COMMAND=ADD")) &&
			bytes.Contains(environ, []byte("CNI_PATH="+n.path[0]))
		if ours && (len(names) == 0 || slices.Contains(names, strings.TrimSpace(string(comm)))) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// TestNobodyWaits: an ADD runs, but nobody waits for it any more: unwind was killed, the runtime
// has sent the DEL, or the runtime is dead. Whatever the plugin does, the runtime's DEL succeeds
// within 20 s and frees the address. The address stays free even if a child of the plugin outlives
// the DEL.
func TestNobodyWaits(t *testing.T) {
	plugins := oneOf(
		"a plugin without children",
		"its child is slow",
		"its child works on",
		"it leaves a daemon",
		"it hangs",
	)
	thens := oneOf("unwind is killed", "the DEL comes", "the runtime dies")
	each3(t, parents, plugins, thens, func(t *testing.T, parent parent, plugin, then choice) {
		n := newNode(t)
		n.budget("Children=3s")
		n.budget("Stop=2s")
		n.budget("Unread=1s")
		began := filepath.Join(n.dir, "began") // exists once the plugin runs
		n.chain(object(`{"type": "sub", "ipam": %s}`, n.hostLocal(n.subnet)))
		before, after, rest := 0, 0, "wait"
		switch {
		case plugin.is("a plugin without children"):
			n.chain(pooled.delay(2000))
			n.plan(p0.ADD("late"))
			began = filepath.Join(n.faultyDir(), "log")
		case plugin.is("its child is slow"):
			before = 2
		case plugin.is("its child works on"):
			after = 5
		case plugin.is("it leaves a daemon"):
			rest = "setsid sleep 600 & wait"
		case plugin.is("it hangs"):
			n.chain(pooled)
			n.plan(p0.ADD("hang-effect"))
			began = filepath.Join(n.faultyDir(), "taken", "a.eth0.p0")
		}
		hostLocal := filepath.Join(n.path[1], "host-local")
		n.script("sub", fmt.Sprintf(`[ $CNI_COMMAND = ADD ] || exec %[1]s;
			conf=$(cat); touch %[2]s;
			(sleep %[3]d; printf %%s "$conf" | %[1]s; sleep %[4]d) & %[5]s`,
			hostLocal, began, before, after, rest))
		a := n.newPod("a")
		die := a.startAdd(parent)
		n.awaitFile(began)
		switch {
		case then.is("unwind is killed"):
			n.killProcesses(netconf.Name)
			n.awaitProcessEnd(netconf.Name)
		case then.is("the runtime dies"):
			die()
			n.awaitProcessEnd(netconf.Name)
		}
		n.wantWithin(20*time.Second, a.del)
		n.wantReserved(0)
		a.wantGone()
		n.awaitProcessEnd("sub")
		n.wantReserved(0)
		n.wantClean()
	})
}

// TestHungADD: a plugin hangs in an ADD, in the ADD's rollback, or in both. The process that
// started unwind lives on, as Multus does. The runtime's DEL ends the ADD and succeeds within 20 s.
func TestHungADD(t *testing.T) {
	choices := oneOf("in ADD", "in the DEL of its rollback", "in both")
	each1(t, choices, func(t *testing.T, hangs choice) {
		n := newNode(t)
		n.budget("Stop=2s")
		n.chain(pooled, p1)
		switch {
		case hangs.is("in ADD"):
			n.plan(p1.ADD("hang-effect"))
		case hangs.is("in the DEL of its rollback"):
			n.plan(p1.ADD("fail-effect"), p1.DEL("hang once"))
		case hangs.is("in both"):
			n.plan(p1.ADD("hang-effect"), p1.DEL("hang once"))
		}
		a := n.newPod("a")
		add := a.beginAdd()
		n.awaitCall("ADD p1")
		if hangs.has("DEL") {
			n.awaitCall("DEL p1")
		}
		n.wantWithin(20*time.Second, a.del)
		n.wantError(add.wait())
		n.wantReserved(0)
		a.wantGone()
		n.wantClean()
	})
}

// TestSweepKillsNobody: a sweep runs 60 DELs in parallel workers, and kills no plugin.
func TestSweepKillsNobody(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.chain(p0.delay(50), p1.delay(50), p2.delay(50), p3.delay(50), p4.delay(50), p5.delay(50))
	all := n.crowd(10, "all")
	n.forgetCalls()
	n.plan(everyone.DEL("late"))
	for _, p := range all {
		p.dropNetNS()
	}
	n.sweep()
	n.wantRecords(0)
	n.wantClean()
	n.wantTimes(10, "DEL p0")
	n.wantTimes(10, "DEL p5")
	n.wantClean()
}
