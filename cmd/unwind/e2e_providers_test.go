//go:build e2e

package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"cni-unwind/testdata/e2e"
)

// daemon is what a provider's plugin calls, with what it keeps.
type daemon struct {
	start, stop func()
	held        func() int // addresses or endpoints
}

// pool is what a provider has for pods.
var pool = []string{
	"10.0.12.34", "10.0.12.35", "10.0.12.36", "10.0.12.37", "10.0.12.38", "10.0.12.39",
}

// providers configure a node: a provider's real plugin, the faulty plugin last in its chain, and
// the stand-in of its daemon, which is not started.
var providers = []struct {
	name      string
	configure func(n *e2e.Chained) daemon
}{
	{"aws-cni", func(n *e2e.Chained) daemon {
		n.ConfigureAWS(n.Unwind, n.Faulty())
		var ipamd *e2e.IPAMD
		return daemon{
			start: func() { ipamd = n.StartIPAMD(pool...) },
			stop:  func() { ipamd.Stop() },
			held:  func() int { return len(n.AWSAllocations()) },
		}
	}},
	{"cilium-cni", func(n *e2e.Chained) daemon {
		n.ConfigureCilium(n.Unwind, n.Faulty())
		agent := n.NewCiliumAgent(pool...)
		return daemon{agent.Start, agent.Stop, agent.Endpoints}
	}},
	{"multus, unwind below it", func(n *e2e.Chained) daemon { return multus(n, false) }},
	{"multus, unwind in front", func(n *e2e.Chained) daemon { return multus(n, true) }},
}

func multus(n *e2e.Chained, front bool) daemon {
	api := n.ConfigureMultus(n.Unwind, front, n.Faulty())
	return daemon{api.Start, api.Stop, api.Addresses}
}

// trial is a node with a provider's chain, whose runtime is cnitool.
type trial struct {
	e2e.Chained
	daemon
	away bool // the daemon is
}

// sandboxes is how many a crash loop makes: more than a provider has addresses.
const sandboxes = 8

// pods is how many pods a situation has that is no crash loop, and how many are started after it.
const pods = 3

// podsNamed returns the names of pods.
func podsNamed(name string) (names []string) {
	for i := range pods {
		names = append(names, fmt.Sprintf("%s-%d", name, i))
	}
	return names
}

// situations are what goes wrong. leaks says that the plain chain never gives back what is held.
var situations = []struct {
	name  string
	leaks bool
	run   func(t *testing.T, n *trial)
}{
	{"a crash loop: the last plugin fails ADD and DEL", true, func(t *testing.T, n *trial) {
		n.Plan(map[string]string{"ADD": "fail", "DEL": "fail"})
		n.crashLoop(t)
	}},
	{"a crash loop: the last plugin's binary is missing", true, func(t *testing.T, n *trial) {
		binary := n.File(e2e.PluginDir, "faulty")
		to, err := os.Readlink(binary)
		check(t, errors.Join(err, os.Remove(binary)))
		n.crashLoop(t)
		check(t, os.Symlink(to, binary))
	}},
	{"the last plugin fails DEL, the runtime forgets", true, func(t *testing.T, n *trial) {
		n.addAll(t)
		n.Plan(map[string]string{"DEL": "fail"})
		n.delAll(t, "pod")
	}},
	{"ADD is killed, the runtime forgets", true, func(t *testing.T, n *trial) {
		n.Plan(map[string]string{"ADD": "hold"})
		ended := make(chan error)
		for i, pod := range podsNamed("pod") {
			go func() { ended <- n.add(t, pod) }()
			// One after the other: cilium-cni's temporary interface has the beginning of the ID as its
			// name, and cnitool's IDs all begin with the same.
			n.AwaitHeld("ADD", i+1)
		}
		n.KillPlugins()
		for _, pod := range podsNamed("pod") {
			if <-ended == nil {
				t.Error("ADD passed")
			}
			n.RemoveNetNS(pod)
		}
	}},
	{"the daemon is away at the DEL", false, func(t *testing.T, n *trial) {
		n.addAll(t)
		n.stop()
		n.away = true
		n.delAll(t, "pod")
	}},
	{"the namespaces are gone before the DEL", false, func(t *testing.T, n *trial) {
		n.addAll(t)
		for _, pod := range podsNamed("pod") {
			n.RemoveNetNS(pod)
		}
		for _, pod := range podsNamed("pod") {
			_ = n.call(t, "del", pod)
		}
	}},
}

// add starts a sandbox: see call.
func (n *trial) add(t *testing.T, sandbox string) error {
	n.AddNetNS(sandbox)
	return n.call(t, "add", sandbox)
}

// del ends a sandbox. As containerd does after a failed ADD, the runtime asks for the DEL once, and
// forgets the sandbox.
func (n *trial) del(t *testing.T, sandbox string) {
	_ = n.call(t, "del", sandbox)
	n.RemoveNetNS(sandbox)
}

// call has the runtime add or delete a sandbox, which has the name of its pod, or that, a dot and a
// number.
func (n *trial) call(t *testing.T, verb, sandbox string) error {
	pod, _, _ := strings.Cut(sandbox, ".")
	return n.Chained.Call(t, verb, sandbox, pod)
}

// crashLoop starts sandboxes of a pod, which fail.
func (n *trial) crashLoop(t *testing.T) {
	for i := range sandboxes {
		sandbox := fmt.Sprint("crash.", i)
		if n.add(t, sandbox) == nil {
			t.Error("ADD passed")
		}
		n.del(t, sandbox)
	}
}

func (n *trial) addAll(t *testing.T) {
	for _, pod := range podsNamed("pod") {
		check(t, n.add(t, pod))
	}
	if held := n.held(); held < pods {
		t.Errorf("%d pods hold %d, so that the test shows nothing", pods, held)
	}
}

func (n *trial) delAll(t *testing.T, name string) {
	for _, pod := range podsNamed(name) {
		n.del(t, pod)
	}
}

// trialOutcome is what a situation leaves: what is held at once, how many of the next pods are
// refused, and what is held and pending at the end, without any pod.
type trialOutcome struct{ held, refused, end, pending int }

// outcome runs a situation, repairs what is broken, lets unwind sweep, starts the next pods, and
// ends them.
func (n *trial) outcome(t *testing.T, run func(*testing.T, *trial)) (o trialOutcome) {
	n.start()
	run(t, n)
	o.held = n.held()
	n.Plan(nil)
	if n.away {
		n.Settled() // a daemon looks for the interfaces of its pods at its start
		n.start()
	}
	n.Sweep()
	for _, pod := range podsNamed("next") {
		if n.add(t, pod) != nil {
			o.refused++
		}
	}
	n.delAll(t, "next")
	n.Settle()
	o.end, o.pending = n.held(), n.Pending()
	return o
}

// TestE2EProviders: the real plugins of providers, plain and through unwind, in what goes wrong on
// a node. unwind is never worse than the plain chain, refuses no pod, and holds nothing at the end.
func TestE2EProviders(t *testing.T) {
	const title = "%d pods, or %d sandboxes in a crash loop; %d addresses; then %d pods start"
	table := e2e.NewTable(t, fmt.Sprintf(title, pods, sandboxes, len(pool), pods),
		"PROVIDER", "WHAT GOES WRONG", "CHAIN", "HELD", "PODS REFUSED", "HELD AT THE END", "PENDING")
	if e2e.Short() {
		providers = providers[:3]
	}
	for _, p := range providers {
		for _, s := range situations {
			t.Run(p.name+"/"+s.name, func(t *testing.T) {
				t.Parallel()
				outcomes := map[bool]trialOutcome{}
				for _, unwind := range []bool{false, true} {
					n := &trial{Chained: e2e.Chained{Node: e2e.NewNode(t), Unwind: unwind}}
					n.daemon = p.configure(&n.Chained)
					o := n.outcome(t, s.run)
					outcomes[unwind] = o
					chain := e2e.ChainOf(unwind)
					table.Row(p.name, s.name, chain, o.held, o.refused, o.end, o.pending)
				}
				plain, unwind := outcomes[false], outcomes[true]
				if s.leaks && plain.end == 0 {
					t.Errorf("the plain chain holds nothing, so that the test shows nothing: %+v", plain)
				}
				if unwind.held > plain.held || unwind.end > plain.end {
					t.Errorf("worse than plain: %+v, plain %+v", unwind, plain)
				}
				if unwind.refused > 0 || unwind.end > 0 || unwind.pending > 0 {
					t.Errorf("%+v; want nothing refused, held or pending", unwind)
				}
			})
		}
	}
}
