package plugin

import (
	"fmt"
	"testing"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
)

// TestManyOldSandboxes: a pod has many old sandboxes, each with a slow DEL. The next sandbox
// settles as many as it has time for, and kills no delegate for the sake of others.
func TestManyOldSandboxes(t *testing.T) {
	t.Parallel()
	const many = 20
	n := newNode(t)
	n.conf["gracePeriod"] = "1h"
	list := n.unwind(n.faulty("p0", `, "delayMS": 400`))
	next := n.pod("next")
	var last *pod
	for i := range many {
		n.plan(nil)
		last = n.pod(fmt.Sprintf("old%d", i))
		last.mustAdd(list)
		n.plan(map[string]map[string]string{"p0": {"DEL": "fail"}})
		if err := last.del(list); err == nil {
			t.Fatal("the DEL passed")
		}
	}
	n.allOf(next)
	n.plan(map[string]map[string]string{"p0": {"DEL": "late"}})
	next.mustAdd(list)
	left := len(n.entries()) - 1
	if left == 0 || left == many {
		t.Errorf("%d of %d are left", left, many)
	}
	for _, e := range n.entries() {
		for _, s := range e.Newest().Steps {
			if s.RepeatAt != 0 {
				t.Errorf("a delegate of %s was killed", e.Key)
			}
		}
	}
}

// allOf makes every attachment in the journal one of the pod's.
func (n *node) allOf(p *pod) {
	n.Helper()
	for _, e := range n.entries() {
		e.Pod = netconf.PodOf(fmt.Sprintf("K8S_POD_NAMESPACE=%s;K8S_POD_NAME=%s", p.Args[1][1], p.Args[2][1]))
		if err := n.store.Update(n.Context(), func(tx *journal.Tx) error { return tx.Put(e) }); err != nil {
			n.Fatal(err)
		}
	}
}
