package plugin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/undo"
	"cni-unwind/testdata/sandbox"
	"cni-unwind/testdata/unwind/env"
)

// node is a machine to a runtime and unwind: a network of its own, its directories, its pods. The
// runtime is libcni, with its cache.
type node struct {
	testing.TB
	dir      string
	network  string
	bridge   string
	subnet   string // of the bridge, a /24
	stateDir string
	path     []string // CNI_PATH
	cni      *libcni.CNIConfig
	env      []string       // more environment for unwind
	conf     map[string]any // more keys for unwind's entry
	outer    string         // cniVersion of unwind's conflist
	inner    string         // cniVersion of the chain
	store    *journal.Store
	ruled    *atomic.Bool // a plugin was named that makes rules
	mayDie   bool         // unwind may be killed in a GC or a STATUS
	budgets  []string     // NAME=TIME; the others are env.Long
}

var nodes atomic.Int64

func newNode(t testing.TB) *node {
	t.Helper()
	sandbox.Need(t)
	must(t, makeSharedChains())
	i := int(nodes.Add(1))
	tools := toolsDir(t)
	n := &node{
		TB: t, dir: t.TempDir(), network: fmt.Sprintf("net%d", i), bridge: fmt.Sprintf("br%d", i),
		subnet: fmt.Sprintf("10.%d.%d.0/24", 100+i/250, i%250), outer: "1.0.0", inner: "1.0.0",
		conf: map[string]any{"logLevel": "debug", "gracePeriod": "0s"},
	}
	n.stateDir = filepath.Join(n.dir, "state")
	n.env = []string{env.Cache + "=" + n.cacheDir()}
	bin := filepath.Join(n.dir, "bin")
	n.mkdir(bin)
	n.mkdir(n.faultyDir())
	program, err := underTest()
	must(t, err)
	must(t, os.Symlink(program, filepath.Join(bin, netconf.Name)))
	n.path = []string{bin, filepath.Join(tools, "cni"), filepath.Join(tools, "test")}
	n.cni = libcni.NewCNIConfigWithCacheDir(n.path, filepath.Join(n.dir, "cache"), &nodeExec{node: n,
		RawExec: invoke.RawExec{Stderr: n.stderr()}})
	n.store = &journal.Store{Dir: n.stateDir}
	n.ruled = new(atomic.Bool)
	t.Cleanup(func() {
		if link, err := netlink.LinkByName(n.bridge); err == nil {
			_ = netlink.LinkDel(link)
		}
	})
	return n
}

// nodeExec is libcni's own way to run a plugin, with more environment.
type nodeExec struct {
	invoke.RawExec
	version.PluginDecoder
	node *node
}

func (e *nodeExec) ExecPlugin(ctx context.Context, path string, stdin []byte, env []string) ([]byte, error) {
	e.node.seeConfiguration(stdin)
	return e.RawExec.ExecPlugin(ctx, path, stdin, append(env, e.node.env...))
}

// seeConfiguration notes whether a configuration may make a plugin write rules.
func (n *node) seeConfiguration(stdin []byte) {
	if rulesOf.Match(stdin) {
		n.ruled.Store(true)
	}
}

// rulesOf are the plugins and keys of chains that make rules. A chainFile may have any.
var rulesOf = regexp.MustCompile(`firewall|portmap|ipMasq|macspoofchk|chainFile`)

// stderr is a file that collects unwind's log; it is printed if the test fails.
func (n *node) stderr() *os.File {
	f, err := os.Create(filepath.Join(n.dir, "stderr"))
	must(n, err)
	n.Cleanup(func() {
		_ = f.Close()
		if n.Failed() {
			n.Logf("stderr of successful verbs:\n%s", n.log())
		}
	})
	return f
}

// log returns the log of verbs that succeeded.
func (n *node) log() string {
	return read(n, filepath.Join(n.dir, "stderr"))
}

func (n *node) mkdir(path string) {
	n.Helper()
	must(n, os.MkdirAll(path, 0o755))
}

// The plugins of chains. extra is appended to the object and begins with a comma.

func (n *node) bridgePlugin(extra string) string {
	return fmt.Sprintf(`{"type": "bridge", "bridge": %q, "isGateway": true, "ipam": %s%s}`, n.bridge, n.hostLocal(n.subnet), extra)
}

func (n *node) hostLocal(subnet string) string {
	return fmt.Sprintf(`{"type": "host-local", "subnet": %q, "dataDir": %q}`, subnet, n.dataDir())
}

func (n *node) faulty(instance, extra string) string {
	return fmt.Sprintf(`{"type": "faulty", "dir": %q, "instance": %q%s}`, n.faultyDir(), instance, extra)
}

// pooled is a delegate that calls host-local, as bridge does, with the addresses from first to
// last.
func (n *node) pooled(instance string, first, last int) string {
	net := strings.TrimSuffix(n.subnet, "0/24")
	return n.faulty(instance, fmt.Sprintf(`, "ipam": {"type": "host-local", "dataDir": %q, "ranges": [[{"subnet": %q, `+
		`"rangeStart": "%s%d", "rangeEnd": "%s%d"}]]}`, n.dataDir(), n.subnet, net, first, net, last))
}

// cacheDir is the directory of libcni's results.
func (n *node) cacheDir() string { return filepath.Join(n.dir, "cache", "results") }

// cacheFile is libcni's file with the result of the pod's ADD.
func (p *pod) cacheFile() string {
	return filepath.Join(p.cacheDir(), fmt.Sprintf("%s-%s-%s", p.network, p.ContainerID, p.IfName))
}

func (n *node) dataDir() string   { return filepath.Join(n.dir, "ipam") }
func (n *node) faultyDir() string { return filepath.Join(n.dir, "faulty") }

// unwind returns a conflist with unwind around a chain of the given plugins.
func (n *node) unwind(plugins ...string) *libcni.NetworkConfigList {
	n.Helper()
	return n.unwindChain(fmt.Sprintf(`{"cniVersion": %q, "plugins": [%s]}`, n.inner, strings.Join(plugins, ", ")))
}

// unwindChain is unwind with this text as the chain.
func (n *node) unwindChain(chain string) *libcni.NetworkConfigList {
	n.Helper()
	entry := map[string]any{
		"type": netconf.Name, "stateDir": n.stateDir, "chain": json.RawMessage(chain),
		"capabilities": map[string]bool{"portMappings": true, "bandwidth": true, "ips": true, "mac": true},
	}
	for k, v := range n.conf {
		if v == nil {
			delete(entry, k)
		} else {
			entry[k] = v
		}
	}
	data, err := json.Marshal(entry)
	must(n, err)
	return n.list(n.outer, string(data))
}

// plain returns a conflist of the plugins themselves.
func (n *node) plain(plugins ...string) *libcni.NetworkConfigList {
	n.Helper()
	return n.list(n.inner, plugins...)
}

func (n *node) list(cniVersion string, plugins ...string) *libcni.NetworkConfigList {
	n.Helper()
	list, err := libcni.NetworkConfFromBytes(fmt.Appendf(nil,
		`{"cniVersion": %q, "name": %q, "loadOnlyInlinedPlugins": true, "plugins": [%s]}`,
		cniVersion, n.network, strings.Join(plugins, ", ")))
	must(n, err)
	return list
}

// pod is a container ID and a network namespace.
type pod struct {
	*node
	libcni.RuntimeConf
}

// pod makes a network namespace and a pod in it.
func (n *node) pod(name string) *pod {
	n.Helper()
	return &pod{n, libcni.RuntimeConf{
		ContainerID: name, NetNS: n.netns(name), IfName: "eth0",
		Args: [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", "default"}, {"K8S_POD_NAME", name}},
	}}
}

// netns makes a network namespace, pinned by a mount.
func (n *node) netns(name string) string {
	n.Helper()
	path := filepath.Join(n.dir, "netns", name)
	n.mkdir(filepath.Dir(path))
	must(n, os.WriteFile(path, nil, 0o600))
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with its goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = unix.Mount(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()), path, "", unix.MS_BIND, "")
		}
		done <- err
	}()
	must(n, <-done)
	n.Cleanup(func() { _ = unix.Unmount(path, unix.MNT_DETACH) })
	return path
}

// dropNetNS removes the pod's network namespace, as a runtime does, and waits until its interfaces
// are gone.
func (p *pod) dropNetNS() {
	p.Helper()
	must(p, unix.Unmount(p.NetNS, unix.MNT_DETACH))
	must(p, os.Remove(p.NetNS))
	entries := p.entries()
	eventually(p, "host interfaces of "+p.ContainerID+" gone", func() bool {
		for _, e := range entries {
			if e.ContainerID == p.ContainerID {
				if there, _ := facts.LinkThere(e.Got.HostLinks); there {
					return false
				}
			}
		}
		return true
	})
}

func (p *pod) add(list *libcni.NetworkConfigList) (types.Result, error) {
	ctx, cancel := context.WithTimeout(context.Background(), sandbox.Patience)
	defer cancel()
	return p.cni.AddNetworkList(ctx, list, &p.RuntimeConf)
}

func (p *pod) del(list *libcni.NetworkConfigList) error {
	ctx, cancel := context.WithTimeout(context.Background(), sandbox.Patience)
	defer cancel()
	return p.cni.DelNetworkList(ctx, list, &p.RuntimeConf)
}

func (p *pod) check(list *libcni.NetworkConfigList) error {
	ctx, cancel := context.WithTimeout(context.Background(), sandbox.Patience)
	defer cancel()
	return p.cni.CheckNetworkList(ctx, list, &p.RuntimeConf)
}

func (p *pod) mustAdd(list *libcni.NetworkConfigList) types.Result {
	p.Helper()
	r, err := p.add(list)
	if err != nil {
		p.Fatalf("ADD %s: %v", p.ContainerID, err)
	}
	return r
}

func (p *pod) mustDel(list *libcni.NetworkConfigList) {
	p.Helper()
	if err := p.del(list); err != nil {
		p.Fatalf("DEL %s: %v", p.ContainerID, err)
	}
}

// key returns the pod's attachment.
func (p *pod) key() journal.Key {
	return journal.Key{Network: p.network, ContainerID: p.ContainerID, IfName: p.IfName}
}

// entry returns the pod's entry in the journal, or nil.
func (p *pod) entry() *journal.Entry {
	p.Helper()
	if all := p.records(); len(all) > 0 {
		return all[0]
	}
	return nil
}

// entries returns the whole journal.
func (n *node) entries() []*journal.Entry {
	n.Helper()
	return entriesOf(n, n.store)
}

func entriesOf(t testing.TB, s *journal.Store) (all []*journal.Entry) {
	t.Helper()
	err := s.View(context.Background(), func(tx *journal.Tx) error {
		return tx.All(func(e *journal.Entry, err error) error {
			all = append(all, e)
			return err
		})
	})
	if err != nil && !errors.Is(err, unix.ENOENT) { // a STATUS that was cut off may be creating it
		t.Fatalf("the journal: %v", err)
	}
	return all
}

// plan sets the faulty plugins' modes: instance → verb → mode.
func (n *node) plan(plan map[string]map[string]string) {
	n.Helper()
	data, err := json.Marshal(plan)
	must(n, err)
	path := filepath.Join(n.faultyDir(), "plan.json")
	if err := errors.Join(os.WriteFile(path+".new", data, 0o600), os.Rename(path+".new", path)); err != nil {
		n.Fatal(err) // by a rename: a plugin may be reading it
	}
}

// taken returns the files that the faulty plugins hold.
func (n *node) taken() []string { return n.names(filepath.Join(n.faultyDir(), "taken")) }

// addressRules returns the rules of the faulty plugins, as ADDRESS.INSTANCE.
func (n *node) addressRules() []string { return n.names(filepath.Join(n.faultyDir(), "rules")) }

// reserved returns host-local's reservations, with their owners.
func (n *node) reserved() map[string]string {
	owners := map[string]string{}
	dir := filepath.Join(n.dataDir(), n.network)
	for _, name := range n.names(dir) {
		if _, err := netip.ParseAddr(name); err == nil {
			owners[name] = strings.ReplaceAll(read(n, filepath.Join(dir, name)), "\r\n", " ")
		}
	}
	return owners
}

func (n *node) names(dir string) []string {
	files, err := os.ReadDir(dir)
	if err != nil && !os.IsNotExist(err) {
		n.Fatal(err)
	}
	var names []string
	for _, f := range files {
		names = append(names, f.Name())
	}
	return names
}

// logged is a line of the faulty plugin's log.
type logged struct {
	Phase, Command, Mode, Instance, ContainerID, IfName, NetNS, Args, Path string
	PID                                                                    int
	Stdin                                                                  map[string]json.RawMessage
}

// calls returns the calls of the faulty plugins in order, as "VERB instance".
func (n *node) calls() []string {
	n.Helper()
	var calls []string
	for _, l := range n.callLog() {
		calls = append(calls, l.Command+" "+l.Instance)
	}
	return calls
}

// callLog returns the starts of all calls of faulty plugins.
func (n *node) callLog() []logged {
	n.Helper()
	return slices.DeleteFunc(n.wholeLog(), func(l logged) bool { return l.Phase != "start" })
}

// wholeLog returns the starts and ends of the calls of faulty plugins.
func (n *node) wholeLog() (all []logged) {
	n.Helper()
	data, err := os.ReadFile(filepath.Join(n.faultyDir(), "log"))
	if err != nil && !os.IsNotExist(err) {
		n.Fatal(err)
	}
	for line := range bytes.Lines(data) {
		var l logged
		must(n, json.Unmarshal(line, &l))
		all = append(all, l)
	}
	return all
}

// forgetCalls empties the log of the faulty plugins.
func (n *node) forgetCalls() { _ = os.Remove(filepath.Join(n.faultyDir(), "log")) }

// rules returns the lines of iptables-save (both families) that contain one of the texts.
func (n *node) rules(texts ...string) []string {
	n.Helper()
	var lines []string
	for _, save := range []string{"iptables-save", "ip6tables-save"} {
		for _, line := range strings.Split(run(n, save), "\n") {
			if slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(line, text) }) {
				lines = append(lines, line)
			}
		}
	}
	return lines
}

// address returns the first address of a result, without the length of its subnet.
func address(t testing.TB, r types.Result) string {
	t.Helper()
	data, err := json.Marshal(r)
	must(t, err)
	parsed, err := netconf.ParseResult(data)
	if err != nil || len(parsed.Prefixes()) == 0 {
		t.Fatalf("no address in %s (%v)", data, err)
	}
	return parsed.Prefixes()[0].Addr().String()
}

// links returns the names of the interfaces in a network namespace.
func (n *node) links(netns string) []string {
	n.Helper()
	var names []string
	err := ns.WithNetNSPath(netns, func(ns.NetNS) error {
		links, err := netlink.LinkList()
		for _, l := range links {
			names = append(names, l.Attrs().Name)
		}
		return err
	})
	must(n, err)
	return names
}

// nothingLeft checks the invariant at the end of every test: nothing is taken, and the journal is
// empty.
func (n *node) nothingLeft() {
	n.Helper()
	n.nothingOnDisk()
	// The kernel removes those of a namespace that is gone after a while.
	eventually(n, n.bridge+" has no ports", func() bool { return len(n.ports()) == 0 })
	n.noRules()
}

// ports returns the interfaces of the bridge.
func (n *node) ports() (names []string) {
	n.Helper()
	bridge, err := netlink.LinkByName(n.bridge)
	if err != nil {
		return nil
	}
	links, err := netlink.LinkList()
	for errors.Is(err, netlink.ErrDumpInterrupted) { // other tests make and remove interfaces meanwhile
		links, err = netlink.LinkList()
	}
	must(n, err)
	for _, l := range links {
		if l.Attrs().MasterIndex == bridge.Attrs().Index {
			names = append(names, l.Attrs().Name)
		}
	}
	return names
}

// noRules checks that no rule has an address of the node's, or its network in its comment.
func (n *node) noRules() {
	n.Helper()
	if !n.ruled.Load() {
		return
	}
	if rules := n.rules(strings.TrimSuffix(n.subnet, "0/24"), fmt.Sprintf(`name: \"%s\"`, n.network)); len(rules) > 0 {
		n.Errorf("rules are left:\n%s", strings.Join(rules, "\n"))
	}
}

// nothingOnDisk checks that delegates and journal hold nothing.
func (n *node) nothingOnDisk() {
	n.Helper()
	if taken := n.taken(); len(taken) > 0 {
		n.Errorf("faulty plugins still hold %v", taken)
	}
	if reserved := n.reserved(); len(reserved) > 0 {
		n.Errorf("host-local still holds %v", reserved)
	}
	for _, e := range n.entries() {
		n.Errorf("the journal still has %s: %s, %v (%s)", e.Key, e.Undo.State, undo.PendingSteps(e), e.Undo.Reason)
	}
	if locks := n.names(filepath.Join(n.stateDir, "locks")); len(locks) > 0 {
		n.Errorf("%d lock files are left", len(locks))
	}
}

// eventually waits until the condition holds.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	for end := time.Now().Add(sandbox.Patience); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if condition() {
			return
		}
	}
	t.Fatalf("not in time: %s", what)
}

// makeSharedChains makes, once, the chains that all pods of a host share. Plugins that make them at
// the same time fail: iptables cannot make a chain only if it does not exist.
var makeSharedChains = sync.OnceValue(func() error {
	for _, restore := range []string{"iptables-restore", "ip6tables-restore"} {
		cmd := exec.Command(restore, "--noflush")
		cmd.Stdin = strings.NewReader("*filter\n:CNI-FORWARD -\n:CNI-ADMIN -\nCOMMIT\n*nat\n:CNI-HOSTPORT-DNAT -\n" +
			":CNI-HOSTPORT-SETMARK -\n:CNI-HOSTPORT-MASQ -\nCOMMIT\n")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", restore, err, out)
		}
	}
	return nil
})

func (n *node) hangsDir() string { return filepath.Join(n.dir, "hangs") }

// budget sets one of unwind's budgets: NAME=TIME.
func (n *node) budget(text string) {
	n.budgets = append(slices.Clone(n.budgets), text)
	n.env = append(n.env, env.Budgets+"="+strings.Join(n.budgets, " "))
}

// awaitSweep waits for the end of the sweep that a STATUS started.
func (n *node) awaitSweep() {
	n.Helper()
	eventually(n, "the end of the sweep", func() bool { return !held(filepath.Join(n.stateDir, "sweep.lock")) })
}

// ask runs GC, or STATUS with the sweep behind it, with unwind's entry for a chain of this version
// and plugins. changes are keys of that entry, such as the list of a GC; a nil value removes its key.
func (n *node) ask(command, chainVersion string, changes map[string]any, plugins ...string) outcome {
	n.Helper()
	chain := fmt.Sprintf(`{"cniVersion": %q, "plugins": [%s]}`, chainVersion, strings.Join(plugins, ", "))
	all := map[string]any{"cniVersion": "1.1.0"}
	maps.Copy(all, changes)
	in := &input{stdin: n.entryOf(chain, all), env: map[string]string{"CNI_COMMAND": command, "CNI_PATH": strings.Join(n.path, ":")}}
	for _, kv := range n.env {
		name, value, _ := strings.Cut(kv, "=")
		in.env[name] = value
	}
	out := n.start(in)
	if command == "STATUS" {
		n.awaitSweep()
	}
	return out
}
