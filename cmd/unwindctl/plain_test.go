package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/rogpeppe/go-internal/testscript"
	"github.com/vishvananda/netlink"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cni-unwind/journal"
	"cni-unwind/plugin/plugintest/nodetest"
	"cni-unwind/plugin/plugintest/sandbox"
)

// plainNode is a node without unwind, to which only unwindctl was copied. libcni runs the chain,
// and a fake runtime lists the pods. libcni's cache and host-local's files are at their usual
// paths, so each test uses namespaces of its own: see sandbox.Apart.
type plainNode struct {
	*machine
	chain   plainChain
	confDir string
	binDir  string // the directory of the plugins that unwindctl runs
	list    *libcni.NetworkConfigList
	cni     *libcni.CNIConfig
	cri     *nodetest.FakeCRI
	socket  string
	listed  []string
	ports   int
	seen    map[string]seen // the results of the script command look NAME, by NAME
}

const (
	cniDir   = "/var/lib/cni"
	poolDir  = cniDir + "/networks/" + network
	cacheDir = cniDir + "/results"

	byIPTables = `{"type": "portmap", "capabilities": {"portMappings": true}}`
	byNFTables = `{"type": "portmap", "capabilities": {"portMappings": true}, "backend": "nftables"}`
	firewall   = `{"type": "firewall"}`
	shaping    = `{"type": "bandwidth", "ingressRate": 8000000, "ingressBurst": 8000000, "egressRate": 8000000, "egressBurst": 8000000}`
)

// plainChain is a chain that begins with bridge: some keys of bridge, and the plugins after it.
// Scripts use the chain's name as a condition.
type plainChain struct{ name, bridge, plugins string }

var usual = plainChain{"usual", `"ipMasq": true`, byIPTables + "," + firewall}

// allAddresses is the last address of a pool with 17 addresses.
const allAddresses = "10.77.0.18"

// TestPlain runs the scripts of testdata/plain on nodes with the usual chain.
func TestPlain(t *testing.T) {
	plainScripts(t, "../../testdata/plain", usual)
}

// TestLeft runs the scripts of testdata/left on nodes whose chains leave different kinds of rules
// and devices.
func TestLeft(t *testing.T) {
	for _, chain := range []plainChain{
		{"iptables", usual.bridge, usual.plugins + "," + shaping},
		{"nftables", `"ipMasq": true, "ipMasqBackend": "nftables"`, byNFTables + "," + shaping},
		{"firewall", `"ipMasq": false`, firewall},
		{"bandwidth", `"ipMasq": false`, shaping},
	} {
		t.Run(chain.name, func(t *testing.T) { plainScripts(t, "../../testdata/left", chain) })
	}
}

// inTurn ignores Parallel, so that a script runs as soon as it is started.
type inTurn struct{ *testing.T }

func (inTurn) Parallel() {}

func (inTurn) Verbose() bool { return testing.Verbose() }

func (t inTurn) Run(name string, f func(testscript.T)) {
	t.T.Run(name, func(t *testing.T) { f(inTurn{t}) })
}

// plainScripts runs the scripts of a directory, each on a node of its own.
func plainScripts(t *testing.T, dir string, chain plainChain) {
	files, err := filepath.Glob(filepath.Join(dir, "*.txtar"))
	check(t, err)
	each := sandbox.Rounds(2, 1, 1)
	for _, file := range files {
		if name := filepath.Base(file); sandbox.Sampled(each, len(name)) {
			t.Run(strings.TrimSuffix(name, ".txtar"), func(t *testing.T) {
				if apart(t) {
					plainScript(t, file, chain)
				}
			})
		}
	}
}

func plainScript(t *testing.T, file string, chain plainChain) {
	verbs := map[string]func(*testscript.TestScript, bool, []string){}
	for name, do := range plainVerbs {
		verbs[name] = func(ts *testscript.TestScript, neg bool, args []string) {
			do(ts.Value("n").(*plainNode), ts, neg, args)
		}
	}
	testscript.RunT(inTurn{t}, testscript.Params{
		Files: []string{file}, RequireExplicitExec: true, Cmds: verbs,
		Condition: func(name string) (bool, error) { return name == chain.name, nil },
		Setup: func(env *testscript.Env) error {
			n := newPlainNode(env.T().(inTurn).T, chain, allAddresses)
			env.Values["n"] = n
			for name, value := range map[string]string{
				"PATH": n.bin + ":" + env.Getenv("PATH"), "GORACE": noExitDelay, "POOL": poolDir, "CACHE": cacheDir, "STATE": n.state,
				"CONF": n.confDir, "CRI": n.socket, "TOOLS": n.tools, "PLUGINS": n.binDir, "PROGRAMS": n.bin, "NETNS": filepath.Join(n.dir, "netns"), "LONG": strings.Repeat("0123456789abcdef", 6),
			} {
				env.Setenv(name, value)
			}
			return nil
		},
	})
}

// plainVerbs maps the commands of scripts for nodes without unwind to their implementations.
var plainVerbs = map[string]func(n *plainNode, ts *testscript.TestScript, neg bool, args []string){
	// ctl [CODE] ARG…: runs unwindctl with the node's directories and the runtime at $CRI, and checks
	// its exit code (default 0).
	"ctl": func(n *plainNode, ts *testscript.TestScript, _ bool, args []string) {
		want, err := strconv.Atoi(args[0])
		if err == nil {
			args = args[1:]
		}
		err = ts.Exec("unwindctl", n.ctlArgs(ts.Getenv("CRI"), args)...)
		var ended *exec.ExitError
		if errors.As(err, &ended); (err != nil || want != 0) && (ended == nil || ended.ExitCode() != want) {
			ts.Fatalf("%v, want exit code %d", err, want)
		}
	},
	// live ID…: attaches pods, and adds them to the runtime's list.
	// leak ID…: attaches pods that then disappear without a DEL. ID*3 stands for ID0, ID1 and ID2.
	"live": func(n *plainNode, _ *testscript.TestScript, _ bool, args []string) { n.live(manyIDs(args)...) },
	"leak": func(n *plainNode, _ *testscript.TestScript, _ bool, args []string) { n.leak(manyIDs(args)...) },
	// add ID [ADDRESS [FILE]]: runs an ADD, which must assign the address. The network namespace is
	// new or, with FILE, that of the process whose ID is in the file.
	"add": func(n *plainNode, ts *testscript.TestScript, _ bool, args []string) {
		conf := n.runtimeConf(args[0])
		if len(args) > 2 {
			conf.NetNS = "/proc/" + strings.TrimSpace(ts.ReadFile(args[2])) + "/ns/net"
		} else {
			n.netns(args[0])
		}
		if got := n.mustAdd(conf); len(args) > 1 && got != args[1] {
			ts.Fatalf("another address: %s", got)
		}
	},
	// slow: makes the runtime answer slowly from now on, as if overloaded, and report its directories.
	"slow": func(n *plainNode, _ *testscript.TestScript, _ bool, _ []string) {
		n.cri.Info = map[string]string{"cniconfig": fmt.Sprintf(`{"PluginConfDir": %q, "PluginDirs": [%q]}`, n.confDir, n.binDir)}
		n.cri.Slow.Store(true)
	},
	// deaf PATH: creates a socket on which nobody answers.
	"deaf": func(n *plainNode, ts *testscript.TestScript, _ bool, args []string) {
		l, err := new(net.ListenConfig).Listen(context.Background(), "unix", ts.MkAbs(args[0]))
		ts.Check(err)
		n.Cleanup(func() { _ = l.Close() })
	},
	// journal VERB DIR ARG…: see nodetest.WriteJournal.
	"journal": func(_ *plainNode, ts *testscript.TestScript, neg bool, args []string) {
		nodetest.WriteJournal(ts, neg, args)
	},
	// netns ID…, drop ID…: create and remove network namespaces.
	"netns": func(n *plainNode, _ *testscript.TestScript, _ bool, ids []string) { n.netns(ids...) },
	"drop": func(n *plainNode, _ *testscript.TestScript, _ bool, ids []string) {
		for _, id := range ids {
			n.drop(id)
		}
	},
	// list [ID…]: sets the pods that the runtime lists. With "error", listing pods fails.
	"list": func(n *plainNode, _ *testscript.TestScript, _ bool, ids []string) { n.listed = ids },
	// clock kept: gives /dev/null the time of the boot, because the kernel creates it at that time.
	// clock set: gives /dev/null an earlier time, as if the wall clock had changed since the boot.
	"clock": func(n *plainNode, ts *testscript.TestScript, _ bool, args []string) {
		boot := time.Now().Add(-time.Duration(journal.BootNanos()))
		if args[0] == "set" {
			boot = boot.Add(-time.Hour)
		}
		device := filepath.Join(n.TempDir(), "null")
		n.Cleanup(func() { _ = syscall.Unmount("/dev/null", syscall.MNT_DETACH) })
		ts.Check(errors.Join(syscall.Mknod(device, syscall.S_IFCHR|0o666, 1<<8|3), os.Chtimes(device, boot, boot),
			syscall.Mount(device, "/dev/null", "", syscall.MS_BIND, "")))
	},
	// age ID [AGE]: gives the container's host-local files and its entry in libcni's cache this age
	// (default: past the grace period).
	// touch ID: sets the time of the container's host-local file to now.
	"age": func(n *plainNode, ts *testscript.TestScript, _ bool, args []string) {
		by, err := time.ParseDuration(append(args, sandbox.OldEnough.String())[1])
		ts.Check(err)
		n.ageBy(args[0], by)
	},
	"touch": func(n *plainNode, ts *testscript.TestScript, _ bool, args []string) {
		ts.Check(os.Chtimes(n.reserved(args[0])[0], time.Time{}, time.Now()))
	},
	// reserved ID…: checks that each container has an address or, with !, that none has one.
	"reserved": func(n *plainNode, ts *testscript.TestScript, neg bool, ids []string) {
		for _, id := range ids {
			if got := n.reserved(id); (len(got) > 0) == neg {
				ts.Fatalf("%s has %q", id, got)
			}
		}
	},
	// whole ID…: see wantWhole.
	"whole": func(n *plainNode, _ *testscript.TestScript, _ bool, ids []string) { n.wantWhole(ids) },
	// look NAME: saves a list of everything that the plugins have created on the node.
	// same NAME [PART [PATTERN]]: checks that the list's PART has not changed, except that all lines
	// that match PATTERN are gone. PART is "all" (the default), "rules", "reserved" or "cached".
	"look": func(n *plainNode, _ *testscript.TestScript, _ bool, args []string) { n.seen[args[0]] = n.look() },
	"same": func(n *plainNode, ts *testscript.TestScript, _ bool, args []string) {
		want, got := maps.Clone(n.seen[args[0]]), n.look()
		for part := range want {
			if len(args) > 1 && args[1] != "all" && args[1] != part {
				want[part] = got[part]
			} else if len(args) > 2 {
				want[part] = slices.DeleteFunc(slices.Clone(want[part]), regexp.MustCompile(args[2]).MatchString)
			}
		}
		if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
			ts.Fatalf("-%s +got:\n%s", args[0], diff)
		}
	},
	"eventually": func(_ *plainNode, ts *testscript.TestScript, neg bool, args []string) { untilItSucceeds(ts, neg, args) },
}

// newPlainNode returns a node with this chain and with a pool from 10.77.0.2 to the address last.
func newPlainNode(t *testing.T, chain plainChain, last string) *plainNode {
	t.Helper()
	n := &plainNode{machine: newMachine(t), chain: chain, ports: 20000, seen: map[string]seen{}}
	n.binDir = filepath.Join(n.tools, "cni")
	n.confDir = filepath.Join(n.dir, "net.d")
	conflist := fmt.Sprintf(`{"cniVersion": "1.0.0", "name": %q, "plugins": [
		{"type": "bridge", "bridge": "adopt0", "isGateway": true, %s, "ipam": {"type": "host-local",
			"subnet": "10.77.0.0/27", "rangeStart": "10.77.0.2", "rangeEnd": %q}}, %s]}`, network, chain.bridge, last, chain.plugins)
	var err error
	n.list, err = libcni.ConfListFromBytes([]byte(conflist))
	if err = errors.Join(err, os.Mkdir(n.confDir, 0o755),
		os.WriteFile(filepath.Join(n.confDir, "10-podnet.conflist"), []byte(conflist), 0o600)); err != nil {
		t.Fatal(err)
	}
	n.cni = libcni.NewCNIConfigWithCacheDir([]string{filepath.Join(n.tools, "cni")}, cniDir, nil)
	n.cri = &nodetest.FakeCRI{List: func(context.Context) (all []*cri.PodSandbox, err error) {
		for _, id := range n.listed {
			if id == "error" {
				return nil, errors.New("no")
			}
			all = append(all, nodetest.Sandbox(id, cri.PodSandboxState_SANDBOX_READY))
		}
		return all, nil
	}}
	n.socket = n.cri.Serve(t)
	n.removeLink("adopt0")
	t.Cleanup(func() {
		_ = os.RemoveAll(poolDir)
		_ = os.RemoveAll(cacheDir)
		for _, flush := range []string{"-t nat -F", "-t nat -X", "-F", "-X"} {
			n.run(home.command(n.machine, "iptables", strings.Fields("-w "+flush)...))
		}
		if n.onNFTables() {
			n.run(home.command(n.machine, "nft", "flush", "ruleset"))
		}
		for _, name := range n.links("ifb") {
			n.removeLink(name)
		}
	})
	return n
}

func (n *plainNode) onNFTables() bool { return strings.Contains(n.chain.plugins, "nftables") }

// links returns the names of all interfaces of a kind, such as veth.
func (n *plainNode) links(kind string) (names []string) {
	n.Helper()
	all, err := netlink.LinkList()
	for errors.Is(err, netlink.ErrDumpInterrupted) {
		all, err = netlink.LinkList()
	}
	check(n, err)
	for _, l := range all {
		if l.Type() == kind {
			names = append(names, l.Attrs().Name)
		}
	}
	return names
}

// runtimeConf returns the configuration that a runtime passes for a pod with a host port. If the ID
// is "nerdctl" or "podman", Args are what that program passes for a container.
func (n *plainNode) runtimeConf(id string) *libcni.RuntimeConf {
	n.ports++
	args := [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAME", id}, {"K8S_POD_NAMESPACE", "default"}}
	if kept, other := map[string]int{"nerdctl": 1, "podman": 2}[id]; other {
		args = args[:kept]
	}
	return &libcni.RuntimeConf{ContainerID: id, NetNS: n.pin(id), IfName: "eth0", Args: args,
		CapabilityArgs: map[string]any{"portMappings": []any{map[string]any{"hostPort": n.ports, "containerPort": 80, "protocol": "tcp"}}}}
}

// live attaches pods, and adds them to the runtime's list.
func (n *plainNode) live(ids ...string) {
	n.Helper()
	n.netns(ids...)
	for _, id := range ids {
		n.mustAdd(n.runtimeConf(id))
		n.listed = append(n.listed, id)
	}
}

// mustAdd attaches a pod as a runtime without unwind does, and returns its address.
func (n *plainNode) mustAdd(conf *libcni.RuntimeConf) string {
	n.Helper()
	r, err := n.cni.AddNetworkList(context.Background(), n.list, conf)
	if err != nil {
		n.Fatalf("ADD %s: %v", conf.ContainerID, err)
	}
	result, err := types100.NewResultFromResult(r)
	check(n, err)
	return result.IPs[0].Address.IP.String()
}

// leak attaches pods, removes their network namespaces without a DEL, and makes their files older
// than the grace period.
func (n *plainNode) leak(ids ...string) {
	n.Helper()
	n.netns(ids...)
	for _, id := range ids {
		n.mustAdd(n.runtimeConf(id))
		links := len(n.links("veth"))
		n.drop(id)
		eventually(n, "the interfaces of "+id+" are gone", func() bool { return len(n.links("veth")) < links })
		n.ageBy(id, sandbox.OldEnough)
	}
}

// ageBy gives a container's host-local files and its entry in libcni's cache this age.
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

// reserved returns host-local's files with the addresses of a container or, with "", of all
// containers.
func (n *plainNode) reserved(id string) (paths []string) {
	n.Helper()
	files, err := filepath.Glob(filepath.Join(poolDir, "10.*"))
	check(n, err)
	for _, path := range files {
		if info, err := os.Lstat(path); err == nil && !info.Mode().IsRegular() {
			continue
		}
		data, err := os.ReadFile(path)
		check(n, err)
		if strings.HasPrefix(string(data), id) {
			paths = append(paths, path)
		}
	}
	return paths
}

// seen contains everything that plugins create on a node: rules and ifb devices, reserved
// addresses, and entries of libcni's cache.
type seen map[string][]string

var counters = regexp.MustCompile(` \[.*`)

func (n *plainNode) look() seen {
	n.Helper()
	rules := n.links("ifb")
	for _, line := range strings.Split(n.must(home.command(n.machine, "iptables-save")), "\n") {
		if strings.HasPrefix(line, "-A") || strings.HasPrefix(line, ":CNI-") {
			rules = append(rules, counters.ReplaceAllString(line, ""))
		}
	}
	slices.Sort(rules)
	for _, table := range []string{"inet cni_plugins_masquerade", "ip cni_hostport"} {
		if n.onNFTables() {
			out := n.run(home.command(n.machine, "nft", strings.Fields("list table "+table)...))
			rules = append(rules, strings.Split(out.stdout, "\n")...)
		}
	}
	cached, _ := filepath.Glob(filepath.Join(cacheDir, "*"))
	return seen{"rules": rules, "reserved": n.reserved(""), "cached": cached}
}

func (n *plainNode) ctlArgs(socket string, args []string) []string {
	args = append(slices.Clone(args), "--conf-dir", n.confDir, "--state-dir", n.state, "--cri", socket)
	if args[0] == "sweep" {
		args = append(args, "--cni-bin-dir", n.binDir)
	}
	return args
}

func (n *plainNode) ctl(args ...string) outcome {
	n.Helper()
	return n.run(n.unwindctl(n.ctlArgs(n.socket, args)...))
}

func ids(prefix string, count int) (all []string) {
	for i := range count {
		all = append(all, fmt.Sprintf("%s%d", prefix, i))
	}
	return all
}

// manyIDs expands IDs of a script: ID*3 stands for ID0, ID1 and ID2.
func manyIDs(names []string) (all []string) {
	for _, name := range names {
		prefix, count, many := strings.Cut(name, "*")
		if n, err := strconv.Atoi(count); many && err == nil {
			all = append(all, ids(prefix, n)...)
		} else {
			all = append(all, name)
		}
	}
	return all
}

// TestPlainNodeWhileADDs: two sweeps release dead pods while ADDs run without unwind. The sweeps'
// list of pods is older than these ADDs. The live and the dead pods fill the pool, so the ADDs get
// addresses that a sweep has just released. In the end, live pods have everything that their ADDs
// created, and nothing of the dead pods is left.
func TestPlainNodeWhileADDs(t *testing.T) {
	if !apart(t) {
		return
	}
	rounds := sandbox.Rounds(2, 4, 200)
	n := newPlainNode(t, usual, "10.77.0.6")
	n.live(ids("live", 3)...)
	live := n.look()
	for round := range rounds {
		dead := ids(fmt.Sprintf("dead%d-", round), 2)
		n.leak(dead...)
		gone := map[int]string{1: n.reserved(dead[0])[0], 3: n.cacheFile(dead[0])}[round%4]
		if gone != "" { // one dead pod has lost its reservation or its cache entry
			check(t, os.Remove(gone))
		}
		young := ids(fmt.Sprintf("young%d-", round), 2)
		n.netns(young...)
		var all sync.WaitGroup
		errs, outs, confs := make([]error, len(young)), make([]outcome, 2), make([]*libcni.RuntimeConf, len(young))
		for i := range outs {
			all.Go(func() { outs[i] = n.ctl("sweep") })
		}
		for i, id := range young {
			confs[i] = n.runtimeConf(id)
			all.Go(func() {
				time.Sleep(time.Duration(round*97%400) * time.Millisecond)
				errs[i] = n.addOnceFree(confs[i])
			})
		}
		all.Wait()
		for _, out := range slices.Concat(outs, []outcome{n.ctl("sweep")}) {
			if out.code != 0 {
				t.Errorf("round %d: sweep: %+v", round, out)
			}
		}
		if err := errors.Join(errs...); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		n.must(home.command(n.machine, "ip", "neigh", "flush", "dev", "adopt0")) // drop previous owners' MAC addresses
		n.wantWhole(append(ids("live", 3), young...))
		for i, id := range young {
			if err := n.cni.DelNetworkList(context.Background(), n.list, confs[i]); err != nil {
				t.Fatalf("round %d: DEL: %v", round, err)
			}
			n.drop(id)
		}
		n.ctl("sweep") // runs DELs that waited because a young pod had the address
		if diff := cmp.Diff(live, n.look()); diff != "" {
			t.Fatalf("round %d: -what the live pods have +what is there:\n%s", round, diff)
		}
	}
	if _, err := os.Lstat((&journal.Store{Dir: n.state}).Path()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a journal is there: %v", err)
	}
}

// addOnceFree repeats an ADD until an address is free, and sends a DEL after each failed ADD.
func (n *plainNode) addOnceFree(conf *libcni.RuntimeConf) (err error) {
	for range 100 {
		_, err = n.cni.AddNetworkList(context.Background(), n.list, conf)
		if err == nil || !strings.Contains(err.Error(), "no IP addresses available") {
			return err
		}
		if err := n.cni.DelNetworkList(context.Background(), n.list, conf); err != nil {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
	return err
}

// wantWhole checks that each pod has one address, which replies to ping, that libcni's cache has an
// entry for the pod, and that libcni's CHECK of the chain succeeds.
func (n *plainNode) wantWhole(pods []string) {
	n.Helper()
	for _, id := range pods {
		reserved := n.reserved(id)
		if len(reserved) != 1 {
			n.Errorf("%s has %q", id, reserved)
			continue
		}
		n.must(home.command(n.machine, "ping", "-c1", "-W5", filepath.Base(reserved[0])))
		cached, err := n.cni.GetNetworkListCachedResult(n.list, n.runtimeConf(id))
		if err != nil || cached == nil {
			n.Errorf("the cache of %s: %v, %v", id, cached, err)
			continue
		}
		_, conf, err := n.cni.GetNetworkListCachedConfig(n.list, n.runtimeConf(id))
		if err == nil {
			err = n.cni.CheckNetworkList(context.Background(), n.list, conf)
		}
		if err != nil {
			n.Errorf("CHECK %s: %v", id, err)
		}
	}
}
