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
	"time"

	"cni-unwind/journal"
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
			s.vars["x"], s.vars["y"] = "198.18.0.101", "198.18.0.102"
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
		// back [ADDRESSES]: the daemon starts, and drops these
		"back": func(s *story, w []string) {
			for _, name := range append(w, "away") {
				s.must(os.RemoveAll(filepath.Join(dir(s), name)))
			}
		},
		// aws-dels POD [ADDRESSES [| ADDRESSES …]]: the prevResults of its DELs
		"aws-dels": func(s *story, w []string) {
			got := strings.Join(dels(s, w[0]), " | ")
			s.want(got == strings.Join(w[1:], " "), "%s", got)
		},
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

// TestTurnover: pods with aws-cni go while others start. Each gets the address of the one before, which
// proves that ipamd has freed it: that one's DEL is over, and aws-cni's second DEL never runs. No step
// waits for an owner. Once the grace period is over, one sweep ends what has no next owner.
func TestTurnover(t *testing.T) {
	stories(t, `
	conf gracePeriod 1h; ipamd 1; crowd 10 old
	turnover 10
	gone $old; entries 10; each-del $old
	status; sweep; entries 10; each-del $old
	del $new; entries 10; due $new; sweep`, ipamdPool())
}

// TestSecondDEL: aws-cni's DEL passes while its daemon is away, and runs once more after the grace period. It
// frees by container, and is shown no address, whose next owner's rules it would remove. It is over although
// another attachment has one of its addresses. An address proves nothing whose owner was there before: the
// journal has it, and ipamd dropped it.
func TestSecondDEL(t *testing.T) {
	stories(t, `
	conf gracePeriod 1h; ipamd 2
	either its addresses are nobody's: add a; away; del a; back; let dels '$x $y | none'
	or the first has a next owner: add a; away; del a; back $x; ipamd 1; add b; let dels '$x $y | none'
	or the second has a next owner: add a; away; del a; back $y; ipamd 1; add b; let dels '$x $y | none'
	or all have: add a; away; del a; back $x $y; add b; let dels '$x $y'
	or all have, and its DEL is b's: add a; drop a; back $x $y; add b; let dels none
	or they have an owner from before: chain {"type": "aws-cni"}; add b; back $x $y; add a; del a; let dels 'none | none'
	unless all: status; sweep; entry a deleting 1; due a; sweep
	gone a; aws-dels a $dels
	unless nobody: del b; due b; sweep`, ipamdPool())
}

// whereabouts are statements about a chain that calls a whereabouts that always passes.
func whereabouts() acts {
	return acts{
		"whereabouts": func(s *story, w []string) { // whereabouts PLUGIN: the chain of a plugin that calls it
			s.conf["gracePeriod"] = "1h"
			s.node.script("whereabouts", "cat >/dev/null\n"+
				`[ "$CNI_COMMAND" != ADD ] || echo '{"cniVersion": "1.0.0", "ips": [{"address": "198.18.0.9/32"}]}'`)
			s.chain = []string{w[0] + `, "ipam": {"type": "whereabouts"}`}
		},
		// confirms POD: the DEL of its one pending step passed, proves nothing, and runs once more after
		// a grace period that has just begun
		"confirms": func(s *story, w []string) {
			e := s.who(w[0]).entry()
			if e == nil || len(e.Undo.Steps) != 1 {
				s.Fatalf("the journal has %+v, want one step", e)
			}
			step := e.Undo.Steps[0]
			in := time.Duration(step.Again - journal.BootNanos())
			s.want(in <= time.Hour && in > 59*time.Minute, "it runs again in %s", in)
			s.want(step.Next.Why == journal.ForRepeat && step.ADD != journal.AddKilled, "it was killed")
			s.want(step.Last == "", "%q", step.Last)
		},
		"also": func(s *story, w []string) { // also POD OTHER: the container in this network
			p := *s.who(w[0])
			p.node = s.node
			s.pods[w[1]] = &p
		},
		"nobody": func(s *story, w []string) { s.who(w[0]).Args = nil }, // a container of no pod
	}
}

// TestOtherNetworkOfTheContainer: whereabouts goes by container ID and interface, whatever the
// network. A second DEL of a network that a pod has left would free the address that the pod has in
// another one by now. It waits until the container is gone, also within that other network's ADD. The
// damaged entry of another container hides no living one.
func TestOtherNetworkOfTheContainer(t *testing.T) {
	stories(t, `
	whereabouts p0; add a; del a
	either alone:
	or beside damage: network another; whereabouts p0; add c; damage c
	network other; also a b; whereabouts p1; add b; forgets
	due a; sweep; agent; calls
	if alone: entry a; del b; due b; sweep; gone a b
	if damage: leaves`, whereabouts())
}

// TestOtherNetworkAfterAKill: unwind is killed when whereabouts' DEL has passed, and before the journal
// has that. No sweep runs the DEL again while another network of the container lives; the runtime
// may ask for it. The container is of no pod, for whose next ADD the DEL would run before that has an
// address.
func TestOtherNetworkAfterAKill(t *testing.T) {
	stories(t, `
	either asked for: let tries 0
	or asked for, its DEL took a second: let tries 1; plan p0 DEL late
	or not asked for: let tries 0
	or not asked for, after a slow DEL: let tries 1
	whereabouts p0; nobody a; add a
	kill undone 1 del a; was-killed; times 1 DEL p0
	unless took a second: tried a $tries
	network other; also a b; whereabouts p1; add b; sweep
	network third; also a c; add c; sweep
	times 1 DEL p0; entry a
	unless not: network; whereabouts p0; del a
	if not: del b c; sweep
	times 2 DEL p0; confirms a
	leaves`, whereabouts(), acts{
		// tried POD N: unwind marks a DEL that takes half a second as tried (undo's markAfter), and was killed
		// after N of them, however slow this machine is
		"tried": func(s *story, w []string) {
			s.who(w[0]).edit(func(e *journal.Entry) {
				step := &e.Undo.Steps[0]
				step.Tries, step.MayHaveRun = s.number(w[1]), w[1] != "0"
			})
		},
	})
}

// TestFailedADDLies: the ADD of a plugin fails after it has written the address, and its DEL passes
// and frees nothing, since the API is away for both. The DEL runs once more after the grace period.
//
// The script does what whereabouts 0.9.4 does (pkg/storage/kubernetes/ipam.go, IPManagementKubernetesUpdate):
// the ADD writes the IPPool, then the reservation across pools, and returns an error of the second write
// without taking back the first; cmdDel drops every error. aws-cni 1.23.2 fails an ADD likewise
// (cmd/routed-eni-cni-plugin/cni.go, add: "kubelet will send delete").
func TestFailedADDLies(t *testing.T) {
	stories(t, `
	each plugin whereabouts aws-cni
	conf gracePeriod 1h; liar $plugin; fails add a
	appears $held; confirms a
	# the runtime's DEL, which frees nothing either
	del a; lose $away; sweep; confirms a
	due a; sweep; gone a; absent $held
	leaves`, whereabouts(), acts{"liar": func(s *story, w []string) {
		s.node.script(w[0], `cat >/dev/null; cd "${0%/*}"
			[ "$CNI_COMMAND" != ADD ] || touch held.$CNI_CONTAINERID
			if [ -e away ]; then [ "$CNI_COMMAND" = DEL ] || { echo '{"code": 11, "msg": "no API"}'; exit 1; }; exit 0; fi
			[ "$CNI_COMMAND" != DEL ] || rm -f held.$CNI_CONTAINERID
			[ "$CNI_COMMAND" != ADD ] || echo '{"cniVersion": "1.0.0", "ips": [{"address": "198.18.0.8/32"}]}'`)
		s.chain = []string{fmt.Sprintf(`p0, "ipam": {"type": %q}`, w[0]), "p1"}
		if w[0] == "aws-cni" {
			s.chain[0] = `{"type": "aws-cni"}`
		}
		s.vars["held"] = filepath.Join(s.path[0], "held.a")
		s.vars["away"] = filepath.Join(s.path[0], "away")
		s.write(s.vars["away"], "")
	}})
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
