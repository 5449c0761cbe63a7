package plugin

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"

	"cni-unwind/plugin/plugintest/sandbox"
)

// TestReferencePlugins runs chains of the reference plugins without and with unwind. Both ways must
// return the same result, agree on CHECK, and leave nothing on the host after DEL. `make test`
// runs each chain with only one of IPv4, IPv6 and dual stack.
func TestReferencePlugins(t *testing.T) {
	t.Parallel()
	const (
		firewall  = `{"type": "firewall"}`
		portmap   = `{"type": "portmap", "capabilities": {"portMappings": true}}`
		bandwidth = `{"type": "bandwidth", "ingressRate": 8000000, "ingressBurst": 8000000,
		              "egressRate": 8000000, "egressBurst": 8000000}`
		sbr = `{"type": "sbr"}`
	)
	tuning := func(n *node) string {
		return fmt.Sprintf(`{"type": "tuning", "mtu": 1400, "sysctl": {"net.core.somaxconn": "500"}, "dataDir": %q}`, n.tuningDir())
	}
	all := []string{"IPv4", "IPv6", "dual"}
	for i, c := range []struct {
		name     string
		families []string
		ifname   string
		pings    bool
		chain    func(n *node, families string) []string
	}{
		{"bridge and all that chains", all, "eth0", true, func(n *node, families string) []string {
			return []string{n.masquerading("bridge", families, ""), tuning(n), bandwidth, portmap, firewall}
		}},
		{"ptp and all that chains", all, "eth0", true, func(n *node, families string) []string {
			return []string{n.masquerading("ptp", families, ""), tuning(n), bandwidth, portmap, firewall}
		}},
		{"ptp, sbr", all, "eth0", true, func(n *node, families string) []string {
			return []string{n.masquerading("ptp", families, ""), sbr}
		}},
		{"macvlan, tuning, firewall", all, "eth0", true, func(n *node, families string) []string {
			macvlan := fmt.Sprintf(`{"type": "macvlan", "master": %q, "ipam": %s}`, n.hostVeth(families), n.ranges(families))
			return []string{macvlan, tuning(n), firewall}
		}},
		{"host-device", []string{"dual"}, "eth0", true, func(n *node, families string) []string {
			return []string{fmt.Sprintf(`{"type": "host-device", "device": %q, "ipam": %s}`, n.hostVeth(families), n.ranges(families))}
		}},
		{"bridge, static", []string{"dual"}, "eth0", false, func(n *node, families string) []string {
			return []string{fmt.Sprintf(`{"type": "bridge", "bridge": %q, "ipam": {"type": "static", "addresses": [{"address": %q}, {"address": %q}]}}`,
				n.bridge, n.prefix(4, 9), n.prefix(6, 9)), firewall}
		}},
		{"bridge without addresses", []string{"no"}, "eth0", false, func(n *node, _ string) []string {
			return []string{fmt.Sprintf(`{"type": "bridge", "bridge": %q}`, n.bridge), tuning(n)}
		}},
		{"loopback", []string{"no"}, "lo", false, func(*node, string) []string {
			return []string{`{"type": "loopback"}`}
		}},
	} {
		for j, families := range c.families {
			if len(c.families) == len(all) && !sandbox.Sampled(sandbox.Rounds(3, 2, 1), i, j) {
				continue
			}
			t.Run(c.name+", "+families, func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				chain := c.chain(n, families)
				plain := n.seeThrough(n.plain(chain...), c.ifname, c.pings)
				// Without these files, host-local assigns the same addresses again.
				must(t, os.RemoveAll(n.dataDir()))
				ours := n.seeThrough(n.unwind(chain...), c.ifname, c.pings)
				if ours != plain {
					t.Errorf("through unwind:\n%s\nplain:\n%s", ours, plain)
				}
				n.nothingLeft()
			})
		}
	}
}

// seeThrough runs ADD, CHECK and DEL of a pod. It returns a summary of the result, of CHECK and of
// the pod's traces, without the details that differ from pod to pod.
func (n *node) seeThrough(list *libcni.NetworkConfigList, ifname string, pings bool) string {
	n.Helper()
	p := n.pod("a")
	defer p.dropNetNS()
	p.IfName = ifname
	p.CapabilityArgs = portMappings
	r := p.mustAdd(list)
	if pings {
		p.pingsGateways(r)
	}
	checked := p.checkWith(list)
	marks := p.marks(r)
	there := len(p.traces(marks))
	p.mustDel(list)
	for _, trace := range p.traces(marks) {
		n.Errorf("left by a chain of %d: %s", len(list.Plugins), trace)
	}
	return fmt.Sprintf("result %s\nCHECK passes: %t\ntraces: %d", p.meaning(r), checked == nil, there)
}

// Configurations of reference plugins.

// prefix returns the host-th address of the node's IPv4 or IPv6 subnet, with the prefix length.
func (n *node) prefix(version int, host byte) netip.Prefix {
	b := netip.MustParsePrefix(n.subnet).Addr().As4()
	if version == 4 {
		b[3] = host
		return netip.PrefixFrom(netip.AddrFrom4(b), 24)
	}
	return netip.MustParsePrefix(fmt.Sprintf("fd00:%d:%d::%x/64", b[1], b[2], host))
}

// prefixes returns the host-th address of each family. families is "IPv4", "IPv6" or "dual".
func (n *node) prefixes(families string, host byte) []netip.Prefix {
	return map[string][]netip.Prefix{
		"IPv4": {n.prefix(4, host)}, "IPv6": {n.prefix(6, host)}, "dual": {n.prefix(4, host), n.prefix(6, host)},
	}[families]
}

// ranges returns a host-local configuration for the families, with a default route for each family.
func (n *node) ranges(families string) string {
	var ranges, routes []string
	for _, p := range n.prefixes(families, 0) {
		ranges = append(ranges, fmt.Sprintf(`[{"subnet": %q}]`, p.Masked()))
		anywhere := map[bool]string{true: "0.0.0.0/0", false: "::/0"}[p.Addr().Is4()]
		routes = append(routes, fmt.Sprintf(`{"dst": %q}`, anywhere))
	}
	return fmt.Sprintf(`{"type": "host-local", "dataDir": %q, "ranges": [%s], "routes": [%s]}`, n.dataDir(),
		strings.Join(ranges, ", "), strings.Join(routes, ", "))
}

// masquerading returns a configuration of bridge or ptp with ipMasq. extra is appended to the
// object: it is empty, or begins with a comma.
func (n *node) masquerading(plugin, families, extra string) string {
	return fmt.Sprintf(`{"type": %q, "bridge": %q, "isGateway": true, "ipMasq": true, "ipam": %s%s}`, plugin, n.bridge,
		n.ranges(families), extra)
}

// hostVeth creates a veth pair on the host, and returns the name of one end. The other end has the
// gateways' addresses.
func (n *node) hostVeth(families string) string {
	n.Helper()
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "d" + n.bridge}, PeerName: "g" + n.bridge}
	must(n, netlink.LinkAdd(veth))
	n.Cleanup(func() {
		if err := netlink.LinkDel(veth); err != nil {
			n.Errorf("the device is not back on the host: %v", err)
		}
	})
	for _, name := range []string{"d" + n.bridge, "g" + n.bridge} {
		run(n, "ip", "link", "set", name, "up")
	}
	for _, p := range n.prefixes(families, 1) {
		run(n, "ip", "address", "add", p.String(), "dev", "g"+n.bridge, "nodad")
	}
	return veth.Name
}

func (n *node) tuningDir() string { return filepath.Join(n.dir, "tuning") }

// The visible traces of a pod.

// result converts a result to the newest CNI version.
func (p *pod) result(r types.Result) *types100.Result {
	p.Helper()
	converted, err := types100.NewResultFromResult(r)
	must(p, err)
	return converted
}

// pingsGateways checks that the pod reaches the gateway of each of its addresses.
func (p *pod) pingsGateways(r types.Result) {
	p.Helper()
	for _, ip := range p.result(r).IPs {
		from, to := ip.Address.IP.String(), ip.Gateway.String()
		eventually(p, fmt.Sprintf("%s pings %s", from, to), func() bool {
			return exec.Command("nsenter", "--net="+p.NetNS, "ping", "-c1", "-W1", "-I", from, to).Run() == nil
		})
	}
}

// meaning returns a result as text, without the parts that differ each time: MAC addresses, paths,
// and the ends of generated names.
func (p *pod) meaning(r types.Result) string {
	p.Helper()
	result := p.result(r)
	for _, i := range result.Interfaces {
		i.Mac = ""
		if i.Sandbox != "" {
			i.Sandbox = "the container"
		}
		if len(i.Name) >= 12 {
			i.Name = i.Name[:3]
		}
	}
	text, err := json.Marshal(result)
	must(p, err)
	return string(text)
}

// marks distinguish a pod's traces from other pods' traces.
type marks struct {
	links []string // names of interfaces on the host
	texts []string // texts in its rules
}

var ownChain = regexp.MustCompile(`CNI-(DN-|SN-)?[0-9a-f]{16,}`)

// marks returns the marks of a pod that was just added.
func (p *pod) marks(r types.Result) (m marks) {
	p.Helper()
	result := p.result(r)
	for _, i := range result.Interfaces {
		if i.Sandbox == "" && i.Name != p.bridge {
			m.links = append(m.links, i.Name)
		}
	}
	for _, ip := range slices.DeleteFunc(result.IPs, func(ip *types100.IPConfig) bool { return ip.Address.IP.IsLoopback() }) {
		m.texts = append(m.texts, " "+ip.Address.IP.String()+"/", " "+ip.Address.IP.String()+" ")
	}
	byName := fmt.Sprintf(`name: \"%s\" id: \"%s\"`, p.network, p.ContainerID)
	m.texts = append(m.texts, byName, fmt.Sprintf("net: %s, if: %s, id: %s", p.network, p.IfName, p.ContainerID))
	for _, rule := range p.rules(byName) {
		m.texts = append(m.texts, ownChain.FindAllString(rule, -1)...)
	}
	return m
}

// traces returns a line for each thing that a pod has on the host and in its network namespace.
func (p *pod) traces(m marks) (traces []string) {
	p.Helper()
	for _, name := range m.links {
		if _, err := netlink.LinkByName(name); err == nil {
			traces = append(traces, "interface "+name)
		}
	}
	rules := p.rules("")
	// nft fails if the table does not exist.
	masquerade, _ := exec.Command("nft", "list", "table", "inet", "cni_plugins_masquerade").Output()
	for _, rule := range append(rules, strings.Split(string(masquerade), "\n")...) {
		if slices.ContainsFunc(m.texts, func(text string) bool { return strings.Contains(rule+" ", text) }) {
			traces = append(traces, "rule "+rule)
		}
	}
	for _, name := range p.names(p.tuningDir()) {
		traces = append(traces, "tuning's backup "+name)
	}
	for address, owner := range p.reserved() {
		if strings.HasPrefix(owner, p.ContainerID+" ") {
			traces = append(traces, "reservation of "+address)
		}
	}
	return append(traces, p.inside()...)
}

// inside returns the pod's interfaces except lo, and its routing rules that have a source address.
func (p *pod) inside() (traces []string) {
	p.Helper()
	there, err := ns.GetNS(p.NetNS)
	if err != nil {
		return nil
	}
	defer there.Close()
	for _, name := range p.links(p.NetNS) {
		if name != "lo" {
			traces = append(traces, "interface "+name+" of the container")
		}
	}
	err = there.Do(func(ns.NetNS) error {
		rules, err := netlink.RuleList(netlink.FAMILY_ALL)
		for _, r := range rules {
			if r.Src != nil {
				traces = append(traces, "routing rule "+r.String())
			}
		}
		return err
	})
	must(p, err)
	return traces
}
