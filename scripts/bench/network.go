package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
)

// network is a conflist and the runtime that runs it.
type network struct {
	kind  string
	work  string
	list  *libcni.NetworkConfigList
	cni   *libcni.CNIConfig
	ports int // the first host port of its pods; 0 for no host ports
}

var chains = map[string]struct {
	plugins int  // the number of plugins, see network.chain
	ports   bool // each pod has a port mapping
}{
	"light": {3, false}, "1": {1, true}, "3": {3, true}, "4": {4, true}, "5": {5, true},
}

// The kinds of networks that a comparison runs. "plain" is without unwind. With "unwind", the
// journal has 10 records. With "unwind-full", it has as many as the flag -live says. "noop" begins
// the chain with a plugin that does nothing. With "multus", multus runs the chain.
const (
	plain      = "plain"
	unwound    = "unwind"
	unwoundBig = "unwind-full"
	noop       = "noop"
	multus     = "multus"
)

// newNetwork creates a network with its own bridge, subnet and directories. If fails is set, its
// last plugin fails every ADD.
func newNetwork(work, kind string, number int, chainName string, fails bool) (*network, error) {
	name := fmt.Sprintf("%s-%s", kind, chainName)
	if fails {
		name += "-fails"
	}
	n := &network{kind: kind, work: filepath.Join(work, name)}
	if chains[chainName].ports {
		n.ports = 20000 + 4000*number
	}
	for _, dir := range []string{"netns", "cache", "taken", "multus"} {
		if err := os.MkdirAll(filepath.Join(n.work, dir), 0o700); err != nil {
			return nil, err
		}
	}
	chain := n.chain(fmt.Sprintf("b%s-%d-%t", chainName, number, fails),
		fmt.Sprintf("10.%d.0.0/16", 200+number),
		chains[chainName].plugins, fails)
	if err := os.WriteFile(filepath.Join(n.work, "plan.json"), []byte(`{"*": {"ADD": "fail"}}`),
		0o600); err != nil {
		return nil, err
	}
	path, err := paths("bin", ".tools/cni", ".tools/test")
	if err != nil {
		return nil, err
	}
	switch kind {
	case unwound, unwoundBig:
		chain = fmt.Sprintf(`{"type": "unwind", "stateDir": "%s", "capabilities": {"portMappings": true},
			"chain": {"cniVersion": "1.0.0", "plugins": [%s]}}`, n.stateDir(), chain)
	case noop:
		chain = `{"type": "noop"}, ` + chain
	case multus:
		path = append(path, filepath.Dir(os.Getenv("MULTUS")))
		chain = fmt.Sprintf(`{"type": "%s", "cniDir": "%s/multus", "binDir": "%s", "logLevel": "panic", "capabilities": {"portMappings": true},
			"delegates": [{"cniVersion": "1.0.0", "name": "%s", "plugins": [%s]}]}`, filepath.Base(os.Getenv("MULTUS")), n.work, path[1], name, chain)
	}
	n.list, err = libcni.NetworkConfFromBytes(fmt.Appendf(nil,
		`{"cniVersion": "1.0.0", "name": %q, "plugins": [%s]}`, name, chain))
	n.cni = libcni.NewCNIConfigWithCacheDir(path, filepath.Join(n.work, "cache"), nil)
	return n, err
}

func (n *network) stateDir() string { return filepath.Join(n.work, "state") }

// chain returns the given number of plugins. If fails is set, it appends a plugin that fails.
func (n *network) chain(bridge, subnet string, plugins int, fails bool) string {
	chain := []string{
		fmt.Sprintf(`{"type": "bridge", "bridge": "%s", "isGateway": true, "ipam": {"type": "host-local", "subnet": "%s", "dataDir": "%s/ipam"}}`,
			bridge, subnet, n.work),
		`{"type": "tuning", "sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "1"}, "mtu": 1400}`,
		`{"type": "portmap", "backend": "iptables", "capabilities": {"portMappings": true}}`,
		`{"type": "firewall", "backend": "iptables"}`,
		`{"type": "bandwidth", "ingressRate": 1000000000, "ingressBurst": 1000000, "egressRate": 1000000000, "egressBurst": 1000000}`,
	}[:plugins]
	if fails {
		chain = append(chain, fmt.Sprintf(`{"type": "faulty", "dir": "%s"}`, n.work))
	}
	return strings.Join(chain, ",")
}

func paths(dirs ...string) ([]string, error) {
	var path []string
	for _, dir := range dirs {
		abs, err := filepath.Abs(dir)
		if err != nil {
			return nil, err
		}
		path = append(path, abs)
	}
	return path, nil
}

type pod struct {
	*network
	netns string
	rt    *libcni.RuntimeConf
}

func (n *network) newPod(i int) (*pod, error) {
	id := fmt.Sprintf("%s-%d", n.list.Name, i)
	path := filepath.Join(n.work, "netns", id)
	rt := &libcni.RuntimeConf{
		ContainerID: id, NetNS: path, IfName: "eth0",
		Args: [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", "bench"}, {"K8S_POD_NAME", id}},
	}
	if n.ports > 0 {
		rt.CapabilityArgs = map[string]any{"portMappings": []map[string]any{
			{"hostPort": n.ports + i%4000, "containerPort": 80, "protocol": "tcp"},
		}}
	}
	return &pod{n, path, rt}, netns(path)
}

func (p *pod) add(ctx context.Context) error {
	_, err := p.cni.AddNetworkList(ctx, p.list, p.rt)
	return err
}

func (p *pod) del(ctx context.Context) error { return p.cni.DelNetworkList(ctx, p.list, p.rt) }

// secondDel runs the DEL that containerd sends when it removes a sandbox: without the namespace and
// without a result.
func (p *pod) secondDel(ctx context.Context) error {
	rt := *p.rt
	rt.NetNS = ""
	return p.cni.DelNetworkList(ctx, p.list, &rt)
}

// failedAdd runs an ADD that fails. Without unwind, it then cleans up with a DEL. With unwind, this
// is not necessary, because unwind rolls the ADD back by itself.
func (p *pod) failedAdd(ctx context.Context) error {
	if err := p.add(ctx); err == nil {
		return errors.New("the ADD succeeded")
	}
	if p.kind == unwound {
		return nil
	}
	return p.del(ctx)
}

// gone removes the pod's namespace.
func (p *pod) gone() error {
	return errors.Join(unix.Unmount(p.netns, unix.MNT_DETACH), os.Remove(p.netns))
}

// fill adds a pod, and copies its journal record until the journal has the given number of records.
// The copies name the pod's network namespace, so all of them are live.
func (n *network) fill(ctx context.Context, many int) error {
	p, err := n.newPod(3999)
	if err != nil {
		return err
	}
	if err := p.add(ctx); err != nil {
		return err
	}
	store := &journal.Store{Dir: n.stateDir()}
	return store.Update(ctx, func(tx *journal.Tx) error {
		model, err := tx.Get(journal.Key{Network: n.list.Name, ContainerID: p.rt.ContainerID,
			IfName: "eth0"})
		if err != nil {
			return err
		}
		for i := range many - 1 {
			e := *model
			e.ContainerID = fmt.Sprintf("%064x", i)
			e.Added.Pod.Name = e.ContainerID
			e.Number = 0
			e.Got.Claims = []journal.Claim{{Address: netip.AddrFrom4([4]byte{192, 168,
				byte(i >> 8), byte(i)})}}
			for _, e.State = range []journal.State{journal.Adding, journal.Live} {
				if err := tx.Put(&e); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// leaves checks that exactly the given number of addresses is still assigned. If not, the timed
// operations did not work.
func (n *network) leaves(nothing int) error {
	files, err := os.ReadDir(filepath.Join(n.work, "ipam", n.list.Name))
	held := 0
	for _, f := range files {
		if _, notAddress := netip.ParseAddr(f.Name()); notAddress == nil {
			held++
		}
	}
	if held != nothing {
		err = errors.Join(err, fmt.Errorf("%d addresses are assigned in %s, want %d", held, n.list.Name,
			nothing))
	}
	return err
}

// request returns the configuration that a runtime passes to unwind for STATUS and GC.
func (n *network) request() ([]byte, error) {
	return json.Marshal(map[string]any{
		"cniVersion": "1.1.0", "name": n.list.Name, "type": "unwind", "stateDir": n.stateDir(),
		"chain": map[string]any{"cniVersion": "1.0.0",
			"plugins": []any{map[string]any{"type": "bridge"}}},
	})
}
