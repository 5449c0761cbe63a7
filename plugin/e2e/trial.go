package e2e

import (
	"fmt"
	"strings"
	"testing"
)

// ProviderDaemon controls the stand-in for the daemon that a provider's plugin calls.
type ProviderDaemon struct {
	Start, Stop func()
	Held        func() int // counts the assigned addresses or the endpoints
}

// ProviderPool lists the addresses that a provider can assign to pods.
var ProviderPool = []string{
	"10.0.12.34", "10.0.12.35", "10.0.12.36", "10.0.12.37", "10.0.12.38", "10.0.12.39",
}

// Providers are the providers to test. Configure gives a node the provider's chain: the provider's
// real plugin, and the test plugin faulty at the end. It returns the stand-in for the provider's
// daemon without starting it.
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

// Trial is a node with a provider's chain. cnitool stands in for the runtime.
type Trial struct {
	Chained
	ProviderDaemon
	Away bool // whether the daemon is stopped
}

// Sandboxes is the number of sandboxes that CrashLoop starts. ProviderPool has fewer addresses.
const Sandboxes = 8

// TrialPods is the number of pods in a situation (see Outcome) that does not call CrashLoop, and
// the number of pods that start after each situation.
const TrialPods = 3

func PodsNamed(name string) (names []string) {
	for i := range TrialPods {
		names = append(names, fmt.Sprintf("%s-%d", name, i))
	}
	return names
}

// Add adds a sandbox with a new network namespace. See Call for the sandbox's name.
func (n *Trial) Add(t *testing.T, sandbox string) error {
	n.AddNetNS(sandbox)
	return n.Call(t, "add", sandbox)
}

// Del sends one DEL for a sandbox, and removes the network namespace even if the DEL fails, as
// containerd does after a failed ADD.
func (n *Trial) Del(t *testing.T, sandbox string) {
	_ = n.Call(t, "del", sandbox)
	n.RemoveNetNS(sandbox)
}

// Call makes the runtime add or delete a sandbox. The sandbox's name is the pod's name, or the
// pod's name with a dot and a number.
func (n *Trial) Call(t *testing.T, verb, sandbox string) error {
	pod, _, _ := strings.Cut(sandbox, ".")
	return n.Chained.Call(t, verb, sandbox, pod)
}

// CrashLoop adds and deletes sandboxes of one pod, one after the other. Each ADD must fail.
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

// TrialOutcome is the result of a situation. Held counts the addresses that are assigned right
// after the situation. Refused counts the later pods that fail to start. Once all pods are deleted,
// End counts the assigned addresses, and Pending counts the attachments with pending DELs.
type TrialOutcome struct{ Held, Refused, End, Pending int }

// Outcome starts the daemon, and calls run, which brings the node into a situation, such as a crash
// loop. Then Outcome makes faulty succeed again, starts the daemon again if run stopped it, sweeps,
// and starts and deletes TrialPods more pods.
func (n *Trial) Outcome(t *testing.T, run func(*testing.T, *Trial)) (o TrialOutcome) {
	n.Start()
	run(t, n)
	o.Held = n.Held()
	n.Plan(nil)
	if n.Away {
		n.Settled() // the daemon must not find interfaces that are being removed
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
