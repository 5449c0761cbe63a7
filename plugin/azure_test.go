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

// azure are statements about a stand-in for azure-vnet and Azure CNS (testdata/standin/azure.go), which
// has ten addresses. There is no program azure-cns.
var azure = acts{
	// azure CONFLIST [N]: the plugins of a conflist as Azure writes it, or the first N, each with the keys
	// that the stand-ins need
	"azure": func(s *story, w []string) {
		s.inner, s.vars["holds"] = "0.3.0", filepath.Join(s.dir, "cns")
		s.mkdir(s.vars["holds"])
		s.link("azure-vnet", filepath.Join(s.path[2], "standin"))
		s.link("cilium-cni", filepath.Join(s.path[2], "faulty"))
		s.link("azure-vnet-ipam", filepath.Join(s.path[1], "host-local"))
		var list struct{ Plugins []map[string]any }
		s.must(json.Unmarshal([]byte(read(s, filepath.Join("../testdata/conflists", w[0]+".conflist"))), &list))
		s.chain = nil
		for _, p := range list.Plugins {
			switch ipam, _ := p["ipam"].(map[string]any); p["type"] {
			case "azure-vnet":
				p["dir"], p["addresses"] = s.vars["holds"], 10
				maps.Copy(ipam, map[string]any{"subnet": s.subnet, "dataDir": s.dataDir()})
			case "cilium-cni":
				p["dir"], p["instance"] = s.faultyDir(), "cilium"
			}
			s.chain = append(s.chain, string(netconf.Marshal(p)))
		}
		if len(w) > 1 {
			s.chain = append(s.chain[:1], w[1:]...)
		}
	},
}

// link puts a program into CNI_PATH under a name.
func (n *node) link(name, program string) {
	n.Helper()
	must(n, os.Symlink(program, filepath.Join(n.path[0], name)))
}

// TestAzure has a pod come and go, and a STATUS pass, with each of Azure's conflists. A pod holds an
// address in CNS, in azure-vnet-ipam's pool, or in neither. Without a host port, whose rule would hold up a DEL
// of another test's stand-in.
func TestAzure(t *testing.T) {
	stories(t, `
	let cns 1; let pool 0
	either overlay: azure azure-overlay
	or pod subnet: azure azure-pod-subnet
	or chained: azure azure-chained-cilium
	or multitenancy: azure azure-multitenancy; let cns 0
	or pool: azure azure; let cns 0; let pool 1
	status; capabilities a {}; add a; held $cns; reserved $pool
	del a; held 0`, azure)
}

// TestAzureCrashLoop has the ADDs of 11 sandboxes fail, in a chain whose last plugin fails ADD and
// DEL, and then adds a healthy pod. On the plain chain the ten addresses are gone by then.
func TestAzureCrashLoop(t *testing.T) {
	stories(t, `
	azure azure-overlay p1; plan p1 ADD fail, p1 DEL fail
	# As containerd does after a failed ADD.
	either plain: loop past; held 10; plan; fails past add healthy
	or unwind: loop; held 0; plan; add healthy
	leaves`, azure, acts{"loop": func(s *story, w []string) {
		for i := range 11 {
			pod := fmt.Sprintf("loop%d", i)
			verbs["fails"](s, append(w, "add", pod))
			_, _ = s.attempt(append(w, "del", pod))
		}
	}})
}
