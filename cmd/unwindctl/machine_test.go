package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/journal"
	"cni-unwind/journal/journaltest"
	"cni-unwind/plugin/plugintest/nodetest"
	"cni-unwind/plugin/plugintest/sandbox"
)

// check fails the test immediately if the error is not nil.
var check = nodetest.Check

// machine is a node in a directory of its own, which contains the state directory, host-local's
// pools, and the mounts of network namespaces.
type machine struct {
	testing.TB
	*nodetest.Dirs // the runtime's directories; nil if the test needs none
	dir            string
	bin            string // the directory of unwindctl and unwind
	tools          string
	state          string
	chain          string // the plugins, as JSON objects separated by commas
	store          *journal.Store
}

// network is the name of every node's network.
const network = "podnet"

func newMachine(t *testing.T) *machine {
	t.Helper()
	sandbox.Need(t)
	n := newMachineAt(t, t.TempDir(), programs(t))
	t.Cleanup(func() { unmountAll(filepath.Join(n.dir, "netns")) })
	return n
}

// newMachineAt returns a machine in an existing directory.
func newMachineAt(t testing.TB, dir, programs string) *machine {
	t.Helper()
	tools, err := filepath.Abs("../../.tools")
	check(t, err)
	state := filepath.Join(dir, "state")
	return &machine{TB: t, dir: dir, bin: programs, tools: tools, state: state, store: &journal.Store{Dir: state},
		chain: fmt.Sprintf(`{"type": "faulty", "dir": %q, "instance": "p"}`, dir)}
}

// pin returns the path at which a container's network namespace is mounted.
func (n *machine) pin(id string) string { return filepath.Join(n.dir, "netns", id) }

// netns creates network namespaces that only a mount keeps alive.
func (n *machine) netns(ids ...string) {
	n.Helper()
	for _, id := range ids {
		check(n, errors.Join(os.MkdirAll(filepath.Dir(n.pin(id)), 0o755), os.WriteFile(n.pin(id), nil, 0o600)))
		n.must(home.command(n, "unshare", "--net="+n.pin(id), "true"))
	}
}

// drop unmounts a container's network namespace in the tests' namespaces and in the given places.
func (n *machine) drop(id string, places ...place) {
	n.Helper()
	for _, where := range append(places, home) {
		n.run(where.command(n, "umount", "-l", n.pin(id)))
	}
	check(n, os.Remove(n.pin(id)))
}

// place is a set of namespaces in which programs run: the namespaces of a process or, for the zero
// value, those of the tests.
type place struct {
	pid   int
	enter []string // flags of nsenter
	less  bool     // programs lack CAP_SYS_PTRACE, and cannot inspect processes that have it
}

var home place

// confined returns a place with the same namespaces, but whose programs lack CAP_SYS_PTRACE.
func (p place) confined() place {
	p.less = true
	return p
}

// newPlace creates namespaces that exist until the test ends. flags are unshare's flags, and kinds
// are nsenter's flags for the namespaces that programs enter. The shell command setup runs in the
// namespaces first.
func (n *machine) newPlace(flags, kinds []string, setup string) place {
	n.Helper()
	// The process reads its ID in the tests' PID namespace from /proc before setup mounts another
	// /proc.
	script := `read -r pid rest </proc/self/stat; (` + setup + `) >&2 && echo $pid && exec sleep 3600`
	// Unmount the copies of other tests' mounts, which would keep those tests' namespaces alive.
	if slices.Contains(flags, "--mount") {
		script = `for pin in $(sed -n 's/^nsfs \([^ ]*\) .*/\1/p' /proc/mounts); do
			case $pin in ` + n.dir + `/*) ;; *) umount -l "$pin" 2>/dev/null ;; esac; done; ` + script
	}
	cmd := exec.Command("unshare", slices.Concat(flags, []string{"--fork", "--kill-child", "sh", "-c", script})...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	check(n, err)
	check(n, cmd.Start())
	n.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		_ = cmd.Wait()
	})
	line, _ := bufio.NewReader(stdout).ReadString('\n')
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		n.Fatalf("unshare %v: %v\n%s", flags, err, stderr.String())
	}
	return place{pid: pid, enter: kinds}
}

// command returns a command that runs a program in this place.
func (p place) command(n *machine, name string, args ...string) *exec.Cmd {
	if p.less {
		args = append([]string{"--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace", name}, args...)
		name = "setpriv"
	}
	if p.pid != 0 {
		args = slices.Concat([]string{"--target", strconv.Itoa(p.pid)}, p.enter, []string{name}, args)
		name = "nsenter"
	}
	cmd := exec.Command(name, args...)
	cmd.Env = []string{"PATH=" + n.bin + ":" + os.Getenv("PATH"), "GORACE=" + noExitDelay}
	return cmd
}

// unwindctl returns a command that runs unwindctl in the tests' namespaces.
func (n *machine) unwindctl(args ...string) *exec.Cmd {
	return home.command(n, filepath.Join(n.bin, "unwindctl"), args...)
}

// outcome is the exit code and the output of a program.
type outcome struct {
	code           int
	stdout, stderr string
}

func (n *machine) run(cmd *exec.Cmd) outcome {
	n.Helper()
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	check(n, cmd.Start())
	slow := time.AfterFunc(sandbox.Patience, func() { _ = cmd.Process.Kill() })
	defer slow.Stop()
	_ = cmd.Wait()
	return outcome{cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()}
}

func (n *machine) must(cmd *exec.Cmd) string {
	n.Helper()
	out := n.run(cmd)
	if out.code != 0 {
		n.Fatalf("%v: exit code %d\n%s%s", cmd.Args, out.code, out.stdout, out.stderr)
	}
	return out.stdout
}

func (n *machine) sweep(where place, args ...string) outcome {
	n.Helper()
	return n.run(where.command(n, filepath.Join(n.bin, "unwindctl"), append([]string{"sweep", "--state-dir", n.state}, args...)...))
}

// verb runs a CNI verb of unwind, as a runtime does for a pod. If the ID is "nerdctl" or "podman",
// CNI_ARGS is what that program sets for a container.
func (n *machine) verb(where place, command, id, netns string) outcome {
	n.Helper()
	cmd := where.command(n, filepath.Join(n.bin, "unwind"))
	args := "IgnoreUnknown=1"
	switch id {
	case "nerdctl":
	case "podman":
		args += ";K8S_POD_NAME=" + id
	default:
		args += ";K8S_POD_NAMESPACE=default;K8S_POD_NAME=" + id
	}
	cmd.Env = append(cmd.Env, "CNI_COMMAND="+command, "CNI_CONTAINERID="+id, "CNI_NETNS="+netns, "CNI_IFNAME=eth0",
		"CNI_ARGS="+args, "CNI_PATH="+filepath.Join(n.tools, "test")+":"+filepath.Join(n.tools, "cni"))
	cmd.Stdin = strings.NewReader(fmt.Sprintf(`{"cniVersion": "1.0.0", "name": %q, "type": "unwind", "stateDir": %q,
		"chain": {"cniVersion": "1.0.0", "plugins": [%s]}}`, network, n.state, n.chain))
	return n.run(cmd)
}

// add runs an ADD, which must succeed.
func (n *machine) add(where place, id, netns string) {
	n.Helper()
	if out := n.verb(where, "ADD", id, netns); out.code != 0 {
		n.Fatalf("ADD %s: %s%s", id, out.stdout, out.stderr)
	}
}

// plan sets the faulty plugin's mode for the next calls of each verb.
func (n *machine) plan(modes map[string]string) {
	n.Helper()
	data, err := json.Marshal(map[string]any{"p": modes})
	check(n, err)
	check(n, os.WriteFile(filepath.Join(n.dir, "plan.json"), data, 0o600))
}

// calls returns how often the faulty plugin was called with a command.
func (n *machine) calls(command string) int {
	n.Helper()
	data, err := os.ReadFile(filepath.Join(n.dir, "log"))
	check(n, err)
	return bytes.Count(data, []byte(`{"phase":"start","command":"`+command+`"`))
}

// edit changes a container's record in the journal.
func (n *machine) edit(id string, change func(*journal.Record)) {
	n.Helper()
	err := n.store.Update(context.Background(), func(tx *journal.Tx) error {
		e, err := tx.Get(journal.Key{Network: network, ContainerID: id, IfName: "eth0"})
		if err == nil && e == nil {
			err = fmt.Errorf("the journal has no record of %s", id)
		}
		if err != nil {
			return err
		}
		change(e)
		err = tx.Delete(e)
		e.Number = 0
		return errors.Join(err, journaltest.PutIn(tx, e))
	})
	check(n, err)
}

// ids returns the IDs of the containers in the journal.
func (n *machine) ids() []string {
	n.Helper()
	attachments, err := inspect.ReadJournal(context.Background(), n.store)
	check(n, err)
	ids := []string{}
	for _, a := range attachments {
		ids = append(ids, a.ContainerID)
	}
	return ids
}

// results parses the table that a sweep printed. It maps each container to its RESULT and REASON.
func (o outcome) results() map[string][2]string {
	results := map[string][2]string{}
	lines := strings.Split(o.stdout, "\n")
	header := lines[0]
	at, why := strings.Index(header, "RESULT"), strings.Index(header, "REASON")
	for _, line := range lines[1:] {
		if fields := strings.Fields(line); at > 0 && len(line) > why && fields[0] == network {
			results[fields[1]] = [2]string{strings.TrimSpace(line[at:why]), line[why:]}
		}
	}
	return results
}

// eventually waits until the condition holds.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	for end := time.Now().Add(sandbox.Patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if condition() {
			return
		}
	}
	t.Fatalf("not in time: %s", what)
}

// removeLink removes an interface when the test ends.
func (n *machine) removeLink(name string) {
	n.Cleanup(func() {
		if link, err := netlink.LinkByName(name); err == nil {
			_ = netlink.LinkDel(link)
		}
	})
}

// entries returns all records in the journal.
func (n *machine) entries() []*journal.Record {
	n.Helper()
	var all []*journal.Record
	err := n.store.View(context.Background(), func(tx *journal.Tx) error {
		return tx.All(func(e *journal.Record, err error) error {
			all = append(all, e)
			return err
		})
	})
	check(n, err)
	return all
}
