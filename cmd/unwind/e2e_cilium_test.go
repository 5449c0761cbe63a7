//go:build e2e

package main

import (
	"testing"

	"cni-unwind/testdata/e2e"
)

// cilium is a node with cilium-cni, whose agent was killed.
type cilium struct{ chained }

// call has the runtime add or delete a sandbox.
func (n *cilium) call(t *testing.T, verb string) (passed bool) {
	t.Helper()
	const args = "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web-0"
	out, stderr, err := n.Cnitool("a", verb, args)
	if err != nil {
		t.Logf("%s: %v\n%s%s", verb, err, out, stderr)
	}
	return err == nil
}

// TestE2ECilium: the real cilium-cni without its agent. Its ADD fails after half a minute. Its DEL goes
// into a queue on the disk, for the agent's next start, or fails where it cannot. unwind keeps that
// DEL, and runs it again.
func TestE2ECilium(t *testing.T) {
	table := e2e.NewTable(t, "a pod of Cilium without its agent; DELs in the agent's queue, and pending ones; the agent "+
		"takes the queue up, and unwind sweeps", "CALL", "CHAIN", "PASSES", "QUEUED", "PENDING", "THEN QUEUED", "PENDING")
	for _, c := range []struct {
		name, verb string
		before     func(*e2e.Node) // makes the queue refuse
		queued     map[bool]int    // by the call, plain and with unwind: its rollback queues one
		again      string          // the runtime calls once more, before the sweep
	}{
		{"ADD", "add", nil, map[bool]int{true: 1}, ""},
		{"ADD, the queue is full", "add", (*e2e.Node).FillCiliumQueue, nil, ""},
		{"DEL", "del", nil, map[bool]int{false: 1, true: 1}, ""},
		{"DEL, the queue is full", "del", (*e2e.Node).FillCiliumQueue, nil, ""},
		{"DEL, the queue cannot be made, DEL", "del", (*e2e.Node).BlockCiliumQueue, nil, "del"},
	} {
		if e2e.Short() && c.name == "ADD" {
			continue // half a minute, and the next one shows the same
		}
		for _, chain := range []string{"plain", "unwind"} {
			t.Run(c.name+"/"+chain, func(t *testing.T) {
				t.Parallel()
				n := &cilium{chained{e2e.NewNode(t), chain == "unwind"}}
				n.ConfigureCilium(n.unwind)
				n.AddNetNS("a")
				if c.before != nil {
					c.before(n.Node)
				}
				passed, want := n.call(t, c.verb), c.verb == "del" && c.before == nil
				queued, pending := n.CiliumQueued(), n.pending()
				if passed != want || queued != c.queued[n.unwind] {
					t.Errorf("passed %t, %d queued; want %t, %d", passed, queued, want, c.queued[n.unwind])
				}
				if kept := n.unwind && c.before != nil; kept != (pending == 1) {
					t.Errorf("%d pending", pending)
				}
				n.TakeCiliumQueue()
				if c.again != "" && !n.call(t, c.again) {
					t.Error("the runtime's DEL fails, though there is a queue")
				}
				n.sweep()
				later := n.CiliumQueued()
				if owed := c.again != "" || n.unwind && c.before != nil; owed != (later == 1) || n.pending() != 0 {
					t.Errorf("then %d queued, %d pending", later, n.pending())
				}
				table.Row(c.name, chain, passed, queued, pending, later, n.pending())
			})
		}
	}
}
