//go:build e2e

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cni-unwind/testdata/e2e"
)

// images of the agent, of this version and of the next.
const (
	imageNow  = "docker.io/library/unwind:dev"
	imageNext = "docker.io/library/unwind:next"
)

const ownConflist = e2e.ConfDir + "/00-unwind.conflist"

// TestKubernetesInstall: unwind comes to a cluster beside a bridge network with pods, as README says; it is replaced by the next
// version and back, switched off and on, and uninstalled, all with pods that come, stay and go. In the end nothing is left.
func TestKubernetesInstall(t *testing.T) {
	table := e2e.NewSteps(t, "Installation on Kubernetes", "STEP", "RESULT", "TOOK")
	c := e2e.NewCluster(t)
	w := c.Join("node", func(*e2e.Node) e2e.Network {
		return e2e.Network{Subnet: "10.22.0.0/24", Plugins: []string{e2e.Firewall, e2e.Portmap}}
	})
	removeFile(t, w.File(e2e.PluginDir, "unwind"))
	w.Import(imageNow, e2e.Path(t, "bin/unwindctl"), e2e.Path(t, "bin/unwind"))
	w.Import(imageNext, e2e.Path(t, ".tools/e2e/next/unwindctl"), e2e.Path(t, ".tools/e2e/next/unwind"))
	provider := contents(t, w, e2e.ConfDir+"/10-podnet.conflist")

	now := strings.TrimPrefix(strings.TrimSpace(w.Unwindctl("version")), "unwindctl ")

	i := &installed{t, c, w, table}
	i.pods("before")
	i.step("kubectl apply -f daemonset.yaml, doctor", i.apply)
	i.pods("through")
	i.step("to the next version, with pods that come and go", func() string { return i.rollTo(imageNext, "e2e-next") })
	i.step("and back", func() string { return i.rollTo(imageNow, now) })
	i.step("a pod from before the install is deleted", func() string { return i.deleted("before-0") })
	i.step("switched off: DaemonSet deleted, rm 00-unwind.conflist", i.switchOff)
	i.pods("off")
	i.step("a pod of unwind's is deleted meanwhile", func() string { return i.deleted("through-0") })
	i.step("on again: unwindctl install", i.switchOn)
	i.pods("again")
	i.step("a pod from meanwhile is deleted", func() string { return i.deleted("off-0") })
	i.step("unwindctl uninstall, with pods running", i.uninstall)
	i.pods("after")
	i.step("all pods are deleted", i.empty)
	if now := contents(t, w, e2e.ConfDir+"/10-podnet.conflist"); now != provider {
		t.Errorf("the provider's conflist was changed:\n%s", now)
	}
}

// installed is the worker of the test, and what is done to it.
type installed struct {
	*testing.T
	cluster *e2e.Cluster
	worker  *e2e.Worker
	table   *e2e.Table
}

func (i *installed) step(name string, do func() string) {
	i.Helper()
	began := time.Now()
	result := do()
	i.table.Row(name, result, since(began))
}

// pods starts two pods, and sees that all pods are well.
func (i *installed) pods(app string) {
	i.Helper()
	i.worker.RunPods(app, 2)
	mustBeReady(i.T, i.worker, app, 2)
	checkAddresses(i.T, i.worker)
}

// inUse waits until the runtime has read, or read no more, unwind's conflist.
func (i *installed) inUse(want bool) {
	i.Helper()
	i.worker.Runtime.AwaitConfig(`"type":"unwind"`, want)
}

func (i *installed) apply() string {
	i.Helper()
	i.cluster.Kubectl("apply", "-f", e2e.Path(i, "scripts/deploy/daemonset.yaml"))
	i.cluster.Kubectl("-n", "kube-system", "rollout", "status", "ds/unwind", "--timeout=120s")
	i.inUse(true)
	i.cluster.Kubectl("-n", "kube-system", "exec", "ds/unwind", "--", "/unwindctl", "--host", "doctor")
	return "in use"
}

// rollTo replaces the agent's image while pods come and go.
func (i *installed) rollTo(image, version string) string {
	i.Helper()
	w := i.worker
	i.cluster.Kubectl("-n", "kube-system", "set", "image", "ds/unwind", "agent="+image)
	rounds := 0
	for done := false; !done; rounds++ {
		w.RunPods("rolling", 3)
		mustBeReady(i.T, w, "rolling", 3)
		checkAddresses(i.T, w)
		w.DeletePods("pod", "--selector=app=rolling")
		_, err := i.cluster.TryKubectl("-n", "kube-system", "rollout", "status", "ds/unwind", "--watch=false")
		done = err == nil && i.version() == version
		if rounds > 30 {
			i.Fatalf("after %d rounds of pods the plugin is still %s", rounds, i.version())
		}
	}
	return fmt.Sprintf("%d × 3 pods", rounds)
}

// version is that of the plugin which the runtime calls, as it says of itself.
func (i *installed) version() string {
	i.Helper()
	_, about, _ := i.worker.Try(e2e.PluginDir + "/unwind")
	about, _, _ = strings.Cut(about, ":")
	return strings.TrimPrefix(about, "CNI plugin unwind ")
}

func (i *installed) deleted(pod string) string {
	i.Helper()
	i.worker.DeletePods("pod", pod)
	e2e.Eventually(i, podTime, "what it had is free", func() bool { return len(i.worker.Reserved()) == len(i.worker.Pods("")) })
	checkAddresses(i.T, i.worker)
	return "its address is free"
}

func (i *installed) switchOff() string {
	i.Helper()
	i.cluster.Kubectl("delete", "-f", e2e.Path(i, "scripts/deploy/daemonset.yaml"), "--timeout=120s")
	removeFile(i.T, i.worker.File(ownConflist))
	i.inUse(false)
	return "not in use"
}

func (i *installed) switchOn() string {
	i.Helper()
	i.worker.Unwindctl("install")
	i.inUse(true)
	return "in use"
}

func (i *installed) uninstall() string {
	i.Helper()
	said := i.worker.Unwindctl("uninstall")
	i.inUse(false)
	return strings.Join(strings.Fields(said), " ")
}

func (i *installed) empty() string {
	i.Helper()
	w := i.worker
	w.DeletePods("pod", "--all")
	e2e.Eventually(i, podTime, "nothing is left of the pods", func() bool { return w.Left() == e2e.Left{} })
	owed := len(w.Journal())
	w.Unwindctl("sweep")
	if left := w.Journal(); len(left) > 0 {
		i.Errorf("after a sweep the journal still has %+v", left)
	}
	return fmt.Sprintf("left %s; %d entries for a sweep", w.Settled(), owed)
}

func removeFile(t *testing.T, path string) {
	t.Helper()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
}

func contents(t *testing.T, w *e2e.Worker, path string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Clean(w.File(path)))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}
