package plugin

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cni-unwind/plugin/netconf"
)

// useIPAMD sets a chain that begins with a stand-in for aws-cni and its daemon, with a pool of 40
// addresses. A reserved address is a symbolic link to its container ID. As with aws-cni 1.23.2, the
// DEL finds addresses by container ID alone, and exits 0 even while the daemon is down. The
// daemon is down while a file named "away" exists. Each call appends a line to a log: the verb, the
// container ID, and the addresses in prevResult.
func (n *node) useIPAMD() {
	n.Helper()
	n.mkdir(n.ipamdDir())
	n.script("aws-cni", fmt.Sprintf(`cd %q; stdin=$(cat)
		echo $CNI_COMMAND $CNI_CONTAINERID $(echo "$stdin" | grep -o '"address": *"[0-9.]*' | grep -o '[0-9.]*$') >>log
		[ $CNI_COMMAND != DEL ] || [ -e away ] || for a in 198.*; do [ "$(readlink $a)" != $CNI_CONTAINERID ] || rm $a; done
		[ $CNI_COMMAND = ADD ] || exit 0
		n=0; got=
		for i in $(seq 101 140); do
			[ $n -lt 1 ] && ln -s $CNI_CONTAINERID 198.18.0.$i 2>/dev/null || continue
			n=$((n+1)); got="$got${got:+, }{\"address\": \"198.18.0.$i/32\"}"
		done
		echo "{\"cniVersion\": \"1.0.0\", \"ips\": [$got]}"`, n.ipamdDir()))
	n.chain(named("aws-cni"), p1.rules())
}

func (n *node) ipamdDir() string { return filepath.Join(n.dir, "ipamd") }

// wantOneDELByIPAMD checks that aws-cni's DEL of the pod ran once.
func (p *pod) wantOneDELByIPAMD() {
	p.Helper()
	var dels []string
	for line := range strings.Lines(read(p, filepath.Join(p.ipamdDir(), "log"))) {
		if f := strings.Fields(line); f[0] == "DEL" && f[1] == p.ContainerID {
			dels = append(dels, cmp.Or(strings.Join(f[2:], " "), "none"))
		}
	}
	p.want(len(dels) == 1, "%s: %q", p.ContainerID, dels)
}

// TestTurnover: pods with aws-cni are deleted while others are added. unwind believes each DEL that
// exits 0, even while ipamd is down. So each pod's DEL runs once, and no record remains.
func TestTurnover(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.useIPAMD()
	old := n.crowd(10, "old")
	var fresh []*pod
	for i, p := range old {
		p.del()
		fresh = append(fresh, n.add(fmt.Sprintf("new%02d", i)))
	}
	for _, p := range old {
		p.wantGone()
	}
	n.wantRecords(10)
	for _, p := range old {
		p.wantOneDELByIPAMD()
	}
	n.write(filepath.Join(n.ipamdDir(), "away"), "")
	for _, p := range fresh {
		p.del()
	}
	n.wantRecords(0)
	for _, p := range fresh {
		p.wantOneDELByIPAMD()
	}
	n.wantClean()
}

// azurePlugins returns the plugins of one of Azure's conflists, with additional keys for the
// stand-ins. testdata/standin/azure.go stands in for azure-vnet and for Azure CNS, which has ten
// addresses. If the conflist's ipam.type is azure-cns, no such plugin runs: azure-vnet calls CNS.
func (n *node) azurePlugins(conflist string) (chain []pluginConf) {
	n.Helper()
	n.inner = "0.3.0"
	n.mkdir(n.heldDir())
	n.link("azure-vnet", filepath.Join(n.path[2], "standin"))
	n.link("cilium-cni", filepath.Join(n.path[2], "faulty"))
	n.link("azure-vnet-ipam", filepath.Join(n.path[1], "host-local"))
	var list struct{ Plugins []map[string]any }
	file := filepath.Join("../testdata/conflists", conflist+".conflist")
	must(n, json.Unmarshal([]byte(read(n, file)), &list))
	for _, p := range list.Plugins {
		switch ipam, _ := p["ipam"].(map[string]any); p["type"] {
		case "azure-vnet":
			p["dir"], p["addresses"] = n.heldDir(), 10
			maps.Copy(ipam, map[string]any{"subnet": n.subnet, "dataDir": n.dataDir()})
		case "cilium-cni":
			p["dir"], p["instance"] = n.faultyDir(), "cilium"
		}
		chain = append(chain, object("%s", netconf.Marshal(p)))
	}
	return chain
}

// link puts a program into CNI_PATH under a name.
func (n *node) link(name, program string) {
	n.Helper()
	must(n, os.Symlink(program, filepath.Join(n.path[0], name)))
}

// TestAzure runs a STATUS, and adds and deletes a pod, with each of Azure's conflists. The pod gets
// an address from CNS, from azure-vnet-ipam's pool, or from neither. It has no host port, because
// the port's rules would contain an address that the stand-ins of other tests also assign.
func TestAzure(t *testing.T) {
	type conflist struct {
		name      string
		cns, pool int // addresses
	}
	conflists := []conflist{
		{"azure-overlay", 1, 0},
		{"azure-pod-subnet", 1, 0},
		{"azure-chained-cilium", 1, 0},
		{"azure-multitenancy", 0, 0},
		{"azure", 0, 1},
	}
	each1(t, conflists, func(t *testing.T, conflist conflist) {
		n := newNode(t)
		n.chain(n.azurePlugins(conflist.name)...)
		n.status()
		a := n.newPod("a")
		a.CapabilityArgs = keys{}
		a.add()
		n.wantHeld(conflist.cns)
		n.wantReserved(conflist.pool)
		a.del()
		n.wantHeld(0)
		n.wantClean()
	})
}

// TestAzureCrashLoop runs 11 ADDs with a chain whose last plugin fails ADD and DEL, and then adds a
// healthy pod. Without unwind, all ten addresses have leaked by then.
func TestAzureCrashLoop(t *testing.T) {
	each1(t, oneOf("plain", "unwind"), func(t *testing.T, by choice) {
		n := newNode(t)
		n.chain(n.azurePlugins("azure-overlay")[0], p1)
		n.plan(p1.ADD("fail"), p1.DEL("fail"))
		for i := range 11 { // like containerd, with a DEL after a failed ADD
			p := n.newPod(fmt.Sprintf("loop%d", i))
			if by.is("plain") {
				n.wantError(p.tryAddPast())
				_ = p.tryDelPast()
			} else {
				n.wantError(p.tryAdd())
				_ = p.tryDel()
			}
		}
		healthy := n.newPod("healthy")
		if by.is("plain") {
			n.wantHeld(10)
			n.plan()
			n.wantError(healthy.tryAddPast())
		} else {
			n.wantHeld(0)
			n.plan()
			healthy.add()
		}
	})
}
