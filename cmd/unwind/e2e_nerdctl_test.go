//go:build e2e

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"cni-unwind/testdata/e2e"
)

// nerdctlNode is a node with nerdctl, and a network of the operator's own.
type nerdctlNode struct {
	*e2e.Node
	rt      *e2e.Containerd
	nerdctl *e2e.Nerdctl
}

func newNerdctlNode(t *testing.T, unwind bool) *nerdctlNode {
	if e2e.Short() {
		t.Skip("nerdctl is not built for a short run")
	}
	n := e2e.NewNode(t)
	n.Configure(e2e.Network{Subnet: e2e.Small, Plugins: []string{e2e.Firewall, n.Faulty()}, Unwind: unwind})
	rt := n.StartContainerd(e2e.Newest(t))
	return &nerdctlNode{n, rt, rt.NewNerdctl()}
}

// TestE2ENerdctl: containers of nerdctl on a network of the operator's own come up, are restarted with the ID that they have, are killed, and
// go. Those that cannot start leave nothing, while the plain chain leaks.
func TestE2ENerdctl(t *testing.T) {
	t.Parallel()
	table := e2e.NewTable(t, fmt.Sprintf("nerdctl: a container is started, restarted, killed and removed; then %d cannot start on a /28; addresses/netns/veths/rules", e2e.Tries),
		"CHAIN", "UP", "RESTARTED", "KILLED, REMOVED", "NOT STARTED LEAVE", "SWEPT", "RECORDS")
	for _, unwind := range []bool{false, true} {
		n := newNerdctlNode(t, unwind)
		id, err := n.nerdctl.Start("one", e2e.NetworkName)
		check(t, err)
		up := n.Settled()
		n.nerdctl.Run("restart", "--time=1", "one")
		restarted := n.Settled()
		for address, owner := range n.Reserved() {
			if !strings.HasSuffix(owner, id) {
				t.Errorf("after the restart %s is reserved for %s, not for %s", address, owner, id)
			}
			if _, _, err := n.Try("ping", "-c1", "-W2", address); err != nil {
				t.Errorf("the container does not answer at %s", address)
			}
		}
		n.nerdctl.Run("kill", "--signal=KILL", "one")
		n.nerdctl.Run("rm", "--force", "one")
		removed := n.Settled()

		n.Plan(map[string]string{"ADD": "fail", "DEL": "fail"})
		for i := range e2e.Tries {
			name := fmt.Sprint("bad", i)
			if _, err := n.nerdctl.Start(name, e2e.NetworkName); err == nil {
				t.Fatalf("container %d started", i)
			}
			_, _ = n.nerdctl.Try("rm", "--force", name)
		}
		during := n.Settled()
		n.Plan(nil)
		records := 0
		if unwind {
			n.Unwindctl("sweep")
			records = len(n.Journal())
		}
		after := n.Settled()
		table.Row(e2e.ChainOf(unwind), up, restarted, removed, during, after, records)
		if up.Addresses != 1 || up.Veths != 1 || up.Rules == 0 || restarted != up {
			t.Errorf("unwind %t: a container has %s, after a restart %s", unwind, up, restarted)
		}
		if unwind && (!removed.HasNothing() || !during.HasNothing() ||
			!after.HasNothing() || records > 0) {
			t.Errorf("left: removed %s, not started %s, swept %s, %d records", removed, during, after, records)
		}
		if !unwind && during.Addresses == 0 {
			t.Error("the plain chain leaks nothing, so this shows nothing")
		}
	}
}

// TestE2ENerdctlNetworks: unwind leaves the networks alone that nerdctl makes itself. It reads such a file's first plugin: with unwind there, its
// next network would have the same subnet. What unwindctl shows of a node has these networks.
func TestE2ENerdctlNetworks(t *testing.T) {
	t.Parallel()
	n := newNerdctlNode(t, false)
	n.nerdctl.Run("network", "create", "net1")
	file := e2e.ConfDir + "/default/nerdctl-net1.conflist"
	_, stderr, err := n.Try(e2e.Path(t, "bin/unwindctl"), "wrap", n.File(file))
	if err == nil || !strings.Contains(stderr, "nerdctl") {
		t.Errorf("wrap of a network of nerdctl's: %v, %s", err, stderr)
	}
	// what would happen to a network that somebody has wrapped in place
	list := parsed(n.Node, file)
	subnet, original := subnetOf(list), list["plugins"]
	list["plugins"] = []any{map[string]any{"type": "unwind", "chain": original}}
	wrapped, err := json.Marshal(list)
	check(t, err)
	list["plugins"] = original
	plain, err := json.Marshal(list)
	check(t, err)
	n.Write(file, string(wrapped))
	n.nerdctl.Run("network", "create", "net2")
	if second := subnetOf(parsed(n.Node, e2e.ConfDir+"/default/nerdctl-net2.conflist")); second != subnet || subnet == "" {
		t.Errorf("beside a wrapped network with %s, nerdctl gives the next one %s: wrap need not refuse such a file", subnet, second)
	}
	n.nerdctl.Run("network", "rm", "net2")

	n.Write(file, string(plain))
	_, err = n.nerdctl.Start("one", "net1")
	check(t, err)
	if out := n.Unwindctl("ipam"); !strings.Contains(out, "net1 (") {
		t.Errorf("ipam does not show net1:\n%s", out)
	}
	n.nerdctl.Run("rm", "--force", "one")
	n.Write(file, string(wrapped))
	n.nerdctl.Run("network", "rm", "net1")
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

// subnetOf returns the subnet of a network of nerdctl's.
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

// bridgeOf returns the bridge of a network of nerdctl's.
func bridgeOf(list map[string]any) string {
	var net struct{ Plugins []struct{ Bridge string } }
	data, _ := json.Marshal(list)
	if json.Unmarshal(data, &net) != nil || len(net.Plugins) == 0 {
		return ""
	}
	return net.Plugins[0].Bridge
}
