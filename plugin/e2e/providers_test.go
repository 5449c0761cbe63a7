//go:build e2e

package e2e_test

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"cni-unwind/plugin/e2e"
)

// situations lists faults on a node. leaks means that without unwind, addresses or endpoints leak.
var situations = []struct {
	name  string
	leaks bool
	run   func(t *testing.T, n *e2e.Trial)
}{
	{"a crash loop: the last plugin fails ADD and DEL", true, func(t *testing.T, n *e2e.Trial) {
		n.Plan(map[string]string{"ADD": "fail", "DEL": "fail"})
		n.CrashLoop(t)
	}},
	{"a crash loop: the last plugin's binary is missing", true, func(t *testing.T, n *e2e.Trial) {
		binary := n.File(e2e.PluginDir, "faulty")
		to, err := os.Readlink(binary)
		check(t, errors.Join(err, os.Remove(binary)))
		n.CrashLoop(t)
		check(t, os.Symlink(to, binary))
	}},
	{"the last plugin fails DEL, the runtime forgets the sandbox", true, func(t *testing.T, n *e2e.Trial) {
		n.AddAll(t)
		n.Plan(map[string]string{"DEL": "fail"})
		n.DelAll(t, "pod")
	}},
	{"ADD is killed, the runtime forgets the sandbox", true, func(t *testing.T, n *e2e.Trial) {
		n.Plan(map[string]string{"ADD": "hold"})
		ended := make(chan error)
		for i, pod := range e2e.PodsNamed("pod") {
			go func() { ended <- n.Add(t, pod) }()
			// Start the ADDs one after the other, because cilium-cni names its temporary interface after the
			// first characters of the container ID, and all of cnitool's IDs begin with the same characters.
			n.AwaitHeld("ADD", i+1)
		}
		n.KillPlugins()
		for _, pod := range e2e.PodsNamed("pod") {
			if <-ended == nil {
				t.Error("ADD succeeded")
			}
			n.RemoveNetNS(pod)
		}
	}},
	{"the daemon is down during the DEL", false, func(t *testing.T, n *e2e.Trial) {
		n.AddAll(t)
		n.Stop()
		n.Away = true
		n.DelAll(t, "pod")
	}},
	{"the namespaces are gone before the DEL", false, func(t *testing.T, n *e2e.Trial) {
		n.AddAll(t)
		for _, pod := range e2e.PodsNamed("pod") {
			n.RemoveNetNS(pod)
		}
		for _, pod := range e2e.PodsNamed("pod") {
			_ = n.Call(t, "del", pod)
		}
	}},
}

// TestE2EProviders runs the real plugins of providers in each situation, with and without unwind.
// With unwind, each situation leaves no more addresses assigned than without unwind. All later pods
// start, and in the end, no address is assigned.
func TestE2EProviders(t *testing.T) {
	const title = "%d pods, or %d sandboxes in a crash loop; %d addresses; then %d pods start"
	table := e2e.NewTable(t, fmt.Sprintf(title, e2e.TrialPods, e2e.Sandboxes, len(e2e.ProviderPool), e2e.TrialPods),
		"PROVIDER", "WHAT GOES WRONG", "CHAIN", "HELD", "PODS REFUSED", "HELD AT THE END", "PENDING")
	providers := e2e.Providers
	if e2e.Short() {
		providers = providers[2:] // aws-cni and cilium-cni are not built
	}
	for _, p := range providers {
		for _, s := range situations {
			t.Run(p.Name+"/"+s.name, func(t *testing.T) {
				t.Parallel()
				outcomes := map[bool]e2e.TrialOutcome{}
				for _, unwind := range []bool{false, true} {
					n := &e2e.Trial{Chained: e2e.Chained{Node: e2e.NewNode(t), Unwind: unwind}}
					n.ProviderDaemon = p.Configure(&n.Chained)
					o := n.Outcome(t, s.run)
					outcomes[unwind] = o
					chain := e2e.ChainOf(unwind)
					table.Row(p.Name, s.name, chain, o.Held, o.Refused, o.End, o.Pending)
				}
				plain, unwind := outcomes[false], outcomes[true]
				if s.leaks && plain.End == 0 {
					t.Errorf("without unwind nothing is held, so the test proves nothing: %+v", plain)
				}
				if unwind.Held > plain.Held || unwind.End > plain.End {
					t.Errorf("more is held with unwind, %+v, than without, %+v", unwind, plain)
				}
				if unwind.Refused > 0 || unwind.End > 0 || unwind.Pending > 0 {
					t.Errorf("%+v; want nothing refused, held or pending", unwind)
				}
			})
		}
	}
}
