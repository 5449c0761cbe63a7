//go:build e2e

package e2e_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"cni-unwind/plugin/e2e"
)

const (
	ownConflist      = e2e.ConfDir + "/00-unwind.json"
	providerConflist = e2e.ConfDir + "/10-podnet.conflist"
)

// TestKubernetesInstall installs, uses and removes unwind on a cluster with running pods. One
// worker has a bridge network, the other has one like kindnet's. The main steps are:
//
//  1. Helm installs the chart, upgrades it to the next build and rolls it back.
//  2. unwind is switched off. It stays off while agents restart, nodes are drained, and nodes
//     reboot.
//  3. unwind is switched on again, and nodes are drained.
//  4. unwind is uninstalled.
//
// Pods start and stop during these steps, and no pod may fail. In the end, the pods have left
// nothing, the plugin is removed, and the provider's conflist is unchanged.
func TestKubernetesInstall(t *testing.T) {
	table := e2e.NewSteps(t, "Installation on Kubernetes", "STEP", "BRIDGE", "KINDNET'S SHAPE", "TOOK")
	c := e2e.NewCluster(t)
	i := &installed{t, c, []*e2e.Worker{
		c.Join("bridge", func(*e2e.Node) e2e.Network {
			return e2e.Network{Subnet: "10.22.1.0/24", Plugins: []string{e2e.Firewall, e2e.Portmap}}
		}),
		c.Join("kindnet", func(*e2e.Node) e2e.Network {
			return e2e.Network{Subnet: "10.22.2.0/24", Plugins: []string{e2e.Portmap}, Kindnet: true}
		}),
	}, table}
	providers := map[*e2e.Worker]string{}
	for _, w := range i.workers {
		removeFile(t, w.File(e2e.PluginDir, "unwind"))
		w.Runtime.Import(e2e.Path(t, ".tools/e2e/image-now.tar"))
		w.Runtime.Import(e2e.Path(t, ".tools/e2e/image-next.tar"), "--local", "--digests", "--base-name=docker.io/library/unwind")
		providers[w] = contents(t, w, providerConflist)
	}

	t.Cleanup(i.logAgents)
	i.pods("before")
	i.install()
	i.pods("through")
	i.allNodes()
	i.roll("helm upgrade to the next build, by its digest", next, "upgrade", "unwind", nextChart(t))
	i.roll("helm rollback, which the plugin follows", now, "rollback", "unwind", "1")
	i.each("a pod from before the install is deleted", func(w *e2e.Worker) string { return i.deleted(w, "before-0") })
	i.whilePodsComeAndGo("bridge: kubectl unwind exec -- off; kindnet: rm 00-unwind.json", i.switchOff)
	i.restart()
	i.pods("off")
	i.each("a pod that unwind started is deleted while unwind is off", func(w *e2e.Worker) string { return i.deleted(w, "through-0") })
	i.each("kubectl drain, uncordon", i.drain)
	i.each("reboot", i.reboot)
	i.whilePodsComeAndGo("kubectl unwind exec -- on", i.switchOn)
	i.pods("again")
	i.each("a pod that started while unwind was off is deleted", func(w *e2e.Worker) string { return i.deleted(w, "off-0") })
	i.each("kubectl drain, uncordon", i.drain)
	i.whilePodsComeAndGo("kubectl unwind exec -- uninstall", i.uninstall)
	i.pods("after")
	i.remove()
	i.each("all pods are deleted; left", i.empty)
	i.each("unwindctl sweep, uninstall", i.rest)
	for w, provider := range providers {
		if now := contents(t, w, providerConflist); now != provider {
			t.Errorf("%s: the provider's conflist was changed:\n%s", w.NodeName, now)
		}
	}
}

// installed contains the test and its cluster. Its methods are the steps.
type installed struct {
	*testing.T
	cluster *e2e.Cluster
	workers []*e2e.Worker
	table   *e2e.Table
}

// each runs a step on each worker, and adds a row with the results to the table.
func (i *installed) each(step string, do func(w *e2e.Worker) string) {
	i.Helper()
	began := time.Now()
	cells := []any{step}
	for _, w := range i.workers {
		cells = append(cells, do(w))
	}
	i.table.Row(append(cells, since(began))...)
}

// whilePodsComeAndGo runs a step on each worker while pods start and stop on all workers. It fails
// the test if a pod fails.
func (i *installed) whilePodsComeAndGo(step string, do func(w *e2e.Worker) string) {
	i.Helper()
	began, cells, ended := time.Now(), []any{step}, make(chan struct{})
	go func() {
		defer close(ended) // even if the step ends this goroutine with FailNow
		for _, w := range i.workers {
			cells = append(cells, do(w))
		}
	}()
	rounds := i.rounds(1, func() bool {
		select {
		case <-ended:
			return true
		default:
			return false
		}
	})
	if i.Failed() {
		i.FailNow()
	}
	for n := range i.workers {
		cells[n+1] = fmt.Sprintf("%s; %d × 3 pods", cells[n+1], rounds)
	}
	i.table.Row(append(cells, since(began))...)
}

// rounds starts and stops three pods on each worker, at least the given number of times, and then
// until done returns true. It returns the number of rounds.
func (i *installed) rounds(least int, done func() bool) (rounds int) {
	i.Helper()
	for over := false; !over; rounds++ {
		for _, w := range i.workers {
			w.RunPods("rolling", 3)
		}
		for _, w := range i.workers {
			mustBeReady(i.T, w, "rolling", 3)
			checkAddresses(i.T, w)
			w.DeletePods("pod", "--selector=app=rolling")
		}
		over = done() && rounds+1 >= least
		if rounds > 30 {
			i.Fatalf("not done after %d rounds of pods", rounds)
		}
	}
	return rounds
}

// drain starts a StatefulSet, drains its pods from a worker, and uncordons the worker once the
// pods' addresses are free.
func (i *installed) drain(w *e2e.Worker) string {
	i.Helper()
	w.RunStatefulSet("drained", 3)
	mustBeReady(i.T, w, "drained", 3)
	i.cluster.Kubectl("drain", w.NodeName, "--ignore-daemonsets", "--force", "--pod-selector=app=drained", "--timeout=90s")
	e2e.Eventually(i, podTime, "the drained pods' addresses are free", func() bool {
		return len(w.Reserved()) == len(w.Pods(""))-len(w.Pods("drained"))
	})
	i.cluster.Kubectl("uncordon", w.NodeName)
	mustBeReady(i.T, w, "drained", 3)
	checkAddresses(i.T, w)
	w.DeletePods("statefulset", "drained")
	e2e.Eventually(i, podTime, "the set's pods are gone", func() bool {
		return len(w.Pods("drained")) == 0 && len(w.Reserved()) == len(w.Pods(""))
	})
	return "3 pods drained and started again"
}

// pods starts two pods on each worker. They must become ready, and must answer pings from their own
// worker and from the pods of the other worker.
func (i *installed) pods(app string) {
	i.Helper()
	for _, w := range i.workers {
		w.RunPods(app, 2)
	}
	for n, w := range i.workers {
		mustBeReady(i.T, w, app, 2)
		checkAddresses(i.T, w)
		if silent := i.workers[1-n].SilentToPods(w.Pods(app)); len(silent) > 0 {
			i.Errorf("%s: these pods do not answer the other node's pods: %s", w.NodeName, strings.Join(silent, ", "))
		}
	}
}

// inUse waits until the runtime uses unwind's conflist or, if want is false, no longer uses it.
func (i *installed) inUse(w *e2e.Worker, want bool) string {
	i.Helper()
	w.Runtime.AwaitConfig(`"type":"unwind"`, want)
	if want {
		return "in use"
	}
	return "not in use"
}

// agent runs "unwindctl --host" in the pod of a worker's agent.
func (i *installed) agent(w *e2e.Worker, args ...string) (string, error) {
	i.Helper()
	return i.cluster.TryKubectl(append([]string{"-n", "kube-system", "exec", i.agents()[w.NodeName].name, "--", "/unwindctl", "--host"}, args...)...)
}

func (i *installed) install() {
	i.Helper()
	done := false
	i.whilePodsComeAndGo("helm install, doctor", func(w *e2e.Worker) string {
		if !done {
			i.cluster.Helm("install", "unwind", e2e.Path(i, "scripts/deploy/helm/unwind"), "--wait", "--timeout=2m")
			done = true
		}
		i.inUse(w, true)
		i.runs(w, now)
		return i.awaitDoctor(w)
	})
}

// awaitDoctor waits until doctor finds no problem on a node, and returns the last line of doctor's
// output. It retries, because doctor may rightly report a warning while pods start and stop.
func (i *installed) awaitDoctor(w *e2e.Worker) string {
	i.Helper()
	var lines []string
	said := ""
	e2e.Eventually(i, podTime, w.NodeName+": doctor finds no problem", func() bool {
		out, err := i.agent(w, "doctor")
		if err != nil && out != said {
			i.Logf("%s: doctor: %v\n%s", w.NodeName, err, out)
		}
		said = out
		lines = strings.Split(strings.TrimSpace(out), "\n")
		return err == nil
	})
	return lines[len(lines)-1]
}

// allNodes runs unwindctl commands on all nodes with "kubectl unwind exec". Every node must appear
// in the output of each command, and every pod in the output of "list".
func (i *installed) allNodes() {
	i.Helper()
	began, cells := time.Now(), []any{"kubectl unwind exec: doctor, list, ipam, sweep --dry-run"}
	for _, args := range []string{"doctor", "ipam", "sweep --dry-run", "list -o wide"} {
		out, stderr, err := i.cluster.KubectlUnwind(append([]string{"exec", "--"}, strings.Fields(args)...)...)
		i.Logf("kubectl unwind exec -- %s\n%s%s", args, out, stderr)
		var ended *exec.ExitError
		if warns := errors.As(err, &ended) && ended.ExitCode() == 3 && args == "doctor"; err != nil && !warns {
			i.Errorf("kubectl unwind exec -- %s: %v", args, err)
		}
		for _, w := range i.workers {
			if !strings.Contains("\n"+out, "\n"+w.NodeName+":") {
				i.Errorf("kubectl unwind exec -- %s: no output of %s", args, w.NodeName)
			}
			n := strings.Count(out, w.Namespace()+"/through-")
			switch {
			case args != "list -o wide":
				continue
			case n != 2:
				i.Errorf("kubectl unwind exec -- list: %d of 2 pods of %s", n, w.NodeName)
			}
			cells = append(cells, fmt.Sprintf("reached, %d attachments", n))
		}
	}
	i.table.Row(append(cells, since(began))...)
}

func (i *installed) deleted(w *e2e.Worker, pod string) string {
	i.Helper()
	w.DeletePods("pod", pod)
	e2e.Eventually(i, podTime, "the pod's address and veth are gone", func() bool {
		pods := len(w.Pods(""))
		return len(w.Reserved()) == pods && w.Left().Veths == pods
	})
	checkAddresses(i.T, w)
	return "its address is free"
}

// switchOff switches unwind off on the first worker. On the second worker, it removes unwind's
// conflist by hand. The running agents must not switch unwind on again.
func (i *installed) switchOff(w *e2e.Worker) string {
	i.Helper()
	if w == i.workers[0] {
		i.unwind(w, "off", "unwind has been off since")
	} else {
		removeFile(i.T, w.File(ownConflist))
	}
	return i.inUse(w, false)
}

// restart restarts all agents. unwind must stay off.
func (i *installed) restart() {
	i.Helper()
	began := time.Now()
	i.cluster.Kubectl("-n", "kube-system", "rollout", "restart", "ds/unwind")
	i.awaitRollout()
	i.table.Row("the agents restart", i.staysOff(i.workers[0]), i.staysOff(i.workers[1]), since(began))
}

// reboot reboots a worker. All its pods must become ready again, and its agent must not switch
// unwind on again.
func (i *installed) reboot(w *e2e.Worker) string {
	i.Helper()
	w.Restart()
	e2e.Eventually(i, podTime, w.NodeName+": the agent answers", func() bool {
		_, err := i.ask(w, "readyz")
		return err == nil
	})
	e2e.Eventually(i, podTime, w.NodeName+": the pods are ready again", func() bool {
		pods, reserved := w.Pods(""), w.Reserved()
		return len(reserved) == len(pods) && w.Left().Veths == len(pods) &&
			!slices.ContainsFunc(pods, func(pod e2e.KubePod) bool { return !pod.Ready || reserved[pod.IP] == "" })
	})
	checkAddresses(i.T, w)
	return i.staysOff(w)
}

// staysOff fails the test unless unwind is off on a worker. The marker file, doctor and /readyz
// must all report how it was switched off.
func (i *installed) staysOff(w *e2e.Worker) string {
	i.Helper()
	by := "kubectl unwind as "
	if w != i.workers[0] {
		by = "rm " + ownConflist
	}
	if _, err := os.Lstat(w.File(ownConflist)); err == nil {
		i.Errorf("%s: an agent has written the conflist again", w.NodeName)
	}
	doctor, _, _ := i.cluster.KubectlUnwind("exec", "--nodes", w.NodeName, "--", "doctor")
	readyz, err := i.ask(w, "readyz")
	marker, err2 := os.ReadFile(w.File("/var/lib/cni/unwind/off"))
	for where, text := range map[string]string{"marker": string(marker), "doctor": doctor, "/readyz": readyz} {
		if !strings.Contains(text, by) {
			i.Errorf("%s: %s does not say that unwind is off by %q: %q (%v, %v)", w.NodeName, where, by, text, err, err2)
		}
	}
	return "off, on record"
}

// unwind runs "kubectl unwind exec" on one node. The output must contain the text want.
func (i *installed) unwind(w *e2e.Worker, verb, want string) string {
	i.Helper()
	out, stderr, err := i.cluster.KubectlUnwind("exec", "--nodes", w.NodeName, "--", verb)
	// "uninstall" keeps a journal that contains attachments, here those of the running pods. It then
	// exits with code 6.
	kept := verb == "uninstall" && err != nil && err.Error() == "exit status 6"
	if err != nil && !kept || !strings.Contains(out, want) {
		i.Errorf("kubectl unwind exec -- %s: %v\n%s%s", verb, err, out, stderr)
	}
	return out
}

func (i *installed) switchOn(w *e2e.Worker) string {
	i.Helper()
	i.unwind(w, "on", ownConflist+" (by the agent")
	return i.inUse(w, true)
}

func (i *installed) uninstall(w *e2e.Worker) string {
	i.Helper()
	_, said, _ := strings.Cut(i.unwind(w, "uninstall", "the journal in "), "the journal in ")
	_, said, _ = strings.Cut(said, ": ")
	said, _, _ = strings.Cut(said, ". ")
	return said + "; " + i.inUse(w, false)
}

// remove uninstalls the chart. First, it checks that no agent has switched unwind on again.
func (i *installed) remove() {
	i.Helper()
	for _, w := range i.workers {
		i.inUse(w, false)
	}
	for _, w := range i.workers {
		if _, err := os.Lstat(w.File("/usr/local/bin/unwindctl")); err != nil {
			i.Errorf("%s: no unwindctl for a runbook: %v", w.NodeName, err)
		}
	}
	i.cluster.Helm("uninstall", "unwind", "--wait", "--timeout=2m")
}

// empty deletes all pods. After the uninstall, the provider's chain alone releases their resources.
func (i *installed) empty(w *e2e.Worker) string {
	i.Helper()
	w.DeletePods("pod", "--all")
	e2e.Eventually(i, podTime, "nothing is left of the pods", func() bool { return w.Left() == e2e.Left{} })
	return w.Settled().String()
}

// rest() sweeps until the journal is empty, and then uninstalls the rest of unwind.
func (i *installed) rest(w *e2e.Worker) string {
	i.Helper()
	owed := len(w.Journal())
	// A sweep keeps a deleted pod's attachment while the runtime lists the pod's sandbox: until the
	// kubelet's next garbage collection, which runs once a minute.
	e2e.Eventually(i, 3*podTime, "a sweep empties the journal", func() bool {
		w.Unwindctl("sweep")
		return len(w.Journal()) == 0
	})
	w.Unwindctl("uninstall", "--install-dir=")
	if _, err := os.Lstat(w.File(e2e.PluginDir, "unwind")); err == nil {
		i.Errorf("%s: the plugin was not removed", w.NodeName)
	}
	return fmt.Sprintf("%d entries swept, no plugin", owed)
}

func removeFile(t *testing.T, path string) {
	t.Helper()
	check(t, os.Remove(path))
}

func contents(t *testing.T, w *e2e.Worker, path string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Clean(w.File(path)))
	check(t, err)
	return string(data)
}
