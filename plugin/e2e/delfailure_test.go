//go:build e2e

package e2e_test

import (
	"testing"

	"cni-unwind/plugin/e2e"
)

// TestE2EDelFailure stops and removes a pod while a plugin fails DEL. It does so without unwind,
// and with each value of onDelFailure. With "report", the runtime gets the error and keeps the
// sandbox. With "defer", the runtime gets no error, and unwind retries the DEL.
func TestE2EDelFailure(t *testing.T) {
	table := e2e.NewTable(t, "a pod is stopped and removed while a plugin fails DEL, and again when it does not; addresses/netns/veths/rules left",
		"RUNTIME", "CHAIN", "STOP", "REMOVE", "SANDBOX", "LEFT", "OWED", "STOP LATER", "AFTER", "JOURNAL")
	for _, v := range e2e.Containerds(t) {
		for _, mode := range []string{"plain", "report", "defer"} {
			t.Run(v.Name+"/"+mode, func(t *testing.T) {
				t.Parallel()
				delFailure(t, v, mode, table)
			})
		}
	}
}

func delFailure(t *testing.T, v e2e.Version, mode string, table *e2e.Table) {
	n := e2e.NewNode(t)
	net := e2e.Network{Subnet: e2e.Small, Plugins: []string{e2e.Firewall, n.Faulty()}}
	if mode != "plain" {
		net.Unwind, net.Keys = true, map[string]any{"onDelFailure": mode}
	}
	n.Configure(net)
	rt := n.StartContainerd(v)
	rt.HealthyPod()
	id := rt.MustRunPod(e2e.Pod{Name: "pod"})

	n.Plan(map[string]string{"DEL": "fail"})
	stop, remove := rt.StopPod(id), rt.RemovePod(id)
	_, known := rt.Pods()[id]
	left := n.Settled()
	pending := 0
	if net.Unwind {
		pending = len(n.Journal())
	}

	n.Plan(nil)
	var later error
	if known {
		if later = rt.StopPod(id); later == nil {
			later = rt.RemovePod(id)
		}
	}
	entries := 0
	if net.Unwind {
		rt.Heal()
		entries = len(n.Journal())
	}
	after := n.Settled()
	table.Row(v.Name, mode, passed(stop), passed(remove), map[bool]string{true: "kept", false: "forgotten"}[known], left, pending,
		passed(later), after, entries)

	switch mode {
	case "plain":
		if stop == nil || left.Addresses == 0 {
			t.Errorf("without unwind the DEL succeeds or nothing leaks, so the test proves nothing: stop: %v, left %s", stop, left)
		}
		return
	case "report":
		if stop == nil || !known {
			t.Errorf("the failed DEL was not reported: stop: %v, the runtime knows the sandbox: %t", stop, known)
		}
	case "defer":
		if stop != nil || remove != nil || known {
			t.Errorf("the DEL was not deferred: stop: %v, remove: %v, the runtime knows the sandbox: %t", stop, remove, known)
		}
	}
	if !left.HasNothing() || pending != 1 {
		t.Errorf("while DEL fails unwind leaves %s, and %d entries; want one", left, pending)
	}
	if later != nil || after != (e2e.Left{}) || entries != 0 {
		t.Errorf("later unwind leaves %s, and %d entries; stop: %v", after, entries, later)
	}
}

func passed(err error) string {
	if err != nil {
		return "error"
	}
	return "ok"
}
