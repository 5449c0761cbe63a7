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

// TestKubernetes: on a cluster of two workers, one with the plain chain and one with unwind, the same is done to both at once.
// The plain worker is the control: where it is said, it must fail.
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

// pair is the two workers.
type pair struct{ plain, unwind *e2e.Worker }

func (p pair) each(f func(w *e2e.Worker)) {
	f(p.plain)
	f(p.unwind)
}

// chain is a network of bridge, firewall, and faulty last.
func chain(n *e2e.Node, subnet string, unwind bool) e2e.Network {
	return e2e.Network{Subnet: subnet, Plugins: []string{e2e.Firewall, n.Faulty()}, Unwind: unwind}
}

func since(begin time.Time) time.Duration { return time.Since(begin).Round(100 * time.Millisecond) }

// poolSize is how many pods a /28 has addresses for.
const poolSize = 13

// crashLoop: pods whose ADD and DEL fail are tried again and again beside a StatefulSet, on a /28. That takes the plain worker's
// addresses until no pod starts there.
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
	e2e.Eventually(t, 2*lasts, "the plain chain has no address left, so this shows nothing", func() bool {
		return len(p.plain.Reserved()) == poolSize
	})
	tries := func(w *e2e.Worker) int { return w.Calls()["ADD"] - others }
	table.Row(fmt.Sprintf("%d pods crash-loop on a /28 for %s beside %d: addresses taken (tries)", crashing, lasts, others),
		fmt.Sprintf("%d (%d)", len(p.plain.Reserved()), tries(p.plain)), fmt.Sprintf("%d (%d)", len(p.unwind.Reserved()), tries(p.unwind)))
	if n := tries(p.unwind); n <= poolSize-others {
		t.Errorf("only %d tries, which would not have used up the pool", n)
	}

	p.each(func(w *e2e.Worker) { w.RunPods("late", 1) })
	mustBeReady(t, p.unwind, "late", 1)
	const noAddress = "no IP addresses available"
	e2e.Eventually(t, time.Minute, "the plain worker's pod says "+noAddress, func() bool {
		return strings.Contains(p.plain.Events("late"), noAddress)
	})
	if err := ready(p.plain, "late", 1, 0); err == nil {
		t.Error("a pod starts on the plain worker, so this shows nothing")
	}
	table.Row("… one more pod", noAddress, "starts")

	p.each(func(w *e2e.Worker) { w.PlanPods("crash", nil) })
	mustBeReady(t, p.unwind, "crash", crashing)
	table.Row("… the plugin is mended: pods that start", len(p.plain.Reserved())-poolSize, crashing)
	checkPods(t, p.unwind)

	p.each(func(w *e2e.Worker) { w.DeletePods("statefulset,pod", "--all") })
	leaves(t, p.unwind)
	table.Row("… all pods are deleted: left", p.plain.Settled(), p.unwind.Settled())
	t.Logf("crash loop: %s", since(began))
}

// sameNames: pods of a StatefulSet are deleted by force while a plugin fails their DEL, so that the next ones of these names start
// while the runtime still has the last.
func (p pair) sameNames(t *testing.T, table *e2e.Table) {
	const count, rounds = 5, 3 // more than a /28 has addresses for
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
		t.Errorf("only %d addresses are taken on the plain worker, so this shows nothing", n)
	}
	p.each(func(w *e2e.Worker) {
		w.PlanPods("same", nil)
		w.DeletePods("statefulset,pod", "--all")
	})
	leaves(t, p.unwind)
	table.Row("… mended, and all pods deleted: left", p.plain.Settled(), p.unwind.Settled())
	t.Logf("same names: %s", since(began))
}

// podTime bounds the time until a pod is ready: the kubelet waits for some ten seconds before it tries again.
const podTime = 90 * time.Second

func ready(w *e2e.Worker, app string, count int, within time.Duration) error {
	_, err := w.AwaitPods(app, count, within)
	return err
}

func mustBeReady(t *testing.T, w *e2e.Worker, app string, count int) {
	t.Helper()
	if err := ready(w, app, count, podTime); err != nil {
		t.Fatalf("%v\n%s", err, w.Events(app))
	}
}

// checkPods fails the test unless the pods' addresses are well, and the journal has as many.
func checkPods(t *testing.T, w *e2e.Worker) {
	t.Helper()
	checkAddresses(t, w)
	ended := func(a e2e.Attachment) bool { return a.State != "live" }
	// a DEL that still runs may have freed its address already
	e2e.Eventually(t, podTime, "as many live attachments and veths as pods", func() bool {
		pods := len(w.Pods(""))
		return len(slices.DeleteFunc(w.Journal(), ended)) == pods && w.Left().Veths == pods
	})
}

// checkAddresses fails the test unless each pod has an address of its own, which answers and is reserved. A late DEL of another
// pod may hold an address while it runs.
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
		t.Errorf("%s: these do not answer: %s", w.NodeName, strings.Join(silent, ", "))
	}
}

// leaves fails the test if pods that are gone have left something on a worker.
func leaves(t *testing.T, w *e2e.Worker) {
	t.Helper()
	e2e.Eventually(t, podTime, w.NodeName+": nothing is left of the pods", func() bool { return w.Left() == e2e.Left{} && len(w.Journal()) == 0 })
}
