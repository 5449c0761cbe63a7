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

// ipamdPool are statements about a stand-in for aws-cni and its daemon, whose addresses are links to their
// containers. As aws-cni 1.23.2, its DEL frees by container ID alone, and exits 0 also while the daemon is
// away. Each call is a line of a log: the verb, the container, and the addresses in its prevResult.
func ipamdPool() acts {
	dir := func(s *story) string { return filepath.Join(s.dir, "ipamd") }
	dels := func(s *story, name string) (all []string) {
		for line := range strings.Lines(read(s, filepath.Join(dir(s), "log"))) {
			if f := strings.Fields(line); f[0] == "DEL" && f[1] == s.who(name).ContainerID {
				all = append(all, cmp.Or(strings.Join(f[2:], " "), "none"))
			}
		}
		return all
	}
	return acts{
		// ipamd N: the chain begins with aws-cni, each of whose pods gets N addresses of a pool of 40
		"ipamd": func(s *story, w []string) {
			s.mkdir(dir(s))
			s.node.script("aws-cni", fmt.Sprintf(`cd %q; stdin=$(cat)
				echo $CNI_COMMAND $CNI_CONTAINERID $(echo "$stdin" | grep -o '"address": *"[0-9.]*' | grep -o '[0-9.]*$') >>log
				[ $CNI_COMMAND != DEL ] || [ -e away ] || for a in 198.*; do [ "$(readlink $a)" != $CNI_CONTAINERID ] || rm $a; done
				[ $CNI_COMMAND = ADD ] || exit 0
				n=0; got=
				for i in $(seq 101 140); do
					[ $n -lt %s ] && ln -s $CNI_CONTAINERID 198.18.0.$i 2>/dev/null || continue
					n=$((n+1)); got="$got${got:+, }{\"address\": \"198.18.0.$i/32\"}"
				done
				echo "{\"cniVersion\": \"1.0.0\", \"ips\": [$got]}"`, dir(s), w[0]))
			s.chain = []string{`{"type": "aws-cni"}`, `p1, "rules": true`}
		},
		"away": func(s *story, _ []string) { s.write(filepath.Join(dir(s), "away"), "") },
		// each-del PODS: aws-cni's DEL ran once
		"each-del": func(s *story, w []string) {
			for _, name := range w {
				s.want(len(dels(s, name)) == 1, "%s: %q", name, dels(s, name))
			}
		},
		// turnover N: pods go one by one, and for each another one comes
		"turnover": func(s *story, w []string) {
			for i := range s.number(w[0]) {
				s.passes([]string{"del", fmt.Sprintf("old%02d", i)})
				s.passes([]string{"add", fmt.Sprintf("new%02d", i)})
				s.vars["new"] += fmt.Sprintf(" new%02d", i)
			}
		},
	}
}

// TestTurnover: pods with aws-cni go while others start. Each DEL that exits 0 is believed, though aws-cni's
// does also while ipamd is away: it never runs twice, and no step waits for an owner.
func TestTurnover(t *testing.T) {
	stories(t, `
	ipamd 1; crowd 10 old
	turnover 10
	gone $old; entries 10; each-del $old
	away; del $new; entries 0; each-del $new`, ipamdPool())
}

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
