package e2e

import (
	"fmt"
	"strings"
	"testing"
)

// ProviderDaemon is the daemon that a provider's plugin calls.
type ProviderDaemon struct {
	Start, Stop func()
	Held        func() int // addresses or endpoints
}

// ProviderPool lists the addresses that a provider can assign to pods.
var ProviderPool = []string{
	"10.0.12.34", "10.0.12.35", "10.0.12.36", "10.0.12.37", "10.0.12.38", "10.0.12.39",
}

// Providers configure a node: a provider's real plugin, the faulty plugin last in its chain, and
// the stand-in of its daemon, which is not started.
var Providers = []struct {
	Name      string
	Configure func(n *Chained) ProviderDaemon
}{
	{"aws-cni", func(n *Chained) ProviderDaemon {
		n.ConfigureAWS(n.Unwind, n.Faulty())
		var ipamd *IPAMD
		return ProviderDaemon{
			Start: func() { ipamd = n.StartIPAMD(ProviderPool...) },
			Stop:  func() { ipamd.Stop() },
			Held:  func() int { return len(n.AWSAllocations()) },
		}
	}},
	{"cilium-cni", func(n *Chained) ProviderDaemon {
		n.ConfigureCilium(n.Unwind, n.Faulty())
		agent := n.NewCiliumAgent(ProviderPool...)
		return ProviderDaemon{agent.Start, agent.Stop, agent.Endpoints}
	}},
	{"multus, unwind below it", func(n *Chained) ProviderDaemon { return multus(n, false) }},
	{"multus, unwind in front", func(n *Chained) ProviderDaemon { return multus(n, true) }},
}

func multus(n *Chained, front bool) ProviderDaemon {
	api := n.ConfigureMultus(n.Unwind, front, n.Faulty())
	return ProviderDaemon{api.Start, api.Stop, api.Addresses}
}

// Trial is a node with a provider's chain, whose runtime is cnitool.
type Trial struct {
	Chained
	ProviderDaemon
	Away bool // whether the daemon is stopped
}

// Sandboxes is the number of sandboxes in a crash loop: more than a provider has addresses.
const Sandboxes = 8

// TrialPods is the number of pods in the situations without a crash loop, and of the pods that are
// started afterwards.
const TrialPods = 3

func PodsNamed(name string) (names []string) {
	for i := range TrialPods {
		names = append(names, fmt.Sprintf("%s-%d", name, i))
	}
	return names
}

// Add starts a sandbox: see Call.
func (n *Trial) Add(t *testing.T, sandbox string) error {
	n.AddNetNS(sandbox)
	return n.Call(t, "add", sandbox)
}

// Del ends a sandbox: it sends the DEL once and forgets the sandbox, as containerd does after a
// failed ADD.
func (n *Trial) Del(t *testing.T, sandbox string) {
	_ = n.Call(t, "del", sandbox)
	n.RemoveNetNS(sandbox)
}

// Call makes the runtime add or delete a sandbox. Its name is the pod's name, to which a dot and a
// number may be added.
func (n *Trial) Call(t *testing.T, verb, sandbox string) error {
	pod, _, _ := strings.Cut(sandbox, ".")
	return n.Chained.Call(t, verb, sandbox, pod)
}

// CrashLoop starts sandboxes of a pod, which fail.
func (n *Trial) CrashLoop(t *testing.T) {
	for i := range Sandboxes {
		sandbox := fmt.Sprint("crash.", i)
		if n.Add(t, sandbox) == nil {
			t.Error("ADD succeeded")
		}
		n.Del(t, sandbox)
	}
}

func (n *Trial) AddAll(t *testing.T) {
	for _, pod := range PodsNamed("pod") {
		check(t, n.Add(t, pod))
	}
	if held := n.Held(); held < TrialPods {
		t.Errorf("%d pods hold %d, so the test proves nothing", TrialPods, held)
	}
}

func (n *Trial) DelAll(t *testing.T, name string) {
	for _, pod := range PodsNamed(name) {
		n.Del(t, pod)
	}
}

// TrialOutcome counts, after a situation, the addresses that are held immediately, the next pods
// that are refused, and, once all pods are gone, the held addresses and the pending records.
type TrialOutcome struct{ Held, Refused, End, Pending int }

// Outcome runs a situation, repairs the plugin and the daemon, lets unwind sweep, starts the next
// pods, and ends them.
func (n *Trial) Outcome(t *testing.T, run func(*testing.T, *Trial)) (o TrialOutcome) {
	n.Start()
	run(t, n)
	o.Held = n.Held()
	n.Plan(nil)
	if n.Away {
		n.Settled() // at its start, a daemon checks the interfaces of its pods
		n.Start()
	}
	n.Sweep()
	for _, pod := range PodsNamed("next") {
		if n.Add(t, pod) != nil {
			o.Refused++
		}
	}
	n.DelAll(t, "next")
	n.Settle()
	o.End, o.Pending = n.Held(), n.Pending()
	return o
}
