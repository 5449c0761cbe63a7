package plugin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/env"
	"cni-unwind/plugin/plugintest/sandbox"
)

// node is one network of a simulated machine, with its directories and pods. libcni, with its
// cache, is the runtime.
type node struct {
	testing.TB
	dir      string
	network  string
	bridge   string
	subnet   string // of the bridge, a /24
	stateDir string
	path     []string // CNI_PATH
	cni      *libcni.CNIConfig
	env      []string       // added to unwind's environment
	conf     map[string]any // added to unwind's entry
	outer    string         // cniVersion of unwind's conflist
	inner    string         // cniVersion of the chain
	store    *journal.Store
	ruled    *atomic.Bool // a configuration may have created rules
	mayDie   bool         // unwind may be killed in a GC or a STATUS
	budgets  []string     // NAME=TIME; env.Long sets the others
	present  []pluginConf // the chain of the next requests
	said     outcome      // the outcome of the last GC, STATUS or pod.give
	first    *node        // this machine's first network, whose env libcni passes to unwind
	machine  *machine
}

// machine is the state that all networks of a machine share.
type machine struct {
	networks []*node
	pods     []*pod
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
	n.first, n.machine = n, &machine{networks: []*node{n}}
	t.Cleanup(func() {
		if link, err := netlink.LinkByName(n.bridge); err == nil {
			_ = netlink.LinkDel(link)
		}
	})
	return n
}

// nodeExec runs plugins as libcni does, with the node's env added to their environment.
type nodeExec struct {
	invoke.RawExec
	version.PluginDecoder
	node *node
}

func (e *nodeExec) ExecPlugin(ctx context.Context, path string, stdin []byte, env []string) ([]byte, error) {
	e.node.seeConfiguration(stdin)
	return e.RawExec.ExecPlugin(ctx, path, stdin, append(env, e.node.env...))
}

// seeConfiguration sets n.ruled if a configuration may make a plugin create rules.
func (n *node) seeConfiguration(stdin []byte) {
	if rulesOf.Match(stdin) {
		n.ruled.Store(true)
	}
}

// rulesOf matches the plugins and keys that make a chain create rules. A chainFile may contain any
// of them.
var rulesOf = regexp.MustCompile(`firewall|portmap|ipMasq|macspoofchk|chainFile`)

// stderr creates a file for unwind's log, which is printed if the test fails.
func (n *node) stderr() *os.File {
	f, err := os.Create(filepath.Join(n.dir, "stderr"))
	must(n, err)
	n.Cleanup(func() {
		_ = f.Close()
		if log := n.log(); n.Failed() && log != "" {
			n.Logf("stderr of successful verbs:\n%s", log)
		}
	})
	return f
}

// usePath changes CNI_PATH.
func (n *node) usePath(dirs ...string) {
	n.path = dirs
	n.cni = libcni.NewCNIConfigWithCacheDir(n.path, filepath.Join(n.dir, "cache"), n.execOf())
}

// log returns the log of verbs that succeeded.
func (n *node) log() string {
	return read(n, filepath.Join(n.dir, "stderr"))
}

func (n *node) mkdir(path string) {
	n.Helper()
	must(n, os.MkdirAll(path, 0o755))
}

// The methods below return plugin configurations. extra is appended to the object: it is empty, or
// begins with a comma.

func (n *node) bridgePlugin(extra string) string {
	return fmt.Sprintf(`{"type": "bridge", "bridge": %q, "isGateway": true, "ipam": %s%s}`, n.bridge, n.hostLocal(n.subnet), extra)
}

func (n *node) hostLocal(subnet string) string {
	return fmt.Sprintf(`{"type": "host-local", "subnet": %q, "dataDir": %q}`, subnet, n.dataDir())
}

func (n *node) faulty(instance, extra string) string {
	return fmt.Sprintf(`{"type": "faulty", "dir": %q, "instance": %q%s}`, n.faultyDir(), instance, extra)
}

// pooled returns a faulty plugin that calls host-local, as bridge does, with a pool from one
// address to another. first and last are the last bytes of these addresses.
func (n *node) pooled(instance string, first, last int) string {
	net := strings.TrimSuffix(n.subnet, "0/24")
	return n.faulty(instance, fmt.Sprintf(`, "ipam": {"type": "host-local", "dataDir": %q, "ranges": [[{"subnet": %q, `+
		`"rangeStart": "%s%d", "rangeEnd": "%s%d"}]]}`, n.dataDir(), n.subnet, net, first, net, last))
}

// cacheDir is the directory with the results in libcni's cache.
func (n *node) cacheDir() string { return filepath.Join(n.dir, "cache", "results") }

func (n *node) dataDir() string   { return filepath.Join(n.dir, "ipam") }
func (n *node) faultyDir() string { return filepath.Join(n.dir, "faulty") }

// unwind returns a conflist that contains only unwind, with a chain of the given plugins.
func (n *node) unwind(plugins ...string) *libcni.NetworkConfigList {
	n.Helper()
	entry := map[string]any{
		"type": netconf.Name, "stateDir": n.stateDir, "chain": json.RawMessage(n.chainOf(plugins...)),
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

// chainOf returns a chain of the given plugins, in the CNI version n.inner.
func (n *node) chainOf(plugins ...string) string {
	return fmt.Sprintf(`{"cniVersion": %q, "plugins": [%s]}`, n.inner, strings.Join(plugins, ", "))
}

// plain returns a conflist of the given plugins, without unwind.
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

// records returns all records in the journal.
func (n *node) records() []*journal.Record {
	n.Helper()
	return recordsOf(n, n.store)
}

func recordsOf(t testing.TB, s *journal.Store) (all []*journal.Record) {
	t.Helper()
	err := s.View(context.Background(), func(tx *journal.Tx) error {
		return tx.All(func(e *journal.Record, err error) error {
			all = append(all, e)
			return err
		})
	})
	if err != nil && !errors.Is(err, unix.ENOENT) { // another process may be creating the journal
		t.Fatalf("the journal: %v", err)
	}
	return all
}

// setModes sets the faulty plugins' modes: instance → verb → mode.
func (n *node) setModes(plan map[string]map[string]string) {
	n.Helper()
	data, err := json.Marshal(plan)
	must(n, err)
	path := filepath.Join(n.faultyDir(), "plan.json")
	// a rename replaces the file, because a plugin may be reading it
	if err := errors.Join(os.WriteFile(path+".new", data, 0o600), os.Rename(path+".new", path)); err != nil {
		n.Fatal(err)
	}
}

// taken returns the names of the files that the faulty plugins' ADDs created and no DEL removed.
func (n *node) taken() []string { return n.names(filepath.Join(n.faultyDir(), "taken")) }

// addressRules returns the faulty plugins' rules, as ADDRESS.INSTANCE.
func (n *node) addressRules() []string { return n.names(filepath.Join(n.faultyDir(), "rules")) }

// reserved returns the owner of each address that host-local has reserved.
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

// callLog returns the log's lines about the starts of faulty plugins' calls.
func (n *node) callLog() []logged {
	n.Helper()
	return slices.DeleteFunc(n.wholeLog(), func(l logged) bool { return l.Phase != "start" })
}

// wholeLog returns the log's lines about the starts and the ends of faulty plugins' calls.
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

// rules returns the IPv4 and IPv6 lines of iptables-save that contain one of the texts.
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

// address returns the first address of a result, without the prefix length.
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

func (n *node) hangsDir() string { return filepath.Join(n.dir, "hangs") }

// budget sets one of unwind's time budgets, as NAME=TIME.
func (n *node) budget(text string) {
	n.budgets = append(slices.Clone(n.budgets), text)
	n.env = append(n.env, env.Budgets+"="+strings.Join(n.budgets, " "))
}
