package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// NetworkName is the name of the network that Configure gives a node.
const NetworkName = "podnet"

const conflist = ConfDir + "/10-" + NetworkName + ".conflist"

// Small is the subnet of a pool with 13 addresses for pods.
const Small = "10.22.0.0/28"

// Network is the network that a node's runtime finds in /etc/cni/net.d.
type Network struct {
	Subnet  string   // host-local's pool
	Last    string   // the last address to assign; "" for all
	Gateway string   // a gateway other than the bridge; pods get no default route. "" for the bridge
	Plugins []string // the plugins after bridge or ptp, as JSON
	Version string   // the CNI version; "" for 1.1.0 if the runtime supports it, and 1.0.0 if not
	// Kindnet selects a network like kindnet's: ptp instead of bridge, a CNI version without STATUS,
	// and another directory for host-local's files.
	Kindnet bool
	// Unwind makes unwindctl wrap the chain in unwind's entry, to which Keys are added.
	Unwind bool
	Keys   map[string]any
}

const (
	Firewall = `{"type": "firewall"}`
	Portmap  = `{"type": "portmap", "capabilities": {"portMappings": true}}`
)

// Faulty returns the configuration of the test plugin faulty. Plan sets how faulty behaves.
func (n *Node) Faulty() string {
	return fmt.Sprintf(`{"type": "faulty", "dir": %q, "instance": "p"}`, n.faultyDir())
}

// plain returns the conflist without unwind, as a provider would write it for runtimes that may or
// may not support CNI 1.1.
func (net Network) plain() string {
	ranges := fmt.Sprintf(`{"subnet": %q}`, net.Subnet)
	if net.Last != "" {
		ranges = fmt.Sprintf(`{"subnet": %q, "rangeEnd": %q}`, net.Subnet, net.Last)
	}
	routes := `[{"dst": "0.0.0.0/0"}]`
	if net.Gateway != "" {
		ranges, routes = fmt.Sprintf(`{"subnet": %q, "gateway": %q}`, net.Subnet, net.Gateway), "[]"
	}
	first := fmt.Sprintf(`{"type": "bridge", "bridge": "cni0", "isGateway": %t, "ipMasq": true, "hairpinMode": true,
      "ipam": {"type": "host-local", "ranges": [[%s]], "routes": %s}}`, net.Gateway == "", ranges, routes)
	versions := `"cniVersion": "1.0.0", "cniVersions": ["1.0.0", "1.1.0"]`
	if net.Version != "" {
		versions = fmt.Sprintf(`"cniVersion": %q`, net.Version)
	}
	if net.Kindnet {
		// as in testdata/conflists/kindnet.conflist
		first = fmt.Sprintf(`{"type": "ptp", "ipMasq": false, "mtu": 1500,
      "ipam": {"type": "host-local", "dataDir": %q, "routes": [{"dst": "0.0.0.0/0"}], "ranges": [[%s]]}}`, filepath.Dir(net.pool()), ranges)
		versions = `"cniVersion": "0.3.1"`
	}
	return fmt.Sprintf(`{%s, "name": %q, "plugins": [
    %s
]}
`, versions, NetworkName, strings.Join(append([]string{first}, net.Plugins...), ",\n    "))
}

// pool returns the directory with host-local's files.
func (net Network) pool() string {
	if net.Kindnet {
		return "/run/cni-ipam-state/" + NetworkName
	}
	return "/var/lib/cni/networks/" + NetworkName
}

// Configure writes the node's network configuration.
func (n *Node) Configure(net Network) {
	n.Helper()
	n.pool = net.pool()
	n.configure(NetworkName, net.plain(), net.Unwind, net.Keys)
}

// configure writes the conflist of the node's network. name is the network's name.
func (n *Node) configure(name, text string, unwind bool, keys map[string]any) {
	n.Helper()
	n.netName = name
	if unwind {
		text = n.wrap(text)
	}
	if len(keys) > 0 {
		text = withKeys(n, text, keys)
	}
	n.Write(conflist, text)
}

// wrap makes unwindctl wrap the chain of a conflist in unwind's entry.
func (n *Node) wrap(list string) string {
	n.Helper()
	original := filepath.Join(n.Dir, "original.conflist")
	if err := os.WriteFile(original, []byte(list), 0o644); err != nil {
		n.Fatal(err)
	}
	return n.Unwindctl("wrap", original)
}

// extend appends plugins to a conflist's chain.
func (n *Node) extend(list string, more []string) string {
	n.Helper()
	var conf map[string]any
	err := json.Unmarshal([]byte(list), &conf)
	for _, one := range more {
		plugins, _ := conf["plugins"].([]any)
		conf["plugins"] = append(plugins, json.RawMessage(one))
	}
	out, marshalErr := json.Marshal(conf)
	if err = errors.Join(err, marshalErr); err != nil {
		n.Fatal(err)
	}
	return string(out)
}

// withKeys adds keys to unwind's entry.
func withKeys(n *Node, text string, keys map[string]any) string {
	n.Helper()
	var list map[string]any
	err := json.Unmarshal([]byte(text), &list)
	if err == nil {
		entry := list["plugins"].([]any)[0].(map[string]any)
		for key, value := range keys {
			entry[key] = value
		}
		var out []byte
		if out, err = json.Marshal(list); err == nil {
			return string(out)
		}
	}
	n.Fatal(err)
	return ""
}

func (n *Node) faultyDir() string { return filepath.Join(n.Dir, "faulty") }

// Plan sets faulty's mode for each command, from the next call on. Without a mode for a command,
// faulty succeeds.
func (n *Node) Plan(modes map[string]string) {
	n.Helper()
	n.plan("*", modes)
}

// PlanPods is like Plan, but only for the pods whose names begin with a prefix. For all other pods,
// faulty succeeds.
func (n *Node) PlanPods(prefix string, modes map[string]string) {
	n.Helper()
	n.plan("pod:"+prefix, modes)
}

func (n *Node) plan(of string, modes map[string]string) {
	n.Helper()
	data, err := json.Marshal(map[string]any{of: modes})
	plan := filepath.Join(n.faultyDir(), "plan.json")
	if err = errors.Join(err, os.WriteFile(plan+".new", data, 0o644), os.Rename(plan+".new", plan)); err != nil {
		n.Fatal(err)
	}
}

// AwaitHeld waits until faulty holds at least the given number of calls of a command (hold mode).
func (n *Node) AwaitHeld(command string, calls int) {
	n.Helper()
	Eventually(n, time.Minute, fmt.Sprintf("faulty holds %d %s", calls, command), func() bool { return len(n.held(command)) >= calls })
}

// LetGo lets all calls that faulty holds continue.
func (n *Node) LetGo() {
	n.Helper()
	for _, file := range n.held("*") {
		if err := os.Remove(file); err != nil {
			n.Fatal(err)
		}
	}
}

func (n *Node) held(command string) []string {
	files, _ := filepath.Glob(filepath.Join(n.faultyDir(), "held", command+".*"))
	return files
}

// Calls counts faulty's calls by command. Refused counts only the calls in mode fail.
func (n *Node) Calls() map[string]int   { return n.calls("") }
func (n *Node) Refused() map[string]int { return n.calls("fail") }

// calls counts faulty's calls by command. If mode is not "", it counts only calls in that mode.
func (n *Node) calls(mode string) map[string]int {
	n.Helper()
	data, err := os.ReadFile(filepath.Join(n.faultyDir(), "log"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		n.Fatal(err)
	}
	calls := map[string]int{}
	for line := range strings.Lines(string(data)) {
		var record struct{ Phase, Command, Mode string }
		if err := json.Unmarshal([]byte(line), &record); err != nil {
			n.Fatal(err)
		}
		if record.Phase == "start" && (mode == "" || record.Mode == mode) {
			calls[record.Command]++
		}
	}
	return calls
}

// ForgetAddresses removes all reservations, as an operator may do on a node without free addresses.
func (n *Node) ForgetAddresses() {
	n.Helper()
	if err := os.RemoveAll(n.File(n.pool)); err != nil {
		n.Fatal(err)
	}
}

// Reserved returns host-local's reservations, as a map from address to container ID.
func (n *Node) Reserved() map[string]string {
	n.Helper()
	return n.reserved(n.pool)
}

func (n *Node) reserved(pool string) map[string]string {
	n.Helper()
	dir := n.File(pool)
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		n.Fatal(err)
	}
	owners := map[string]string{}
	for _, e := range entries {
		if _, err := netip.ParseAddr(e.Name()); err != nil {
			continue
		}
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if errors.Is(err, os.ErrNotExist) {
			continue // the address was released meanwhile
		}
		if err != nil {
			n.Fatal(err)
		}
		owner, _, _ := strings.Cut(string(data), "\r\n")
		owners[e.Name()] = owner
	}
	return owners
}

// AddNetNS creates a network namespace in /run/netns, where runtimes pin theirs. It doesn't run
// "ip netns add", because that would mount a directory over the runtimes' files.
func (n *Node) AddNetNS(name string) {
	n.Helper()
	n.Write("/run/netns/"+name, "")
	n.Run("unshare", "--net=/run/netns/"+name, "true")
}

// AddByHand attaches a new network namespace with cnitool, as a runtime would for a pod. containerd
// doesn't know about this pod.
func (n *Node) AddByHand(pod string) {
	n.Helper()
	n.AddNetNS(pod)
	if out, stderr, err := n.Cnitool(pod, "add", "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME="+pod); err != nil {
		n.Fatalf("cnitool add: %v\n%s%s", err, out, stderr)
	}
}

// RemoveNetNS removes a network namespace, as a runtime does after the DEL of a pod.
func (n *Node) RemoveNetNS(name string) {
	n.Helper()
	path := "/run/netns/" + name
	n.do(func() error { return errors.Join(unix.Unmount(path, unix.MNT_DETACH), os.Remove(path)) })
}

// Cnitool runs a cnitool command for a network namespace. args becomes CNI_ARGS, and env contains
// additional environment variables.
func (n *Node) Cnitool(netns, command, args string, env ...string) (stdout, stderr string, err error) {
	n.Helper()
	env = append(env, "CNI_PATH="+PluginDir, "NETCONFPATH="+ConfDir, "CNI_ARGS="+args)
	return n.Try("env", append(env, Path(n, ".tools/bin/cnitool"), command, n.netName, "/run/netns/"+netns)...)
}
