package plugin

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/undo"
)

// unverified returns why the pod's DEL is not proven.
func (p *pod) unverified() string {
	e := p.entry()
	if e == nil || len(e.Steps) == 0 {
		return ""
	}
	if e.Steps[0].Code != 0 {
		return ""
	}
	return strings.TrimPrefix(e.Steps[0].Last, "exit code 0, but ")
}

// ipamd are statements about aws-cni, whose DEL passes and frees nothing since ipamd is away, and ipamd's
// checkpoint.
func ipamd() acts {
	checkpoint := func(s *story, file string) string { return filepath.Join(s.dir, "aws-node", file) }
	return acts{
		"aws": func(s *story, w []string) { // aws PLUGINS: the chain, after aws-cni
			s.link("aws-cni", filepath.Join(s.path[2], "faulty"))
			s.mkdir(checkpoint(s, ""))
			s.conf["stores"] = map[string]string{"aws-cni": checkpoint(s, "ipam.json")}
			s.chain = append([]string{fmt.Sprintf(`{"type": "aws-cni", "dir": %q, "instance": "aws", "address": "198.18.0.7/32"}`,
				s.faultyDir())}, w...)
		},
		"gives": func(s *story, w []string) { // gives FILE CONTAINER …: a checkpoint in which they have the address
			var all []string
			for _, id := range w[1:] {
				all = append(all, fmt.Sprintf(`{"networkName": %q, "containerID": %q, "ifName": "eth0", "ipv4": "198.18.0.7",
					"allocationTimestamp": 1790000000123456789,
					"metadata": {"k8sPodNamespace": "default", "k8sPodName": "web-0", "interfacesCount": 1}}`, s.network, id))
			}
			s.write(checkpoint(s, w[0]), `{"version": "vpc-cni-ipam/1", "allocations": [`+strings.Join(all, ", ")+`]}`)
		},
	}
}

// TestDELThatLies: aws-cni's DEL passes, and ipamd still has the address. The runtime's DEL succeeds.
// The DEL stays pending, alone, is tried again with pauses, and is done once ipamd has given the
// address back, with no further DEL.
func TestDELThatLies(t *testing.T) {
	stories(t, `
	each file ipam.json ipam-nic-1.json
	aws p1; add a; gives $file a
	del a; unverified a 198.18.0.7 is still allocated; entry a deleting 1; pending a aws
	# the runtime may ask again
	del a; sweep; unverified a 198.18.0.7 is still allocated; times 3 DEL aws
	forgets; gives $file other; released a; calls
	events 'unverified a [198.18.0.7] [aws-cni]: exit code 0, but 198.18.0.7 is still allocated' 'swept a '`, ipamd())
}

// TestAgentKeepsPauses: many DELs do not count, since ipamd's checkpoint still has the addresses. A sweep of the
// agent, which nobody asked for, tries three of them, and none before its pause is over. A person's
// sweep tries all. Once the addresses are free, one sweep of the agent releases all, with no DEL.
func TestAgentKeepsPauses(t *testing.T) {
	stories(t, `
	aws; add a; gives ipam.json a a-1 a-2 a-3 a-4 a-5 a-6 a-7 a-8 a-9 a-10 a-11; del a; copies a 11
	# One each minute: the pauses of the first 20 tries are over by then.
	pauses 12 0s; periodic 3; pauses 12 0s; periodic 3; pauses 12 0s; periodic 3; pauses 12 0s; periodic 3
	pauses 12 4m; periodic 0; sweep; times 12 DEL aws; forgets
	gives ipam.json other; pauses 12 0s; periodic 0; entries 0`, ipamd(), acts{
		"periodic": func(s *story, w []string) { // periodic N: the agent's sweep runs at most so many DELs
			s.node.forgetCalls()
			_, err := s.plugin().Sweep(s.Context(), s.stateDir, sweep.Job{Periodic: true})
			most, wrong := strconv.Atoi(w[0])
			s.must(errors.Join(err, wrong))
			s.want(len(s.node.calls()) <= most, "%q", s.node.calls())
			s.node.forgetCalls()
		},
	})
}

// askedProbe answers as a store elsewhere does.
type askedProbe struct {
	answer func(ctx context.Context) ([]netip.Addr, bool, error)
}

func (p askedProbe) Held(ctx context.Context, _ ipam.Query) ([]netip.Addr, bool, error) {
	return p.answer(ctx)
}

// whereabouts are statements about a chain that calls a whereabouts that always passes, and its store.
func whereabouts() acts {
	address := netip.MustParseAddr("198.18.0.9")
	stores := map[string]func(context.Context) ([]netip.Addr, bool, error){
		"free":  func(context.Context) ([]netip.Addr, bool, error) { return nil, true, nil },
		"held":  func(context.Context) ([]netip.Addr, bool, error) { return []netip.Addr{address}, true, nil },
		"hangs": func(ctx context.Context) ([]netip.Addr, bool, error) { <-ctx.Done(); return nil, true, ctx.Err() },
	}
	edit := func(s *story, name string, change func(*journal.Step)) {
		s.who(name).edit(func(e *journal.Entry) { change(&e.Steps[0]) })
	}
	return acts{
		"whereabouts": func(s *story, w []string) { // whereabouts PLUGIN: the chain of a plugin that calls it
			s.conf["gracePeriod"] = "1h"
			s.node.script("whereabouts", "cat >/dev/null\n"+
				`[ "$CNI_COMMAND" != ADD ] || echo '{"cniVersion": "1.0.0", "ips": [{"address": "198.18.0.9/32"}]}'`)
			s.chain = []string{w[0] + `, "ipam": {"type": "whereabouts"}`}
		},
		// asking HOW sweeps as the agent does, which asks the store.
		"asking": func(s *story, w []string) {
			plugin := &Plugin{Stderr: s.Output(), Budgets: undo.DefaultBudgets, CacheDir: s.cacheDir(),
				Probes: map[string]ipam.Probe{"whereabouts": askedProbe{stores[w[0]]}}}
			_, err := plugin.Sweep(s.Context(), s.stateDir, sweep.Job{})
			s.must(err)
		},
		"confirms": func(s *story, w []string) { s.who(w[0]).wantConfirmation(time.Hour) },
		"ripe": func(s *story, w []string) { // ripe POD [REASON]: the second DEL's time has come
			edit(s, w[0], func(step *journal.Step) {
				if step.Again, step.Wait.Until = 1, 1; len(w) > 1 {
					step.Wait, step.Last = journal.Wait{}, "exit code 0, but "+strings.Join(w[1:], " ")
				}
			})
		},
		"also": func(s *story, w []string) { // also POD OTHER: the container in this network
			p := *s.who(w[0])
			p.node = s.node
			s.pods[w[1]] = &p
		},
		"nobody": func(s *story, w []string) { s.who(w[0]).Args = nil }, // a container of no pod
	}
}

// TestStoreElsewhere: whereabouts' DEL proves nothing. The program that starts for each pod cannot
// ask its store, so the DEL runs once more after the grace period. The agent asks: what is held, or
// cannot be told, stays; a store that hangs is not waited for. Of what is free, no second DEL is
// waited for.
func TestStoreElsewhere(t *testing.T) {
	stories(t, `
	whereabouts p0; add a; del a; confirms a
	ripe a; asking held; unverified a 198.18.0.9 is still allocated
	status; unverified a 198.18.0.9 is still allocated
	asking held; unverified a 198.18.0.9 is still allocated
	clock; asking hangs; within 14s
	add b; del b; ripe b; asking free; gone b`, whereabouts())
}

// TestOtherNetworkOfTheContainer: whereabouts goes by container ID and interface, whatever the
// network. A second DEL of a network that a pod has left would free the address that the pod has in
// another one by now. It waits until the container is gone, also within that other network's ADD. The
// damaged entry of another container hides no living one.
func TestOtherNetworkOfTheContainer(t *testing.T) {
	stories(t, `
	whereabouts p0; add a; del a
	either unknown: let ripe ripe a
	or unknown, beside damage: let ripe ripe a
		network another; whereabouts p0; add c; damage c
	or unverified: let ripe ripe a 198.18.0.9 is still allocated
	network other; also a b; whereabouts p1; add b; forgets
	$ripe; sweep; asking held; calls
	unless damage: entry a; del b; ripe b; asking free; gone a b
	if damage: leaves`, whereabouts())
}

// TestOtherNetworkAfterAKill: unwind is killed when whereabouts' DEL has passed, and before the journal
// has that. No sweep runs the DEL again while another network of the container lives; the runtime
// may ask for it. The container is of no pod, for whose next ADD the DEL would run before that has an
// address.
func TestOtherNetworkAfterAKill(t *testing.T) {
	stories(t, `
	whereabouts p0; nobody a; add a
	kill undone 1 del a; was-killed; times 1 DEL p0
	network other; also a b; whereabouts p1; add b; sweep
	network third; also a c; add c; sweep
	times 1 DEL p0; entry a
	either asked for: network; whereabouts p0; del a
	or not asked for: del b c; sweep
	times 2 DEL p0; confirms a
	leaves`, whereabouts())
}

// wantConfirmation checks that the DEL of the pod's one pending step passed, proves nothing, and
// runs once more after a grace period that has just begun.
func (p *pod) wantConfirmation(grace time.Duration) {
	p.Helper()
	e := p.entry()
	if e == nil || len(e.Steps) != 1 {
		p.Fatalf("the journal has %+v, want one step", e)
	}
	s := e.Steps[0]
	in := time.Duration(s.Again - journal.BootNanos())
	if in > grace || in < grace-time.Minute || s.Last != "" {
		p.Errorf("the DEL runs again in %s, want %s; %q", in, grace, s.Last)
	}
	if s.Wait.For != journal.ForRepeat || s.ADD == journal.AddKilled {
		p.Error("it counts as killed")
	}
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
	ripe a; sweep; gone a; absent $held
	leaves`, whereabouts(), acts{"liar": func(s *story, w []string) {
		s.conf["stores"] = map[string]string{"aws-cni": filepath.Join(s.dir, "none", "ipam.json")}
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
