//go:build e2e

package e2e_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"cni-unwind/plugin/e2e"
)

// engine starts containers in networks that the operator configures.
type engine interface {
	Start(name, network string) (id string, err error)
	Run(args ...string) string
	Remove(name string) error
}

func nerdctl(n *e2e.Node) engine {
	e2e.Long(n)
	return n.StartContainerd(e2e.Newest(n)).NewNerdctl()
}

// TestE2EContainers starts a container with nerdctl or podman (with its CNI backend), restarts it
// under the same ID, kills it and removes it. After that, other containers fail to start. With
// unwind, they leave nothing. Without unwind, they leak addresses.
func TestE2EContainers(t *testing.T) {
	table := e2e.NewTable(t, fmt.Sprintf("a container is started, restarted, killed and removed; then %d cannot start on a /28; addresses/netns/veths/rules", e2e.Tries),
		"ENGINE", "CHAIN", "UP", "RESTARTED", "KILLED, REMOVED", "NOT STARTED LEAVE", "SWEPT", "RECORDS")
	for name, start := range map[string]func(n *e2e.Node) engine{
		"podman": func(n *e2e.Node) engine { return n.NewPodman() }, "nerdctl": nerdctl,
	} {
		for _, unwind := range []bool{false, true} {
			t.Run(name+"/"+e2e.ChainOf(unwind), func(t *testing.T) {
				t.Parallel()
				n := e2e.NewNode(t)
				n.Configure(e2e.Network{Subnet: e2e.Small, Plugins: []string{e2e.Firewall, n.Faulty()}, Unwind: unwind})
				containers(t, n, start(n), unwind, func(cells ...any) { table.Row(append([]any{name, e2e.ChainOf(unwind)}, cells...)...) })
			})
		}
	}
}

func containers(t *testing.T, n *e2e.Node, e engine, unwind bool, row func(...any)) {
	id, err := e.Start("one", e2e.NetworkName)
	check(t, err)
	up := n.Settled()
	e.Run("restart", "--time=1", "one")
	restarted := n.Settled()
	for address, owner := range n.Reserved() {
		if !strings.HasSuffix(owner, id) {
			t.Errorf("after the restart %s is reserved for %s, not for %s", address, owner, id)
		}
		if _, _, err := n.Try("ping", "-c1", "-W2", address); err != nil {
			t.Errorf("the container does not answer a ping at %s", address)
		}
	}
	e.Run("kill", "--signal=KILL", "one")
	check(t, e.Remove("one"))
	removed := n.Settled()

	n.Plan(map[string]string{"ADD": "fail", "DEL": "fail"})
	for i := range e2e.Tries {
		bad := fmt.Sprint("bad", i)
		if _, err := e.Start(bad, e2e.NetworkName); err == nil {
			t.Fatalf("container %d started", i)
		}
		_ = e.Remove(bad)
	}
	during := n.Settled()
	n.Plan(nil)
	records := 0
	if unwind {
		n.Unwindctl("sweep")
		records = len(n.Journal())
	}
	after := n.Settled()
	row(up, restarted, removed, during, after, records)
	if up.Addresses != 1 || up.Veths != 1 || up.Rules == 0 || restarted != up {
		t.Errorf("a container has %s, after a restart %s", up, restarted)
	}
	if unwind && (!removed.HasNothing() || !during.HasNothing() || !after.HasNothing() || records > 0) {
		t.Errorf("left: removed %s, not started %s, swept %s, %d records", removed, during, after, records)
	}
	if !unwind && during.Addresses == 0 {
		t.Error("without unwind nothing leaks, so the test proves nothing")
	}
}

// TestE2ENerdctlNetworks: unwindctl refuses to wrap the conflist of a network that nerdctl created.
// nerdctl reads the network's subnet and bridge from the first plugin of the file. If unwind came
// first, nerdctl would assign the same subnet to its next network, and would never remove the
// bridge. "unwindctl ipam" also lists networks that nerdctl created.
func TestE2ENerdctlNetworks(t *testing.T) {
	t.Parallel()
	n := e2e.NewNode(t)
	n.Configure(e2e.Network{Subnet: e2e.Small, Plugins: []string{e2e.Firewall, n.Faulty()}})
	e := nerdctl(n)
	e.Run("network", "create", "net1")
	file := e2e.ConfDir + "/default/nerdctl-net1.conflist"
	_, stderr, err := n.Try(e2e.Path(t, "bin/unwindctl"), "wrap", n.File(file))
	if err == nil || !strings.Contains(stderr, "nerdctl") {
		t.Errorf("wrap of a network that nerdctl created: %v, %s", err, stderr)
	}
	// Wrap the file by hand, to show what would happen if unwindctl wrapped it.
	list := parsed(n, file)
	subnet, original := subnetOf(list), list["plugins"]
	list["plugins"] = []any{map[string]any{"type": "unwind", "chain": original}}
	wrapped, err := json.Marshal(list)
	check(t, err)
	list["plugins"] = original
	plain, err := json.Marshal(list)
	check(t, err)
	n.Write(file, string(wrapped))
	e.Run("network", "create", "net2")
	if second := subnetOf(parsed(n, e2e.ConfDir+"/default/nerdctl-net2.conflist")); second != subnet || subnet == "" {
		t.Errorf("nerdctl does not reuse the subnet %s of a wrapped network, but assigns %s: wrap need not refuse such a file", subnet, second)
	}
	e.Run("network", "rm", "net2")

	n.Write(file, string(plain))
	_, err = e.Start("one", "net1")
	check(t, err)
	if out := n.Unwindctl("ipam"); !strings.Contains(out, "net1 (") {
		t.Errorf("ipam does not show net1:\n%s", out)
	}
	e.Run("rm", "--force", "one")
	n.Write(file, string(wrapped))
	e.Run("network", "rm", "net1")
	if _, _, err := n.Try("ip", "link", "show", bridgeOf(list)); err != nil {
		t.Errorf("network rm removes the bridge of a wrapped network: wrap need not refuse such a file")
	}
}

func parsed(n *e2e.Node, file string) (list map[string]any) {
	n.Helper()
	text, err := os.ReadFile(n.File(file))
	check(n, errors.Join(err, json.Unmarshal(text, &list)))
	return list
}

// subnetOf returns the subnet of a network that nerdctl created.
func subnetOf(list map[string]any) string {
	var net struct {
		Plugins []struct {
			IPAM struct{ Ranges [][]struct{ Subnet string } }
		}
	}
	data, _ := json.Marshal(list)
	if json.Unmarshal(data, &net) != nil || len(net.Plugins) == 0 || len(net.Plugins[0].IPAM.Ranges) == 0 {
		return ""
	}
	return net.Plugins[0].IPAM.Ranges[0][0].Subnet
}

// bridgeOf returns the bridge of a network that nerdctl created.
func bridgeOf(list map[string]any) string {
	var net struct{ Plugins []struct{ Bridge string } }
	data, _ := json.Marshal(list)
	if json.Unmarshal(data, &net) != nil || len(net.Plugins) == 0 {
		return ""
	}
	return net.Plugins[0].Bridge
}
