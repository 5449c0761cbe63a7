//go:build e2e

package e2e_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"cni-unwind/plugin/e2e"
)

// TestKubernetes runs the same steps on two workers of a cluster, one without unwind and one with
// unwind. The worker without unwind is the control: some steps require a failure there, because
// otherwise they prove nothing.
func TestKubernetes(t *testing.T) {
	table := e2e.NewSteps(t, "Kubernetes; left: addresses/netns/veths/rules", "WHAT", "PLAIN", "UNWIND")
	began := time.Now()
	c := e2e.NewCluster(t)
	both := pair{
		plain:  c.Join("plain", func(n *e2e.Node) e2e.Network { return chain(n, "10.22.0.0/28", false) }),
		unwind: c.Join("unwind", func(n *e2e.Node) e2e.Network { return chain(n, "10.22.0.16/28", true) }),
	}
	t.Logf("the cluster is ready after %s", since(began))

	both.crashLoop(t, table)
	both.sameNames(t, table)
	both.hangingStatus(t, table)
	both.manyPods(t, table)
	both.restart(t, table)
}

type pair struct{ plain, unwind *e2e.Worker }

func (p pair) each(f func(w *e2e.Worker)) {
	f(p.plain)
	f(p.unwind)
}

// chain returns a network whose plugins are bridge, firewall and faulty.
func chain(n *e2e.Node, subnet string, unwind bool) e2e.Network {
	return e2e.Network{Subnet: subnet, Plugins: []string{e2e.Firewall, n.Faulty()}, Unwind: unwind}
}

func since(begin time.Time) time.Duration { return time.Since(begin).Round(100 * time.Millisecond) }

// poolSize is the number of addresses for pods in a /28.
const poolSize = 13

// crashLoop: on a /28, kubelet retries pods whose ADD and DEL fail, while the pods of a StatefulSet
// run. Without unwind, each retry leaks an address until no pod can start.
func (p pair) crashLoop(t *testing.T, table *e2e.Table) {
	const others = 5
	crashing, lasts := 2, 2*time.Minute
	if e2e.Short() {
		crashing, lasts = 4, 40*time.Second
	}
	began := time.Now()
	p.each(func(w *e2e.Worker) {
		w.PlanPods("crash", map[string]string{"ADD": "fail", "DEL": "fail"})
		w.RunStatefulSet("web", others)
	})
	p.each(func(w *e2e.Worker) { mustBeReady(t, w, "web", others) })
	p.each(func(w *e2e.Worker) { w.RunPods("crash", crashing) })
	for end := time.Now().Add(lasts); time.Now().Before(end); time.Sleep(time.Second) {
		if n := len(p.unwind.Reserved()); n > others+crashing {
			t.Fatalf("%d addresses are taken on the worker with unwind: %v", n, p.unwind.Reserved())
		}
	}
	e2e.Eventually(t, 2*lasts, "the pool is empty without unwind (otherwise the test proves nothing)", func() bool {
		return len(p.plain.Reserved()) == poolSize
	})
	tries := func(w *e2e.Worker) int { return w.Calls()["ADD"] - others }
	table.Row(fmt.Sprintf("%d pods crash-loop on a /28 for %s while %d others run: addresses taken (tries)", crashing, lasts, others),
		fmt.Sprintf("%d (%d)", len(p.plain.Reserved()), tries(p.plain)), fmt.Sprintf("%d (%d)", len(p.unwind.Reserved()), tries(p.unwind)))
	if n := tries(p.unwind); n <= poolSize-others {
		t.Errorf("only %d tries, which would not have used up the pool", n)
	}

	p.each(func(w *e2e.Worker) { w.RunPods("late", 1) })
	mustBeReady(t, p.unwind, "late", 1)
	const noAddress = "no IP addresses available"
	e2e.Eventually(t, time.Minute, "the pod without unwind has the event "+noAddress, func() bool {
		return strings.Contains(p.plain.Events("late"), noAddress)
	})
	if err := ready(p.plain, "late", 1, 0); err == nil {
		t.Error("a pod starts without unwind, so the test proves nothing")
	}
	table.Row("… one more pod", noAddress, "starts")

	p.each(func(w *e2e.Worker) { w.PlanPods("crash", nil) })
	mustBeReady(t, p.unwind, "crash", crashing)
	table.Row("… the plugin works again: pods that start", len(p.plain.Reserved())-poolSize, crashing)
	checkPods(t, p.unwind)

	p.each(func(w *e2e.Worker) { w.DeletePods("statefulset,pod", "--all") })
	leaves(t, p.unwind)
	table.Row("… all pods are deleted: left", p.plain.Settled(), p.unwind.Settled())
	t.Logf("crash loop: %s", since(began))
}

// sameNames: the pods of a StatefulSet are force-deleted while a plugin fails their DELs, so new
// pods with the same names start while the runtime still has the old sandboxes.
func (p pair) sameNames(t *testing.T, table *e2e.Table) {
	const count, rounds = 5, 3 // together more pods than a /28 has addresses
	began := time.Now()
	p.plain.ForgetAddresses()
	p.each(func(w *e2e.Worker) {
		w.PlanPods("same", map[string]string{"DEL": "fail"})
		w.RunStatefulSet("same", count)
	})
	p.each(func(w *e2e.Worker) { mustBeReady(t, w, "same", count) })
	for range rounds {
		p.each(func(w *e2e.Worker) {
			w.DeletePods("pod", "--selector=app=same", "--force", "--grace-period=0")
		})
		mustBeReady(t, p.unwind, "same", count)
		e2e.Eventually(t, podTime, "unwind has no more addresses than pods", func() bool { return len(p.unwind.Reserved()) == count })
		checkPods(t, p.unwind)
	}
	what := fmt.Sprintf("%d pods deleted by force %d times, a plugin fails DEL: ", count, rounds)
	table.Row(what+"addresses taken", len(p.plain.Reserved()), len(p.unwind.Reserved()))
	if n := len(p.plain.Reserved()); n <= count {
		t.Errorf("only %d addresses are taken without unwind, so the test proves nothing", n)
	}
	p.each(func(w *e2e.Worker) {
		w.PlanPods("same", nil)
		w.DeletePods("statefulset,pod", "--all")
	})
	leaves(t, p.unwind)
	table.Row("… the plugin works again, and all pods are deleted: left", p.plain.Settled(), p.unwind.Settled())
	t.Logf("same names: %s", since(began))
}

// podTime bounds the time until a pod is ready. It allows for several attempts, because kubelet
// waits for about ten seconds between them.
const podTime = 90 * time.Second

func ready(w *e2e.Worker, app string, count int, within time.Duration) error {
	_, err := w.AwaitPods(app, count, within)
	return err
}

func mustBeReady(t *testing.T, w *e2e.Worker, app string, count int) {
	t.Helper()
	if err := ready(w, app, count, podTime); err != nil {
		t.Errorf("%v\n%s", err, w.Events(app))
		t.Fatal(w.Runtime.Blocked()) // Blocked itself fails the test if containerd no longer works
	}
}

// checkPods calls checkAddresses. Then it waits until the worker has as many live attachments and
// veths as pods, and fails the test if that takes too long.
func checkPods(t *testing.T, w *e2e.Worker) {
	t.Helper()
	checkAddresses(t, w)
	ended := func(a e2e.Attachment) bool { return a.State != "live" }
	// Wait, because a DEL that has already released the pod's address may still be running.
	e2e.Eventually(t, podTime, "as many live attachments and veths as pods", func() bool {
		pods := len(w.Pods(""))
		return len(slices.DeleteFunc(w.Journal(), ended)) == pods && w.Left().Veths == pods
	})
}

// checkAddresses fails the test unless each pod has its own address, which is reserved and answers
// a ping, and no other address is reserved. It first waits a few seconds for the DELs of
// deleted pods, whose addresses may still be reserved.
func checkAddresses(t *testing.T, w *e2e.Worker) {
	t.Helper()
	pods, reserved, owners := w.Pods(""), w.Reserved(), map[string]string{}
	for end := time.Now().Add(5 * time.Second); len(reserved) != len(pods) && time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		pods, reserved = w.Pods(""), w.Reserved()
	}
	for _, pod := range pods {
		if other, twice := owners[pod.IP]; twice {
			t.Errorf("%s and %s have the same address %s", other, pod.Name, pod.IP)
		}
		owners[pod.IP] = pod.Name
		if reserved[pod.IP] == "" {
			t.Errorf("the address %s of %s is not reserved", pod.IP, pod.Name)
		}
	}
	if len(reserved) != len(pods) {
		t.Errorf("%s: %d addresses are reserved for %d pods", w.NodeName, len(reserved), len(pods))
	}
	if silent := w.Silent(pods); len(silent) > 0 {
		t.Errorf("%s: these pods do not answer a ping: %s", w.NodeName, strings.Join(silent, ", "))
	}
}

// leaves waits until deleted pods have left nothing on a worker, and fails the test if that takes
// too long.
func leaves(t *testing.T, w *e2e.Worker) {
	t.Helper()
	e2e.Eventually(t, podTime, w.NodeName+": nothing is left of the pods", func() bool { return w.Left() == e2e.Left{} && len(w.Journal()) == 0 })
}
