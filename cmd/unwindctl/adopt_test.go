package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/plugins/pkg/utils"
	"github.com/google/go-cmp/cmp"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cni-unwind/cmd/unwindctl/internal/nodetest"
	"cni-unwind/journal"
	"cni-unwind/testdata/e2e"
)

// plainNode is a node without unwind: libcni runs the chain, the runtime lists its pods, and nothing
// but unwindctl was copied to it. libcni's cache and host-local's files are where they are on a node,
// so only one of these tests runs at a time.
type plainNode struct {
	*machine
	confDir string
	binDir  string // of the plugins that unwindctl runs
	list    *libcni.NetworkConfigList
	cni     *libcni.CNIConfig
	socket  string
	listed  []*cri.PodSandbox
	ports   int
}

const (
	cniDir   = "/var/lib/cni"
	poolDir  = cniDir + "/networks/" + network
	cacheDir = cniDir + "/results"
)

// onOldMachine reports whether this machine has run for longer than the grace period. On one that has
// not, such as that of a continuous integration, nothing is old enough to be dead. There the test runs
// in another process, in a time namespace that says otherwise, and its outcome is that of this one.
func onOldMachine(t *testing.T) bool {
	t.Helper()
	if time.Duration(journal.BootNanos()) > oldEnough+time.Minute {
		return true
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked, so the thread ends with this goroutine
		if err := e2e.LongUp(); err != nil {
			t.Errorf("the machine has not run for longer than the grace period: %v", err)
			return
		}
		cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.timeout=30m")
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("in a time namespace: %v\n%s", err, out)
		}
	}()
	<-done
	return false
}

// newPlainNode has a pool of 17 addresses, and a chain of bridge, portmap and firewall.
func newPlainNode(t *testing.T) *plainNode {
	t.Helper()
	return newPlainNodeOf(t, `"ipMasq": true`, `{"type": "portmap", "capabilities": {"portMappings": true}}`, `{"type": "firewall"}`)
}

// newPlainNodeOf has a pool of 17 addresses, and a chain of bridge and the given plugins.
func newPlainNodeOf(t *testing.T, bridge string, plugins ...string) *plainNode {
	t.Helper()
	n := &plainNode{machine: newMachine(t), ports: 20000}
	n.binDir = filepath.Join(n.tools, "cni")
	n.confDir = filepath.Join(n.dir, "net.d")
	conflist := fmt.Sprintf(`{"cniVersion": "1.0.0", "name": %q, "plugins": [
		{"type": "bridge", "bridge": "adopt0", "isGateway": true, %s, "ipam": {"type": "host-local",
			"subnet": "10.77.0.0/27", "rangeStart": "10.77.0.2", "rangeEnd": "10.77.0.18"}}, %s]}`,
		network, bridge, strings.Join(plugins, ", "))
	var err error
	if n.list, err = libcni.ConfListFromBytes([]byte(conflist)); err != nil {
		t.Fatal(err)
	}
	if err = os.Mkdir(n.confDir, 0o755); err == nil {
		err = os.WriteFile(filepath.Join(n.confDir, "10-podnet.conflist"), []byte(conflist), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	n.cni = libcni.NewCNIConfigWithCacheDir([]string{filepath.Join(n.tools, "cni")}, cniDir, nil)
	n.socket = nodetest.ServeCRI(t, func(context.Context) ([]*cri.PodSandbox, error) { return n.listed, nil })
	n.removeLink("adopt0")
	t.Cleanup(func() {
		_ = os.RemoveAll(poolDir)
		_ = os.RemoveAll(cacheDir)
		for _, flush := range []string{"-t nat -F", "-t nat -X", "-F", "-X"} {
			n.run(home.command(n.machine, "iptables", strings.Fields("-w "+flush)...))
		}
	})
	return n
}

// add attaches a pod as a runtime with the plain chain does, with a port of the host.
func (n *plainNode) add(id string) (address string, err error) {
	n.ports++
	r, err := n.cni.AddNetworkList(context.Background(), n.list, n.runtimeConf(id, n.ports))
	if err != nil {
		return "", err
	}
	result, err := types100.NewResultFromResult(r)
	if err != nil {
		return "", err
	}
	return result.IPs[0].Address.IP.String(), nil
}

func (n *plainNode) runtimeConf(id string, port int) *libcni.RuntimeConf {
	return &libcni.RuntimeConf{ContainerID: id, NetNS: n.pin(id), IfName: "eth0",
		Args:           [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", "default"}, {"K8S_POD_NAME", id}},
		CapabilityArgs: map[string]any{"portMappings": []any{map[string]any{"hostPort": port, "containerPort": 80, "protocol": "tcp"}}}}
}

// live attaches pods that the runtime lists.
func (n *plainNode) live(ids ...string) {
	n.Helper()
	n.netns(ids...)
	for _, id := range ids {
		n.mustAdd(id)
		n.listed = append(n.listed, nodetest.Sandbox(id, cri.PodSandboxState_SANDBOX_READY))
	}
}

func (n *plainNode) mustAdd(id string) (address string) {
	n.Helper()
	address, err := n.add(id)
	if err != nil {
		n.Fatalf("ADD %s: %v", id, err)
	}
	return address
}

// leak attaches pods and forgets them: their namespaces go, and no DEL comes. They have been dead
// for longer than the grace period.
func (n *plainNode) leak(ids ...string) {
	n.Helper()
	n.netns(ids...)
	for _, id := range ids {
		n.mustAdd(id)
		n.drop(id)
		n.age(id)
	}
}

// age makes what host-local and libcni keep of a container older than the grace period.
func (n *plainNode) age(id string) { n.ageBy(id, oldEnough) }

// oldEnough is more than the grace period of a plain chain, 10 minutes.
const oldEnough = 15 * time.Minute

func (n *plainNode) ageBy(id string, by time.Duration) {
	n.Helper()
	then := time.Now().Add(-by)
	for _, path := range append(n.reserved(id), n.cacheFile(id)) {
		if err := os.Chtimes(path, then, then); err != nil && !errors.Is(err, fs.ErrNotExist) {
			n.Fatal(err)
		}
	}
}

func (n *plainNode) cacheFile(id string) string {
	return filepath.Join(cacheDir, network+"-"+id+"-eth0")
}

// reserved returns the files of a container's addresses; of all with "".
func (n *plainNode) reserved(id string) (paths []string) {
	n.Helper()
	files, err := filepath.Glob(filepath.Join(poolDir, "10.*"))
	if err != nil {
		n.Fatal(err)
	}
	for _, path := range files {
		if info, err := os.Lstat(path); err == nil && !info.Mode().IsRegular() {
			continue
		}
		data, err := os.ReadFile(path)
		if err != nil {
			n.Fatal(err)
		}
		if strings.HasPrefix(string(data), id) {
			paths = append(paths, path)
		}
	}
	return paths
}

// seen is all that is on the node.
type seen struct{ Rules, Reserved, Cached []string }

func (n *plainNode) look() (s seen) {
	n.Helper()
	for _, line := range strings.Split(n.must(home.command(n.machine, "iptables-save")), "\n") {
		if strings.HasPrefix(line, "-A") || strings.HasPrefix(line, ":CNI-") {
			line, _, _ = strings.Cut(line, " [")
			s.Rules = append(s.Rules, line)
		}
	}
	slices.Sort(s.Rules)
	s.Reserved = n.reserved("")
	files, _ := os.ReadDir(cacheDir)
	for _, f := range files {
		s.Cached = append(s.Cached, f.Name())
	}
	return s
}

func (n *plainNode) ctl(args ...string) outcome {
	n.Helper()
	args = append(args, "--conf-dir", n.confDir, "--state-dir", n.state, "--cri", n.socket)
	if args[0] == "sweep" {
		args = append(args, "--bin-dir", n.binDir)
	}
	return n.run(home.command(n.machine, filepath.Join(n.bin, "unwindctl"), args...))
}

// TestNothingJudged: what a command that judges nothing says, and names as the next step.
func TestNothingJudged(t *testing.T) {
	if !onOldMachine(t) {
		return
	}
	n := newPlainNode(t)
	out := n.ctl("sweep", "--dry-run", "--network", "podnte")
	if want := "No conflist of network podnte has host-local in its chain.\n"; !strings.HasSuffix(out.stdout, want) || out.code != 0 {
		t.Errorf("%+v, want %q", out, want)
	}
	out = n.ctl("ipam", "--valid", "attached.json")
	if out.code != 2 || out.stdout != "" {
		t.Errorf("a wrong command line: %+v", out)
	}
	n.leak("dead")
	touch(t, n.reserved("dead")[0])
	for _, args := range [][]string{{"ipam"}, {"sweep", "--dry-run"}} {
		out = n.ctl(args...)
		want := "The runtime does not list 1 of the live ones: they are kept until their grace period"
		if !strings.Contains(out.stdout, want) || strings.Contains(out.stdout, "No address is leaked") || out.code != 0 {
			t.Errorf("%v: %+v, want %q", args, out, want)
		}
	}
	n.socket = "/nonexistent"
	out = n.ctl("sweep", "--dry-run")
	if want := "and it gave no list.\n"; !strings.HasSuffix(out.stdout, want) || out.code != 1 {
		t.Errorf("%+v, want %q", out, want)
	}
}

// wantNoJournal: neither a look nor a release leaves a journal on a node without unwind.
func (n *plainNode) wantNoJournal() {
	n.Helper()
	if _, err := os.Lstat(n.state); !errors.Is(err, fs.ErrNotExist) {
		n.Errorf("the state directory is there: %v", err)
	}
}

func ids(prefix string, count int) (all []string) {
	for i := range count {
		all = append(all, fmt.Sprintf("%s%d", prefix, i))
	}
	return all
}

// TestPlainNode: the plain chain has leaked 13 addresses with their rules, beside three live pods.
// unwindctl alone shows each with a reason, and frees all: what is left is what the live pods had.
func TestPlainNode(t *testing.T) {
	if !onOldMachine(t) {
		return
	}
	n := newPlainNode(t)
	n.live(ids("live", 3)...)
	before := n.look()
	n.leak(ids("dead", 13)...)
	leaked := n.look()
	if rules := len(leaked.Rules) - len(before.Rules); len(leaked.Reserved) != 16 || rules < 13*6 {
		t.Fatalf("the plain chain left %d addresses and %d rules", len(leaked.Reserved), rules)
	}

	out := n.ctl("ipam")
	for _, want := range []string{
		"podnet (" + poolDir + "): 16 used (3 live, 13 leaked, 0 ownerless, 0 unknown)\n",
		"13 leaked (10.77.0.5, 10.77.0.6, 10.77.0.7, 10.77.0.8, …): its owner is neither in the journal nor in the runtime's list",
		"\n13 addresses are leaked. To see what would be freed: unwindctl sweep --dry-run --cri " + n.socket + "\n" +
			"To prevent leaks: unwindctl install --dry-run\n",
	} {
		if out.code != 0 || !strings.Contains(out.stdout, want) {
			t.Errorf("ipam: %d, want %q:\n%s%s", out.code, want, out.stdout, out.stderr)
		}
	}
	wide := n.ctl("ipam", "-o", "wide")
	if strings.Count(wide.stdout, " live ") != 3 || !strings.Contains(wide.stdout, "the runtime lists its owner") {
		t.Errorf("ipam -o wide:\n%s", wide.stdout)
	}
	dry := n.ctl("sweep", "--dry-run", "--json")
	var object struct {
		Findings []struct {
			ContainerID, Verdict, Result, Why string
			Cached                            bool
			Addresses                         []string
			Pending                           []string
		}
	}
	if err := json.Unmarshal([]byte(dry.stdout), &object); err != nil || len(object.Findings) != 16 {
		t.Fatalf("%v: %s%s", err, dry.stdout, dry.stderr)
	}
	for _, f := range object.Findings {
		dead := strings.HasPrefix(f.ContainerID, "dead")
		if !f.Cached || len(f.Addresses) != 1 || f.Why == "" || dead != (f.Result == "to be released") ||
			dead != (strings.Join(f.Pending, " ") == "firewall portmap bridge") {
			t.Errorf("%+v", f)
		}
	}
	if diff := cmp.Diff(leaked, n.look()); diff != "" {
		t.Fatalf("a look changed, -before +after:\n%s", diff)
	}

	out = n.ctl("sweep")
	if want := "0 attachments, 16 only in libcni's cache: 13 released, 3 live.\n"; out.code != 0 || !strings.HasSuffix(out.stdout, want) {
		t.Errorf("sweep: %d, want %q\n%s%s", out.code, want, out.stdout, out.stderr)
	}
	if diff := cmp.Diff(before, n.look()); diff != "" {
		t.Errorf("-before the leak +after the sweep:\n%s", diff)
	}
	if out := n.ctl("ipam"); !strings.Contains(out.stdout, "\nNo address is leaked.\n") {
		t.Errorf("ipam: %s%s", out.stdout, out.stderr)
	}
	n.wantNoJournal()
}

// TestPlainNodeGuards: one piece of evidence that speaks for the owner keeps all that it has, and
// without it all is freed.
func TestPlainNodeGuards(t *testing.T) {
	if !onOldMachine(t) {
		return
	}
	n := newPlainNode(t)
	n.live("live")
	for _, c := range []struct {
		name         string
		speak, stop  func(id string)
		why          string
		withoutCache bool
	}{
		{"the runtime lists it", func(id string) { n.listed = append(n.listed, nodetest.Sandbox(id, 0)) },
			func(id string) { n.listed = n.listed[:1] }, "the runtime lists its owner", true},
		{"its reservation is young: an ADD is under way", func(id string) { touch(t, n.reserved(id)[0]) },
			func(id string) { n.age(id) }, "the grace period has not expired", true},
		{"its cache is young", func(id string) { touch(t, n.cacheFile(id)) },
			func(id string) { n.age(id) }, "the grace period has not expired", false},
		{"its namespace is there", func(id string) { n.netns(id) },
			func(id string) { n.drop(id) }, "the owner's network namespace exists", false},
		{"an interface has its address", func(id string) {
			n.must(home.command(n.machine, "ip", "link", "add", "adopt1", "type", "bridge"))
			n.must(home.command(n.machine, "ip", "address", "add", filepath.Base(n.reserved(id)[0])+"/32", "dev", "adopt1"))
		}, func(id string) { n.must(home.command(n.machine, "ip", "link", "del", "adopt1")) }, "an interface has the address", true},
	} {
		for _, cached := range []bool{true, false} {
			if !cached && !c.withoutCache {
				continue
			}
			t.Run(fmt.Sprintf("%s, cached %t", c.name, cached), func(t *testing.T) {
				id := fmt.Sprint("dead", n.ports) // else rules of another without a cache would go
				before := n.look()
				n.leak(id)
				all := n.look()
				if !cached {
					if err := os.Remove(n.cacheFile(id)); err != nil {
						t.Fatal(err)
					}
					all = n.look()
				}
				c.speak(id)
				out := n.ctl("sweep", "--json")
				if out.code != 0 || !strings.Contains(out.stdout, c.why) || strings.Contains(out.stdout, `"released"`) {
					t.Errorf("sweep: %+v", out)
				}
				if diff := cmp.Diff(all, n.look()); diff != "" {
					t.Errorf("the guard kept nothing, -before +after:\n%s", diff)
				}
				c.stop(id)
				out = n.ctl("sweep", "--json")
				var object struct{ Findings []struct{ Left []string } }
				if err := json.Unmarshal([]byte(out.stdout), &object); err != nil || out.code != 0 {
					t.Errorf("without the guard: %v %+v", err, out)
				}
				if !cached { // its rules stay, and go by the commands that are named
					if diff := cmp.Diff(all.Rules, n.look().Rules); diff != "" {
						t.Errorf("without its cache, -before +after:\n%s", diff)
					}
					for _, f := range object.Findings {
						for _, command := range f.Left {
							n.must(home.command(n.machine, "sh", "-c", command))
						}
					}
				}
				if diff := cmp.Diff(before, n.look()); diff != "" {
					t.Errorf("without the guard, -want +got:\n%s", diff)
				}
			})
		}
	}
	n.wantNoJournal()
}

func touch(t *testing.T, path string) {
	t.Helper()
	touchAt(t, path, time.Now())
}

func touchAt(t *testing.T, path string, at time.Time) {
	t.Helper()
	if err := os.Chtimes(path, at, at); err != nil {
		t.Fatal(err)
	}
}

// TestPlainNodeLate: the address of a dead container is another pod's by now, since somebody removed
// host-local's file, as threads of issues advise. No DEL takes that pod's rules; the dead one's own,
// which no address names, go. Once the address is free again the rest goes too.
func TestPlainNodeLate(t *testing.T) {
	if !onOldMachine(t) {
		return
	}
	n := newPlainNode(t)
	before := n.look()
	n.leak("dead")
	if err := os.RemoveAll(poolDir); err != nil {
		t.Fatal(err)
	}
	n.netns("next")
	n.mustAdd("next")
	next := n.look()
	if out := n.ctl("sweep"); out.code != 0 || !strings.Contains(out.stdout, ": 2 live.") {
		t.Fatalf("an interface has the address: %+v", out)
	}
	if diff := cmp.Diff(next, n.look()); diff != "" {
		t.Errorf("an interface has the address, -before +after:\n%s", diff)
	}
	n.listed = append(n.listed, nodetest.Sandbox("next", 0))
	n.must(home.command(n.machine, "nsenter", "--net="+n.pin("next"), "ip", "address", "flush", "dev", "eth0")) // only host-local tells
	out := n.ctl("sweep")
	if out.code != 0 || !strings.Contains(out.stdout, "firewall (its address has another owner)") {
		t.Errorf("%+v", out)
	}
	after, chain := n.look(), utils.FormatChainName(network, "dead")[len("CNI-"):][:20]
	for _, rule := range next.Rules {
		kept := slices.Contains(after.Rules, rule)
		if own := strings.Contains(rule, chain) || strings.Contains(rule, `id: \"dead\"`); own == kept {
			t.Errorf("own %t, kept %t: %s", own, kept, rule)
		}
	}
	n.must(home.command(n.machine, "umount", n.pin("next")))
	if err := errors.Join(os.RemoveAll(poolDir), os.Remove(n.cacheFile("next"))); err != nil {
		t.Fatal(err)
	}
	if out := n.ctl("sweep"); out.code != 0 || !strings.Contains(out.stdout, "1 released.") {
		t.Errorf("its address is free: %+v", out)
	}
	for _, rule := range n.look().Rules {
		if !slices.Contains(before.Rules, rule) && strings.Contains(rule, "10.77.0.2/32") && !strings.Contains(rule, `id: \"next\"`) {
			t.Errorf("left: %s", rule)
		}
	}
	n.wantNoJournal()
}

// TestPlainNodeHoldsPool: the address of a dead container is free while firewall's DEL is shown it. An
// ADD of the plain chain that comes now gets the address after that DEL, which so does not take the
// rules of its new owner.
func TestPlainNodeHoldsPool(t *testing.T) {
	if !onOldMachine(t) {
		return
	}
	n := newPlainNode(t)
	n.leak("dead")
	for _, name := range []string{filepath.Base(n.reserved("dead")[0]), "last_reserved_ip.0"} {
		if err := os.Remove(filepath.Join(poolDir, name)); err != nil {
			t.Fatal(err)
		}
	}
	tools, begun := n.binDir, filepath.Join(n.dir, "begun")
	n.binDir = filepath.Join(n.dir, "bin")
	script := fmt.Sprintf("mkdir %[1]s && ln -s %[2]s/* %[1]s && rm %[1]s/firewall && "+
		"printf '#!/bin/sh\\n: >%[3]s; sleep 2; exec %[2]s/firewall' >%[1]s/firewall && chmod +x %[1]s/firewall", n.binDir, tools, begun)
	n.must(home.command(n.machine, "sh", "-c", script))
	swept := make(chan outcome)
	go func() { swept <- n.ctl("sweep") }()
	eventually(t, "firewall's DEL begins", func() bool {
		_, err := os.Lstat(begun)
		return err == nil
	})
	n.netns("next")
	if got := n.mustAdd("next"); got != "10.77.0.2" {
		t.Fatalf("another address than the dead one's: %s", got)
	}
	if out := <-swept; out.code != 0 { // released, or portmap's DEL waits: the ADD came before it
		t.Errorf("%+v", out)
	}
	n.wantWhole([]string{"next"})
	rules := strings.Join(n.look().Rules, "\n")
	if strings.Count(rules, "-A CNI-FORWARD -s 10.77.0.2/32 -j ACCEPT") != 1 || strings.Contains(rules, `id: \"dead\"`) {
		t.Errorf("the rules:\n%s", rules)
	}
}

// TestPlainNodeWhileADDs: ADDs of the plain chain run while two sweeps free what is dead, with a list
// that is older than these ADDs. Some get an address that a sweep has just freed. Every pod has all
// that its ADD made, and nothing of the dead is left.
func TestPlainNodeWhileADDs(t *testing.T) {
	if !onOldMachine(t) {
		return
	}
	rounds := 20
	if os.Getenv("UNWIND_TEST_LONG") != "" {
		rounds = 200
	}
	n := newPlainNode(t)
	n.live(ids("live", 3)...)
	live := n.look()
	for round := range rounds {
		dead := ids(fmt.Sprintf("dead%d-", round), 2)
		n.leak(dead...)
		if round%4 == 1 { // the address of one is free, its rules are not
			for _, path := range n.reserved(dead[0]) {
				if err := os.Remove(path); err != nil {
					t.Fatal(err)
				}
			}
		}
		young := ids(fmt.Sprintf("young%d-", round), 2)
		n.netns(young...)
		var all sync.WaitGroup
		errs, outs := make([]error, len(young)), make([]outcome, 2)
		for i := range outs {
			all.Go(func() { outs[i] = n.ctl("sweep") })
		}
		for i, id := range young {
			conf := n.runtimeConf(id, 30000+10*round+i)
			all.Go(func() {
				time.Sleep(time.Duration(round*37%400) * time.Millisecond)
				_, errs[i] = n.cni.AddNetworkList(context.Background(), n.list, conf)
			})
		}
		all.Wait()
		for _, out := range outs {
			if out.code != 0 {
				t.Errorf("round %d: sweep: %+v", round, out)
			}
		}
		if err := errors.Join(errs...); err != nil {
			t.Fatalf("round %d: ADD: %v", round, err)
		}
		if out := n.ctl("sweep"); out.code != 0 {
			t.Errorf("round %d: sweep: %+v", round, out)
		}
		n.wantWhole(append(ids("live", 3), young...))
		for i, id := range young {
			if err := n.cni.DelNetworkList(context.Background(), n.list, n.runtimeConf(id, 30000+10*round+i)); err != nil {
				t.Fatalf("round %d: DEL: %v", round, err)
			}
			n.drop(id)
		}
		if diff := cmp.Diff(live, n.look()); diff != "" {
			t.Fatalf("round %d: -what the live pods have +what is there:\n%s", round, diff)
		}
	}
	n.wantNoJournal()
}

// wantWhole: each pod has its address, its cache, and the rules that libcni's CHECK of its chain
// looks for.
func (n *plainNode) wantWhole(pods []string) {
	n.Helper()
	for _, id := range pods {
		if len(n.reserved(id)) != 1 {
			n.Errorf("%s has %q", id, n.reserved(id))
		}
		cached, err := n.cni.GetNetworkListCachedResult(n.list, n.runtimeConf(id, 0))
		if err != nil || cached == nil {
			n.Errorf("the cache of %s: %v, %v", id, cached, err)
			continue
		}
		_, conf, err := n.cni.GetNetworkListCachedConfig(n.list, n.runtimeConf(id, 0))
		if err == nil {
			err = n.cni.CheckNetworkList(context.Background(), n.list, conf)
		}
		if err != nil {
			n.Errorf("CHECK %s: %v", id, err)
		}
	}
}

// TestPlainNodeEarlierBoot: of an ADD before this boot no DEL runs, since the disk may be a copy. Its
// address goes by host-local's file.
func TestPlainNodeEarlierBoot(t *testing.T) {
	if !onOldMachine(t) {
		return
	}
	n := newPlainNode(t)
	n.leak("dead")
	all := n.look()
	n.ageBy("dead", 365*24*time.Hour)
	if out := n.ctl("sweep"); out.code != 0 || !strings.Contains(out.stdout, "0 attachments, and 1 with an owner that is not in the journal: 1 released.") {
		t.Errorf("%+v", out)
	}
	all.Reserved = nil
	if diff := cmp.Diff(all, n.look()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	n.wantNoJournal()
}

// TestPlainNodeBadInput: what is no reservation and no cache of an attachment is neither touched nor
// in the way of what is.
func TestPlainNodeBadInput(t *testing.T) {
	if !onOldMachine(t) {
		return
	}
	n := newPlainNode(t)
	n.live("live")
	before := n.look()
	n.leak("dead", "halfwritten", "nerdctl", "uncached")
	rewrite := func(path string, change func(string) string) {
		data, err := os.ReadFile(path)
		if err == nil {
			err = os.WriteFile(path, []byte(change(string(data))), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	rewrite(n.cacheFile("halfwritten"), func(s string) string { return s[:len(s)/2] })
	rewrite(n.cacheFile("nerdctl"), func(s string) string { return strings.Replace(s, `"K8S_POD_NAME"`, `"NAME"`, 1) })
	for _, id := range []string{"halfwritten", "nerdctl"} {
		n.age(id)
	}
	if err := os.Remove(n.cacheFile("uncached")); err != nil {
		t.Fatal(err)
	}
	script := `cd ` + poolDir + ` && mkdir 10.77.0.9 && ln -s ` + n.confDir + ` 10.77.0.10 &&
		echo notes >10.77.0.999 && echo notes >notes && : >10.77.0.12 &&
		cd ` + cacheDir + ` && mkdir podnet-d-eth0 && ln -s ` + n.confDir + ` podnet-l-eth0 && mkfifo podnet-f-eth0 &&
		echo '{"kind": "cniCacheV1"}' >podnet-garbage-eth1 && echo '{"cniVersion": "0.2.0"}' >podnet-old-eth0 &&
		sed s/podnet/other/g podnet-live-eth0 >podnet-other-eth0 && touch -d "15 minutes ago" *`
	n.must(home.command(n.machine, "sh", "-c", script))
	strange := n.look()

	// An ADD begins to write its cache's file. Once that is old, it is damaged.
	being := n.cacheFile("being")
	if err := os.WriteFile(being, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if out := n.ctl("sweep", "--dry-run"); strings.Contains(out.stderr, "podnet-being-eth0") {
		t.Errorf("while an ADD writes: %+v", out)
	}
	touchAt(t, being, time.Now().Add(-oldEnough))
	if out := n.ctl("sweep", "--dry-run"); out.code != 1 || !strings.Contains(out.stderr, "podnet-being-eth0") {
		t.Errorf("a damaged file: %+v", out)
	}
	if err := os.Remove(being); err != nil {
		t.Fatal(err)
	}

	failing := nodetest.ServeCRI(t, func(context.Context) ([]*cri.PodSandbox, error) { return nil, errors.New("no") })
	answers := n.socket
	n.socket = failing
	if out := n.ctl("sweep", "--dry-run"); out.code != 1 || !strings.Contains(out.stderr, "gave no list") {
		t.Errorf("without a list: %+v", out)
	}
	n.socket = answers
	if out := n.ctl("ipam"); !strings.Contains(out.stdout, "8 used (1 live, 2 leaked, 1 ownerless, 4 unknown)") {
		t.Errorf("ipam: %+v", out)
	}
	if diff := cmp.Diff(strange, n.look()); diff != "" {
		t.Errorf("a look changed, -before +after:\n%s", diff)
	}
	out := n.ctl("sweep", "--json")
	for _, want := range []string{"no list of the runtime covers it", "libcni's cache cannot be read"} {
		if out.code != 1 || !strings.Contains(out.stdout, want) {
			t.Errorf("want %q: %+v", want, out)
		}
	}
	after := n.look()
	gone := func(id string) bool { return len(n.reserved(id)) == 0 }
	if gone("live") || !gone("dead") || gone("halfwritten") || gone("nerdctl") || !gone("uncached") {
		t.Errorf("-before +after:\n%s", cmp.Diff(strange.Reserved, after.Reserved))
	}
	if want := len(strange.Cached) - 1; len(after.Cached) != want {
		t.Errorf("-before +after:\n%s", cmp.Diff(strange.Cached, after.Cached))
	}
	for _, rule := range before.Rules {
		if !slices.Contains(after.Rules, rule) {
			t.Errorf("a rule of the live pod is gone: %s", rule)
		}
	}
	if _, err := os.Lstat(poolDir + "/10.77.0.12"); !errors.Is(err, fs.ErrNotExist) {
		t.Error("an address without an owner is still there")
	}
	n.must(home.command(n.machine, "chmod", "o+rx", filepath.Dir(n.dir), n.dir, n.confDir, n.confDir+"/10-podnet.conflist"))
	user := home.command(n.machine, "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups",
		filepath.Join(n.bin, "unwindctl"), "ipam", "--conf-dir", n.confDir, "--state-dir", n.state)
	if out := n.run(user); out.code != 1 || !strings.Contains(out.stderr, "run this as root") || out.stdout != "" {
		t.Errorf("a user without rights: %+v", out)
	}
	n.wantNoJournal()
}

// TestPlainNodeForeignList: the list is of another runtime than the pods, and has none of them. Those
// that run keep all by what is on the node, and what is dead goes.
func TestPlainNodeForeignList(t *testing.T) {
	if !onOldMachine(t) {
		return
	}
	n := newPlainNode(t)
	pods := ids("live", 3)
	n.live(pods...)
	for _, id := range pods {
		n.age(id)
	}
	n.listed = []*cri.PodSandbox{nodetest.Sandbox("another", cri.PodSandboxState_SANDBOX_READY)}
	if err := os.Remove(n.cacheFile(pods[0])); err != nil { // host-local alone knows this one
		t.Fatal(err)
	}
	want := n.look()
	n.leak("dead")
	if out := n.ctl("sweep"); out.code != 0 || !strings.Contains(out.stdout, ": 1 released, 3 live.") {
		t.Errorf("%+v", out)
	}
	if diff := cmp.Diff(want, n.look()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestPlainNodeOldCache: libcni before 1.1, as of containerd 1.7, does not keep the network namespace of
// an ADD. Its result has it. An attachment of which neither says it lives.
func TestPlainNodeOldCache(t *testing.T) {
	if !onOldMachine(t) {
		return
	}
	n := newPlainNode(t)
	for _, c := range []struct {
		name       string
		there, say bool // its namespace is there, and its result says where
		freed      bool
	}{
		{"there", true, true, false},
		{"gone", false, true, true},
		{"unsaid", false, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := n.look()
			n.leak(c.name)
			data, err := os.ReadFile(n.cacheFile(c.name))
			if err != nil {
				t.Fatal(err)
			}
			text := strings.Replace(string(data), `"netns":"`+n.pin(c.name)+`",`, "", 1)
			if !c.say {
				text = strings.ReplaceAll(text, n.pin(c.name), "sandbox-1")
			}
			if says := strings.Contains(text, n.pin(c.name)); text == string(data) || says != c.say {
				t.Fatalf("libcni's cache: %s", data)
			}
			if err := os.WriteFile(n.cacheFile(c.name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			n.age(c.name)
			if c.there {
				n.netns(c.name)
			}
			want := n.look()
			if c.freed {
				want = before
			}
			if out := n.ctl("sweep"); out.code != 0 {
				t.Errorf("%+v", out)
			}
			if diff := cmp.Diff(want, n.look()); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// TestPlainNodeOthers: CRI lists pods, and not the containers of nerdctl and podman beside them. One
// whose address is there lives, which is no error. Of one that has ended nothing can be told: all that
// it has stays.
func TestPlainNodeOthers(t *testing.T) {
	if !onOldMachine(t) {
		return
	}
	n := newPlainNode(t)
	n.live("pod")
	process := home.command(n.machine, "unshare", "--net", "sleep", "300") // nerdctl: runc makes the namespace
	if err := process.Start(); err != nil {
		t.Fatal(err)
	}
	end := sync.OnceFunc(func() {
		_ = process.Process.Kill()
		_ = process.Wait()
	})
	t.Cleanup(end)
	var own string
	eventually(t, "a namespace of its own", func() bool {
		own = fmt.Sprintf("/proc/%d/ns/net", process.Process.Pid)
		theirs, _ := os.Readlink(own)
		ours, _ := os.Readlink("/proc/self/ns/net")
		return theirs != "" && theirs != ours
	})
	n.netns("podman")
	for _, c := range []libcni.RuntimeConf{
		{ContainerID: "default-nerdctl", NetNS: own, IfName: "eth0", Args: [][2]string{{"IgnoreUnknown", "1"}}},
		{ContainerID: "podman", NetNS: n.pin("podman"), IfName: "eth0", Args: [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAME", "podman"}}},
	} {
		if _, err := n.cni.AddNetworkList(context.Background(), n.list, &c); err != nil {
			t.Fatal(err)
		}
		n.age(c.ContainerID)
	}
	all := n.look()
	want := func(args []string, code int, texts ...string) {
		t.Helper()
		out := n.ctl(args...)
		for _, text := range texts {
			if out.code != code || !strings.Contains(out.stdout, text) {
				t.Errorf("%v: %d, want %d, %q:\n%s%s", args, out.code, code, text, out.stdout, out.stderr)
			}
		}
		if diff := cmp.Diff(all, n.look()); diff != "" {
			t.Errorf("%v: -before +after:\n%s", args, diff)
		}
	}
	covered := "no list of the runtime covers its owner, but an interface has the address"
	want([]string{"ipam", "-o", "wide"}, 0, covered)
	want([]string{"sweep", "--json"}, 0, covered)
	want([]string{"sweep"}, 0, "3 only in libcni's cache: 3 live.\n")
	for _, id := range []string{"default-nerdctl", "podman"} { // host-local's files alone
		away := n.cacheFile(id) + ".away"
		if err := os.Rename(n.cacheFile(id), away); err != nil {
			t.Fatal(err)
		}
		before := all
		all = n.look()
		want([]string{"sweep", "--json"}, 0, "an interface has the address")
		if err := os.Rename(away, n.cacheFile(id)); err != nil {
			t.Fatal(err)
		}
		all = before
	}

	end()
	n.drop("podman")
	eventually(t, "the addresses are gone", func() bool {
		links := n.must(home.command(n.machine, "ip", "-o", "link", "show", "type", "veth"))
		return strings.Count(links, "master adopt0") == 1
	})
	uncovered := "its owner is not in the journal, and no list of the runtime covers it"
	want([]string{"ipam"}, 0, "3 used (1 live, 0 leaked, 0 ownerless, 2 unknown)", uncovered)
	want([]string{"sweep"}, 1, uncovered, ": 2 unknown, 1 live.\n")
	n.wantNoJournal()
}

// TestInContainer: a command in a container that has neither a conflist nor a journal says so. It
// says nothing of the node, which may have both.
func TestInContainer(t *testing.T) {
	t.Parallel()
	n := newMachine(t)
	c := n.newContainer("--mount", "--net")
	for _, args := range []string{"list", "sweep", "sweep --dry-run --cri auto", "ipam", "ipam --json", "history"} {
		out := n.run(c.command(n, strings.Fields(args)...))
		if out.code != 1 || out.stdout != "" || !strings.Contains(out.stderr, "error: this is a container without a conflist in "+
			"/etc/cni/net.d or a journal in /var/lib/cni/unwind: it does not show the state of the node\nhint: run this on the node") {
			t.Errorf("%s: %+v", args, out)
		}
	}
	if out := n.run(c.command(n, "list", "--state-dir", "/state")); out.code != 0 {
		t.Errorf("a directory that is given: %+v", out)
	}
}
