//go:build e2e

package e2e_test

import (
	"testing"

	"cni-unwind/plugin/e2e"
)

// cilium is a node with cilium-cni and a stand-in for its agent.
type cilium struct {
	e2e.Chained
	*e2e.CiliumAgent
}

// call makes cnitool add or delete a sandbox, and reports whether that succeeded.
func (n *cilium) call(t *testing.T, verb string) (passed bool) {
	t.Helper()
	return n.Chained.Call(t, verb, "a", "web-0") == nil
}

// TestE2ECilium runs the real cilium-cni while its agent is down or returns 503. If the agent is
// down, cilium-cni's ADD fails after half a minute. cilium-cni's DEL writes a deletion into a queue
// on disk, which the agent processes at its next start. If cilium-cni cannot write to the queue,
// its DEL fails. unwind considers a queued DEL done, and retries a failed one.
func TestE2ECilium(t *testing.T) {
	e2e.Long(t)
	table := e2e.NewTable(t, "a pod of Cilium while its agent is down: DELs in the agent's queue, "+
		"pending DELs and endpoints; then the agent starts, and unwind sweeps",
		"CALL", "CHAIN", "SUCCEEDS", "QUEUED", "PENDING", "ENDPOINTS", "THEN PENDING", "ENDPOINTS")
	for _, c := range []struct {
		name, verb string
		refuses    bool            // the agent is running and returns 503
		before     func(*e2e.Node) // makes the queue unusable
		queued     map[bool]int    // deletions that the call queues, without and with unwind
		again      bool            // the runtime repeats its DEL before the sweep
	}{
		{"ADD", "add", false, nil, map[bool]int{true: 1}, false},
		{"ADD, the queue is full", "add", false, (*e2e.Node).FillCiliumQueue, nil, false},
		{"DEL", "del", false, nil, map[bool]int{false: 1, true: 1}, false},
		{"DEL, the agent returns 503", "del", true, nil, map[bool]int{false: 1, true: 1}, true},
		{"DEL, the queue is full", "del", false, (*e2e.Node).FillCiliumQueue, nil, false},
		{"DEL, the queue cannot be created, DEL", "del", false, (*e2e.Node).BlockCiliumQueue, nil, true},
	} {
		for _, chain := range []string{"plain", "unwind"} {
			t.Run(c.name+"/"+chain, func(t *testing.T) {
				t.Parallel()
				n := &cilium{Chained: e2e.Chained{Node: e2e.NewNode(t), Unwind: chain == "unwind"}}
				n.ConfigureCilium(n.Unwind)
				n.CiliumAgent = n.NewCiliumAgent("10.0.12.34")
				n.AddNetNS("a")
				n.CiliumAgent.Start()
				if c.verb == "del" && (!n.call(t, "add") || n.Endpoints() != 1) {
					t.Fatal("no endpoint, so the test proves nothing")
				}
				n.Refuse(c.refuses)
				if !c.refuses {
					n.Stop()
				}
				if c.before != nil {
					c.before(n.Node)
				}
				passed, want := n.call(t, c.verb), c.verb == "del" && c.before == nil
				queued, pending, endpoints := n.CiliumQueued(), n.Pending(), n.Endpoints()
				if passed != want || queued != c.queued[n.Unwind] {
					t.Errorf("passed %t, %d queued; want %t, %d", passed, queued, want, c.queued[n.Unwind])
				}
				if failed := n.Unwind && c.before != nil; failed != (pending == 1) {
					t.Errorf("%d pending", pending)
				}
				n.Sweep()
				if n.Pending() != pending || n.CiliumQueued() > queued+1 {
					t.Errorf("a sweep without the agent leaves %d pending, %d queued", n.Pending(), n.CiliumQueued())
				}
				n.Stop()
				n.CiliumAgent.Start()
				if c.again && !n.call(t, "del") {
					t.Error("the runtime's DEL fails although the agent is running")
				}
				n.Sweep()
				if owed := n.CiliumQueued(); owed != 0 || n.Pending() != 0 || n.Unwind && n.Endpoints() != 0 {
					t.Errorf("after the agent's start: %d queued, %d pending, %d endpoints", owed, n.Pending(), n.Endpoints())
				}
				table.Row(c.name, chain, passed, queued, pending, endpoints, n.Pending(), n.Endpoints())
			})
		}
	}
}
