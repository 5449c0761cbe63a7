package plugin

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"testing"

	"cni-unwind/plugin/netconf"
)

// azureNode is a node with a stand-in for azure-vnet and Azure CNS (testdata/standin/azure.go), which
// has ten addresses. There is no program azure-cns.
type azureNode struct{ *node }

func newAzureNode(t *testing.T) azureNode {
	n := azureNode{newNode(t)}
	n.inner = "0.3.0"
	n.mkdir(n.cns())
	n.link("azure-vnet", filepath.Join(n.path[2], "standin"))
	n.link("cilium-cni", filepath.Join(n.path[2], "faulty"))
	n.link("azure-vnet-ipam", filepath.Join(n.path[1], "host-local"))
	return n
}

func (n azureNode) cns() string { return filepath.Join(n.dir, "cns") }

// held returns the attachments that hold an address in CNS.
func (n azureNode) held() []string { return n.names(n.cns()) }

// link puts a program into CNI_PATH under a name.
func (n *node) link(name, program string) {
	n.Helper()
	if err := os.Symlink(program, filepath.Join(n.path[0], name)); err != nil {
		n.Fatal(err)
	}
}

// plugins returns the plugins of a conflist as Azure writes it, each with the keys that the
// stand-ins need.
func (n azureNode) plugins(conflist string) (plugins []string) {
	n.Helper()
	data, err := os.ReadFile(filepath.Join("../testdata/conflists", conflist))
	var list struct{ Plugins []map[string]any }
	if err == nil {
		err = json.Unmarshal(data, &list)
	}
	if err != nil {
		n.Fatal(err)
	}
	for _, p := range list.Plugins {
		switch ipam, _ := p["ipam"].(map[string]any); p["type"] {
		case "azure-vnet":
			p["dir"], p["addresses"] = n.cns(), 10
			maps.Copy(ipam, map[string]any{"subnet": n.subnet, "dataDir": n.dataDir()})
		case "cilium-cni":
			p["dir"], p["instance"] = n.faultyDir(), "cilium"
		}
		plugins = append(plugins, string(netconf.Marshal(p)))
	}
	return plugins
}

// TestAzure has a pod come and go, and a STATUS pass, with each of Azure's conflists.
func TestAzure(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		conflist  string
		cns, pool int // addresses that a pod holds in CNS, and in azure-vnet-ipam's pool
	}{
		{"azure-overlay.conflist", 1, 0},
		{"azure-pod-subnet.conflist", 1, 0},
		{"azure-chained-cilium.conflist", 1, 0},
		{"azure-multitenancy.conflist", 0, 0},
		{"azure.conflist", 0, 1},
	} {
		t.Run(tt.conflist, func(t *testing.T) {
			t.Parallel()
			n := newAzureNode(t)
			plugins := n.plugins(tt.conflist)
			if out := n.ask("STATUS", "0.3.0", nil, plugins...); out.code != 0 {
				t.Errorf("STATUS: %s", out.stdout)
			}
			p, list := n.pod("a"), n.unwind(plugins...)
			p.mustAdd(list)
			if len(n.held()) != tt.cns || len(n.reserved()) != tt.pool {
				t.Errorf("held in CNS %v, in the pool %v", n.held(), n.reserved())
			}
			p.mustDel(list)
			if len(n.held()) > 0 {
				t.Errorf("held in CNS after DEL: %v", n.held())
			}
			n.nothingLeft()
		})
	}
}

// TestAzureCrashLoop has the ADDs of 14 sandboxes fail, in a chain whose last plugin fails ADD and
// DEL, and then adds a healthy pod. On the plain chain the ten addresses are gone by then.
func TestAzureCrashLoop(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		chain   string
		held    int // after the loop
		healthy bool
	}{
		{"plain", 10, false},
		{"unwind", 0, true},
	} {
		t.Run(tt.chain, func(t *testing.T) {
			t.Parallel()
			n := newAzureNode(t)
			plugins := []string{n.plugins("azure-overlay.conflist")[0], n.faulty("p1", "")}
			list := n.plain(plugins...)
			if tt.chain == "unwind" {
				list = n.unwind(plugins...)
			}
			n.plan(map[string]map[string]string{"p1": {"ADD": "fail", "DEL": "fail"}})
			for i := range 14 {
				p := n.pod(fmt.Sprintf("loop%d", i))
				if _, err := p.add(list); err == nil {
					t.Fatal("an ADD passed")
				}
				_ = p.del(list) // as containerd does after a failed ADD
			}
			if got := n.held(); len(got) != tt.held {
				t.Errorf("%d addresses are held, want %d: %v", len(got), tt.held, got)
			}
			n.plan(nil)
			healthy := n.pod("healthy")
			if _, err := healthy.add(list); (err == nil) != tt.healthy {
				t.Errorf("ADD of a healthy pod: %v", err)
			}
		})
	}
}

// TestAzureWithoutIPAM has an ADD with an ipam.type that azure-vnet would execute be refused before
// anything is taken, if there is no such program.
func TestAzureWithoutIPAM(t *testing.T) {
	t.Parallel()
	n := newAzureNode(t)
	if err := os.Remove(filepath.Join(n.path[0], "azure-vnet-ipam")); err != nil {
		t.Fatal(err)
	}
	p := n.pod("a")
	chain := fmt.Sprintf(`{"cniVersion": "0.3.0", "plugins": [%s]}`, n.plugins("azure.conflist")[0])
	out := n.start(p.input("ADD", n.entryOf(chain, nil)))
	if out.said.Code != 50 || len(n.held()) > 0 {
		t.Errorf("ADD: %s, held %v", out.stdout, n.held())
	}
	n.untouched()
}
