//go:build e2e

package main

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"cni-unwind/testdata/e2e"
)

// tries is how often kubelet tries to start a pod here: more often than a /28 has addresses.
const tries = 20

// healTime bounds the time from when plugins work again until the journal is empty: unwind waits for at most 30 s between two
// tries of a DEL, and kubelet asks for the runtime's status every 5 s.
const healTime = 60 * time.Second

// trouble is a way in which a chain of bridge, firewall and faulty is broken for a while.
type trouble struct {
	name  string
	begin func(n *e2e.Node)
	end   func(n *e2e.Node)
}

var troubles = []trouble{
	{
		name:  "a plugin fails ADD and DEL",
		begin: func(n *e2e.Node) { n.Plan(map[string]string{"ADD": "fail", "DEL": "fail"}) },
		end:   func(n *e2e.Node) { n.Plan(nil) },
	},
	{
		name:  "a plugin's binary is missing",
		begin: func(n *e2e.Node) { moveFaulty(n, "faulty", "faulty.away") },
		end:   func(n *e2e.Node) { moveFaulty(n, "faulty.away", "faulty") },
	},
	{
		name:  "a plugin fails DEL",
		begin: func(n *e2e.Node) { n.Plan(map[string]string{"DEL": "fail"}) },
		end:   func(n *e2e.Node) { n.Plan(nil) },
	},
}

func moveFaulty(n *e2e.Node, from, to string) {
	check(n, os.Rename(n.File(e2e.PluginDir, from), n.File(e2e.PluginDir, to)))
}

// outcome is what a trouble has left on a node.
type outcome struct {
	during  e2e.Left         // while it lasts, after kubelet has stopped and removed what it can
	after   e2e.Left         // once it is over, after the same and the healing
	known   int              // sandboxes that the runtime knows at the end of the trouble
	stops   int              // StopPodSandbox or RemovePodSandbox that failed during the trouble
	begun   int              // pods that started during it
	owed    int              // entries of the journal at the end of the trouble
	entries []e2e.Attachment // … after the healing
	healed  time.Duration
	starts  error // of a pod at the end of all
}

// TestE2ELeak: pods that cannot start, or not end, leave nothing with unwind once the trouble is over, and no address meanwhile.
// The plain chain, on the same runtime, is the control: there it must leak.
func TestE2ELeak(t *testing.T) {
	table := e2e.NewTable(t, fmt.Sprintf("%d sandboxes of a pod on a /28; addresses/netns/veths/rules left", tries),
		"RUNTIME", "TROUBLE", "PLAIN DURING", "AFTER", "NEXT POD", "UNWIND DURING", "OWED", "AFTER", "JOURNAL", "NEXT POD", "HEALED IN")
	for _, v := range e2e.Containerds(t) {
		for _, trouble := range troubles {
			t.Run(v.Name+"/"+trouble.name, func(t *testing.T) {
				t.Parallel()
				plain, unwind := suffer(t, v, trouble, false), suffer(t, v, trouble, true)
				table.Row(v.Name, trouble.name, plain.during, plain.after, word(plain.starts), unwind.during, unwind.owed, unwind.after,
					len(unwind.entries), word(unwind.starts), unwind.healed.Round(100*time.Millisecond))
				t.Logf("plain: %+v\nunwind: %+v", plain, unwind)
				if plain.during.Addresses == 0 {
					t.Errorf("the plain chain leaks nothing, so this shows nothing: %+v", plain)
				}
				if unwind.during.Addresses != 0 || unwind.during.Veths != 0 || unwind.during.Rules != 0 {
					t.Errorf("during the trouble unwind leaves %s", unwind.during)
				}
				if unwind.after != (e2e.Left{}) || len(unwind.entries) > 0 {
					t.Errorf("after the trouble unwind leaves %s, and %+v", unwind.after, unwind.entries)
				}
				if unwind.starts != nil {
					t.Errorf("with unwind no pod starts after the trouble: %v", unwind.starts)
				}
			})
		}
	}
}

func word(err error) string {
	switch {
	case err == nil:
		return "starts"
	case strings.Contains(err.Error(), "no IP addresses available"):
		return "no address"
	}
	return "fails"
}

// suffer has pods tried on a new node while the trouble lasts.
func suffer(t *testing.T, v e2e.Version, trouble trouble, unwind bool) (o outcome) {
	return sufferOn(t, v, trouble, unwind, func(*e2e.Node) {})
}

// sufferOn does the same on a node that was prepared.
func sufferOn(t *testing.T, v e2e.Version, trouble trouble, unwind bool, prepare func(*e2e.Node)) (o outcome) {
	n := e2e.NewNode(t)
	prepare(n)
	n.Configure(e2e.Network{Subnet: e2e.Small, Plugins: []string{e2e.Firewall, n.Faulty()}, Unwind: unwind})
	rt := n.StartContainerd(v)
	healthyPod(t, n, rt)

	trouble.begin(n)
	for attempt := range tries {
		id, err := rt.RunPod(e2e.Pod{Name: "crashing", Attempt: uint32(attempt)})
		if err == nil {
			o.begun++
			err = rt.StopPod(id)
		}
		if err == nil {
			t.Fatalf("try %d passed, and %s", attempt, trouble.name)
		}
	}
	o.stops = len(rt.RemovePods())
	o.during, o.known = n.Settled(), len(rt.Pods())
	o.during.NetNS = max(0, o.during.NetNS-o.known) // of a sandbox that it knows the runtime keeps it
	if unwind {
		o.owed = len(n.Journal())
	}

	trouble.end(n)
	if errs := rt.RemovePods(); len(errs) > 0 {
		t.Errorf("after the trouble: %v", errs)
	}
	if unwind {
		o.healed = heal(t, n, rt)
		o.entries = n.Journal()
	}
	o.after = n.Settled()
	_, o.starts = rt.RunPod(e2e.Pod{Name: "next"})
	return o
}

// heal does what comes by itself on a node, until the journal has only pods that run: kubelet's question for the status, or the
// timer's sweep where the runtime does not ask the plugins.
func heal(t *testing.T, n *e2e.Node, rt *e2e.Containerd) time.Duration {
	t.Helper()
	begin := time.Now()
	if rt.Version.Major == 1 {
		n.Unwindctl("sweep")
		return time.Since(begin)
	}
	for len(owed(n, rt)) > 0 && time.Since(begin) < healTime {
		time.Sleep(100 * time.Millisecond)
		rt.NetworkReady()
	}
	return time.Since(begin)
}

// owed returns the entries of the journal that are not of pods that run.
func owed(n *e2e.Node, rt *e2e.Containerd) []e2e.Attachment {
	n.Helper()
	pods := rt.Pods()
	return slices.DeleteFunc(n.Journal(), func(a e2e.Attachment) bool {
		state, known := pods[a.ContainerID]
		return known && state == e2e.Ready && a.State == "live"
	})
}

// healthyPod shows that the node is well, and that what a pod has is counted.
func healthyPod(t *testing.T, n *e2e.Node, rt *e2e.Containerd) {
	t.Helper()
	rt.AwaitNetwork()
	id := rt.MustRunPod(e2e.Pod{Name: "healthy"})
	left := n.Left()
	if left.Addresses != 1 || left.NetNS != 1 || left.Veths != 1 || left.Rules == 0 {
		t.Errorf("a pod that runs has %s", left)
	}
	if n.Reserved()[rt.IP(id)] != id {
		t.Errorf("the pod's address %s is not reserved for it: %v", rt.IP(id), n.Reserved())
	}
	if errs := rt.RemovePods(); len(errs) > 0 {
		t.Fatal(errs)
	}
	if left := n.Settled(); left != (e2e.Left{}) {
		t.Fatalf("a pod that was removed leaves %s:\n%s", left, strings.Join(n.Rules(), "\n"))
	}
}
