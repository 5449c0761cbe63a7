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

// hangingStatus: a plugin's STATUS hangs. With unwind, the node's Ready condition becomes false,
// and its message names the plugin. Once the plugin works again, the node becomes ready.
func (p pair) hangingStatus(t *testing.T, table *e2e.Table) {
	// statusTime is the most that STATUS may take with unwind: unwind's own limit of 20 s, and 5 s
	// more for a busy machine.
	const statusTime, patience = 25 * time.Second, 30 * time.Second
	began := time.Now()
	well := map[*e2e.Worker]time.Duration{}
	p.each(func(w *e2e.Worker) {
		var err error
		if well[w], err = w.Runtime.TimeStatus(patience); err != nil {
			t.Errorf("%s: %v", w.NodeName, err)
		}
	})
	table.Row("CRI Status takes", well[p.plain].Round(time.Millisecond), well[p.unwind].Round(time.Millisecond))
	p.each(func(w *e2e.Worker) { w.Plan(map[string]string{"STATUS": "hold"}) })
	var message string
	notReady := e2e.Eventually(t, time.Minute, "the node with unwind is not ready", func() bool {
		var status string
		status, message = p.unwind.Condition()
		return status == "False"
	})
	if !strings.Contains(message, `plugin type="faulty" failed (status): timed out and was killed`) {
		t.Errorf("the node's message does not name the plugin: %s", message)
	}
	plain, plainErr := p.plain.Runtime.TimeStatus(patience)
	unwind, unwindErr := p.unwind.Runtime.TimeStatus(patience)
	if plainErr == nil {
		t.Error("the runtime's status does not hang without unwind, so the test proves nothing")
	}
	if unwindErr != nil || unwind > statusTime {
		t.Errorf("the status of the runtime took %s: %v", unwind, unwindErr)
	}
	plainStatus, plainMessage := p.plain.Condition()
	table.Row("… a plugin's STATUS hangs: it takes", "more than "+plain.Round(time.Second).String(), unwind.Round(10*time.Millisecond))
	table.Row("… the node's Ready, after "+notReady.Round(100*time.Millisecond).String(), plainStatus+" "+brief(plainMessage), "False "+brief(message))

	healed := time.Now()
	p.each(func(w *e2e.Worker) { w.Plan(nil) })
	p.unwind.AwaitReady()
	ready := since(healed)
	e2e.Eventually(t, podTime, "the plain worker's runtime answers", func() bool {
		p.plain.LetGo() // each time, because calls from before the new plan are still held
		_, err := p.plain.Runtime.TimeStatus(time.Second)
		return err == nil
	})
	p.plain.AwaitReady()
	table.Row("… the plugin works again: the node is ready after", since(healed), ready)
	t.Logf("hanging STATUS: %s", since(began))
}

// brief returns the innermost message of an error that the runtime and the kubelet have wrapped. It
// shortens a long message.
func brief(message string) string {
	const most = 100
	if i := strings.LastIndex(message, "returns error: "); i >= 0 {
		message = message[i+len("returns error: "):]
	}
	if len(message) > most {
		return message[:most] + "…"
	}
	return message
}

// manyPods starts and deletes many pods while 5 % of all ADDs and DELs fail (15 % in a short run).
// With unwind, every pod becomes ready, no two pods share an address, and nothing is left.
func (p pair) manyPods(t *testing.T, table *e2e.Table) {
	const count = 60
	rounds, percent := 5, 5
	if e2e.Short() {
		rounds, percent = 1, 15
	}
	began := time.Now()
	p.plain.ForgetAddresses()
	p.move("10.22.1.0/24", "10.22.2.0/24")
	flaky := fmt.Sprintf("fail %d%%", percent)
	p.each(func(w *e2e.Worker) { w.Plan(map[string]string{"ADD": flaky, "DEL": flaky}) })
	before := map[*e2e.Worker]map[string]int{}
	p.each(func(w *e2e.Worker) { before[w] = w.Refused() })
	refused := func(w *e2e.Worker) (adds, dels int) {
		now := w.Refused()
		return now["ADD"] - before[w]["ADD"], now["DEL"] - before[w]["DEL"]
	}
	silent, across := map[*e2e.Worker]int{}, map[*e2e.Worker]int{}
	var up, down time.Duration
	for range rounds {
		start := time.Now()
		p.each(func(w *e2e.Worker) { w.RunPods("many", count) })
		p.each(func(w *e2e.Worker) { mustBeReady(t, w, "many", count) })
		up += time.Since(start)
		e2e.Eventually(t, podTime, "unwind has no more addresses than pods", func() bool { return len(p.unwind.Reserved()) == count })
		checkPods(t, p.unwind)
		for w, other := range map[*e2e.Worker]*e2e.Worker{p.plain: p.unwind, p.unwind: p.plain} {
			pods := w.Pods("many")
			silent[w] += len(w.Silent(pods))
			across[w] += len(other.SilentToPods(pods[:1]))
		}
		start = time.Now()
		p.each(func(w *e2e.Worker) { w.DeletePods("pod", "--all", "--wait=false") })
		p.each(func(w *e2e.Worker) { mustBeReady(t, w, "many", 0) })
		down += time.Since(start)
	}
	failed := map[*e2e.Worker]string{}
	p.each(func(w *e2e.Worker) {
		adds, dels := refused(w)
		failed[w] = fmt.Sprintf("%d ADDs, %d DELs", adds, dels)
		if adds == 0 || dels == 0 {
			t.Errorf("%s: %s failed, so the test proves nothing", w.NodeName, failed[w])
		}
	})
	table.Row(fmt.Sprintf("%d × %d pods, %d %% of ADDs and DELs fail: failed", rounds, count, percent), failed[p.plain], failed[p.unwind])
	outOf := func(n map[*e2e.Worker]int, w *e2e.Worker) string {
		return fmt.Sprintf("%d of %d", rounds*count-n[w], rounds*count)
	}
	table.Row("… pods that answer a ping", outOf(silent, p.plain), outOf(silent, p.unwind))
	table.Row("… one of them, each of the other node's pods", outOf(across, p.plain), outOf(across, p.unwind))
	if across[p.plain]+across[p.unwind] > 0 {
		t.Errorf("pods that do not answer the other node's pods: %d without unwind, %d with unwind", across[p.plain], across[p.unwind])
	}
	p.each(func(w *e2e.Worker) { w.Plan(nil) })
	leaves(t, p.unwind)
	table.Row("… left", p.plain.Settled(), p.unwind.Settled())
	t.Logf("many pods: %s, of which %s up and %s down", since(began), up, down)
}

// move gives the workers' networks other subnets.
func (p pair) move(plain, unwind string) {
	p.plain.Use(chain(p.plain.Node, plain, false))
	p.unwind.Use(chain(p.unwind.Node, unwind, true))
	p.plain.Runtime.AwaitConfig(plain, true)
	p.unwind.Runtime.AwaitConfig(unwind, true)
}

// restart: some pods fail to start, and are deleted. Then the node reboots while the pods of a
// StatefulSet run. With unwind, these pods start again with new addresses, and no address from
// before the reboot stays reserved.
func (p pair) restart(t *testing.T, table *e2e.Table) {
	const count = 8
	began := time.Now()
	p.plain.ForgetAddresses()
	p.each(func(w *e2e.Worker) { w.RunStatefulSet("stays", count) })
	p.each(func(w *e2e.Worker) { mustBeReady(t, w, "stays", count) })
	checkPods(t, p.unwind)
	p.each(func(w *e2e.Worker) {
		w.PlanPods("crash", map[string]string{"ADD": "fail", "DEL": "fail"})
		w.RunPods("crash", 2)
	})
	e2e.Eventually(t, podTime, "addresses leak without unwind (otherwise the test proves nothing)", func() bool { return len(p.plain.Reserved()) >= count+2 })
	p.each(func(w *e2e.Worker) {
		w.DeletePods("pod", "--selector=app=crash")
		w.PlanPods("crash", nil)
	})
	took := map[*e2e.Worker]time.Duration{}
	p.each(func(w *e2e.Worker) {
		start := time.Now()
		before := w.Reserved()
		w.Restart()
		e2e.Eventually(t, podTime, w.NodeName+": the pods are back", func() bool {
			pods := w.Pods("stays")
			return !slices.ContainsFunc(pods, func(pod e2e.KubePod) bool {
				return before[pod.IP] != "" || !pod.Ready // host-local does not reuse an address so soon
			}) && len(w.Silent(pods)) == 0
		})
		took[w] = since(start)
	})
	e2e.Eventually(t, podTime, "unwind has no more addresses than pods", func() bool { return len(p.unwind.Reserved()) == count })
	checkPods(t, p.unwind)
	if n := len(p.plain.Reserved()); n <= count {
		t.Errorf("only %d addresses are taken without unwind, so the test proves nothing", n)
	}
	table.Row(fmt.Sprintf("reboot with %d pods, when 2 others have crash-looped: addresses after", count), len(p.plain.Reserved()), len(p.unwind.Reserved()))
	table.Row("… the pods are back after", took[p.plain], took[p.unwind])
	p.each(func(w *e2e.Worker) { w.DeletePods("statefulset,pod", "--all") })
	leaves(t, p.unwind)
	table.Row("… all pods are deleted: left", p.plain.Settled(), p.unwind.Settled())
	t.Logf("restart: %s", since(began))
}
