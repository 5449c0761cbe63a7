//go:build e2e

package e2e_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cni-unwind/plugin/e2e"
	"cni-unwind/plugin/plugintest/nodetest"
)

// sweptNode returns a node with a /24 pool and the plugins bridge, firewall and faulty.
func sweptNode(t *testing.T, v e2e.Version, keys map[string]any) (*e2e.Node, *e2e.Containerd) {
	n := e2e.NewNode(t)
	n.Configure(e2e.Network{Subnet: "10.22.0.0/24", Plugins: []string{e2e.Firewall, n.Faulty()}, Unwind: true, Keys: keys})
	rt := n.StartContainerd(v)
	rt.AwaitNetwork()
	return n, rt
}

// TestE2ESweepStates: a sweep with the runtime's list keeps the resources of all pods that the
// runtime lists or is creating, whatever their state. It releases the resources of a pod that the
// runtime does not know.
func TestE2ESweepStates(t *testing.T) {
	e2e.EachContainerd(t, func(t *testing.T, v e2e.Version) {
		const grace = time.Second
		n, rt := sweptNode(t, v, map[string]any{"gracePeriod": grace.String()})
		ready := rt.MustRunPod(e2e.Pod{Name: "ready"})
		notReady := rt.MustRunPod(e2e.Pod{Name: "notready"})
		rt.KillPod(notReady)
		n.AddByHand("forgotten")
		n.Plan(map[string]string{"ADD": "hold"})
		var creating sync.WaitGroup
		var created string
		creating.Go(func() { created, _ = rt.RunPod(e2e.Pod{Name: "creating"}) })
		n.AwaitHeld("ADD", 1)
		time.Sleep(2 * grace)
		before, rules := n.Reserved(), len(n.Rules())
		if len(before) != 4 {
			t.Fatalf("want four addresses: %v", before)
		}

		out := n.Unwindctl("sweep", "--cri", e2e.Socket)
		if !strings.Contains(out, "4 attachments: 1 released, 1 busy, 2 live.") {
			t.Errorf("want one released, and three live, one of them busy:\n%s", out)
		}
		for address, owner := range n.Reserved() {
			if before[address] != owner || strings.HasPrefix(owner, "cnitool") {
				t.Errorf("after the sweep, %s is reserved for %s", address, owner)
			}
		}
		if got, want := len(n.Reserved()), 3; got != want {
			t.Errorf("%d addresses are reserved, want %d", got, want)
		}
		if got, want := len(n.Rules()), rules/4*3; got != want {
			t.Errorf("%d rules are left, want %d", got, want)
		}
		n.Plan(nil)
		n.LetGo()
		creating.Wait()
		if created == "" {
			t.Error("the pod that was being created did not start")
		}
		n.Unwindctl("sweep", "--cri", e2e.Socket)
		for _, id := range []string{ready, created} {
			n.CheckPod(rt.CRI, id)
		}
		if errs := rt.RemovePods(); len(errs) > 0 {
			t.Error(errs)
		}
		if left := n.Settled(); !left.HasNothing() || len(n.Journal()) != 0 {
			t.Errorf("left: %s, %+v", left, n.Journal())
		}
	})
}

// TestE2ESweepStaleList: a sweep requests the runtime's list before a pod's ADD, and uses the list
// after that ADD. The list lacks the pod, but the pod must keep its resources (whereabouts#207).
func TestE2ESweepStaleList(t *testing.T) {
	n, rt := sweptNode(t, e2e.Containerds(t)[0], nil)
	old := rt.MustRunPod(e2e.Pod{Name: "old"})
	var list []*cri.PodSandbox
	for id, state := range rt.Pods() {
		list = append(list, nodetest.Sandbox(id, state))
	}
	read, answer := make(chan struct{}), make(chan struct{})
	slow := nodetest.ServeCRI(t, func(context.Context) ([]*cri.PodSandbox, error) {
		close(read)
		<-answer
		return list, nil
	})
	done := make(chan string)
	go func() { done <- n.Unwindctl("sweep", "--cri", slow) }()
	<-read
	n.Plan(map[string]string{"ADD": "hold-effect"}) // faulty's ADD takes effect, then waits
	var creating sync.WaitGroup
	var created string
	creating.Go(func() { created, _ = rt.RunPod(e2e.Pod{Name: "created"}) })
	n.AwaitHeld("ADD", 1)
	n.Plan(nil)
	n.LetGo()
	creating.Wait()
	close(answer)
	if out := <-done; !strings.Contains(out, "2 attachments: 2 live.") {
		t.Errorf("a sweep with a list older than a pod, want two live:\n%s", out)
	}
	for _, id := range []string{old, created} {
		n.CheckPod(rt.CRI, id)
	}
}

// TestE2ESweepRace: sweeps run one after the other while pods start and stop. No running pod may
// lose its address or its rules.
func TestE2ESweepRace(t *testing.T) {
	const workers, rounds = 4, 6
	e2e.EachContainerd(t, func(t *testing.T, v e2e.Version) {
		n, rt := sweptNode(t, v, nil)
		steady := rt.MustRunPod(e2e.Pod{Name: "steady"})
		perPod := len(n.Rules())

		var sweeps atomic.Int32
		stop, stopped := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(stopped)
			for {
				select {
				case <-stop:
					return
				default:
					// A sweep may fail while a pod's DEL is running. This test ignores that.
					_, _, _ = n.Try(e2e.Path(t, "bin/unwindctl"), "sweep", "--cri", e2e.Socket)
					sweeps.Add(1)
				}
			}
		}()
		var all sync.WaitGroup
		for w := range workers {
			all.Go(func() {
				for round := range rounds {
					pod := e2e.Pod{Name: fmt.Sprintf("pod-%d-%d", w, round)}
					id, err := rt.RunPod(pod)
					if err != nil {
						t.Errorf("pod %s: %v", pod.Name, err)
						return
					}
					for seen := sweeps.Load(); sweeps.Load() < seen+2; { // wait for one whole sweep
						time.Sleep(10 * time.Millisecond)
					}
					n.CheckPod(rt.CRI, id)
					if err := rt.StopPod(id); err != nil {
						t.Errorf("pod %s: %v", pod.Name, err)
					}
					if err := rt.RemovePod(id); err != nil {
						t.Errorf("pod %s: %v", pod.Name, err)
					}
				}
			})
		}
		all.Wait()
		close(stop)
		<-stopped
		t.Logf("%d pods, %d sweeps", workers*rounds, sweeps.Load())
		n.CheckPod(rt.CRI, steady)
		if got := len(n.Rules()); got != perPod {
			t.Errorf("%d rules are left, want the %d of the running pod", got, perPod)
		}
		if left, journal := n.Settled(), n.Journal(); left.Addresses != 1 || left.NetNS != 1 || len(journal) != 1 {
			t.Errorf("left: %s, %+v", left, journal)
		}
	})
}
