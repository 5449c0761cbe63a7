//go:build e2e

package e2e_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"cni-unwind/plugin/e2e"
)

// now and next are the versions of the two untagged builds from `make e2e-now` and `make e2e-next`.
// The repository's chart runs the image of the first build. The chart at nextChart is built like a
// release's chart, and names the image of the second build by its digest.
const (
	now  = "v0.0.0-20260101000000-000000000001"
	next = "v0.0.0-20260102000000-000000000002"
)

func nextChart(t *testing.T) string {
	t.Helper()
	return e2e.Path(t, ".tools/e2e/chart-next.tgz")
}

// roll runs a helm command that replaces the agents, while pods start and stop. Afterwards, each
// node must have the agent and the plugin of the given version.
func (i *installed) roll(step, version string, helm ...string) {
	i.Helper()
	began, before := time.Now(), i.agents()
	i.cluster.Helm(helm...)
	least := 3
	if e2e.Short() {
		least = 1
	}
	rounds := i.rounds(least, func() bool {
		out := i.cluster.Kubectl("-n", "kube-system", "rollout", "status", "ds/unwind", "--watch=false")
		return strings.Contains(out, "successfully rolled out")
	})
	after := i.replaced(before)
	cells := []any{step}
	for _, w := range i.workers {
		i.runs(w, version)
		pod := after[w.NodeName]
		cells = append(cells, fmt.Sprintf("%d × 3 pods, ready after %s", rounds, pod.ready.Sub(pod.created)))
	}
	i.table.Row(append(cells, since(began))...)
}

// runs() fails the test unless a node's agent is ready, and /metrics has the given version for both
// the agent and the plugin. The plugin itself and doctor must also report this version of the
// plugin.
func (i *installed) runs(w *e2e.Worker, version string) {
	i.Helper()
	readyz, err := i.ask(w, "readyz")
	if err != nil || readyz != "ok\n" {
		i.Errorf("%s: /readyz: %v, %q", w.NodeName, err, readyz)
	}
	metrics, err := i.ask(w, "metrics")
	for _, name := range []string{"unwind_build_info{", "unwind_plugin_info{"} {
		_, line, _ := strings.Cut(metrics, "\n"+name)
		line, _, _ = strings.Cut(line, "\n")
		if !strings.HasSuffix(line, fmt.Sprintf("version=%q} 1", version)) {
			i.Errorf("%s: /metrics: %v, no %s with %s", w.NodeName, err, name, version)
		}
	}
	_, about, _ := w.Try(e2e.PluginDir + "/unwind")
	if !strings.HasPrefix(about, "CNI plugin unwind "+version+":") {
		i.Errorf("%s: the plugin reports %q, want %s", w.NodeName, about, version)
	}
	doctor, _, _ := i.cluster.KubectlUnwind("exec", "--nodes", w.NodeName, "--", "doctor", "-o", "json")
	if !strings.Contains(doctor, fmt.Sprintf("\"plugin\": %q", version)) {
		i.Errorf("%s: doctor does not report version %s of the plugin:\n%s", w.NodeName, version, doctor)
	}
}

type agentPod struct {
	name           string
	created, ready time.Time
}

// agents returns the agents' pods by node, except pods that are being deleted.
func (i *installed) agents() map[string]agentPod {
	i.Helper()
	var list struct {
		Items []struct {
			Metadata struct {
				Name              string
				CreationTimestamp time.Time
				DeletionTimestamp *time.Time
			}
			Spec   struct{ NodeName string }
			Status struct {
				Conditions []struct {
					Type               string
					LastTransitionTime time.Time
				}
			}
		}
	}
	out := i.cluster.Kubectl("get", "--raw", "/api/v1/namespaces/kube-system/pods?labelSelector=app.kubernetes.io/name=unwind")
	check(i, json.Unmarshal([]byte(out), &list))
	agents := map[string]agentPod{}
	for _, p := range list.Items {
		if p.Metadata.DeletionTimestamp != nil {
			continue
		}
		agent := agentPod{name: p.Metadata.Name, created: p.Metadata.CreationTimestamp}
		for _, c := range p.Status.Conditions {
			if c.Type == "Ready" {
				agent.ready = c.LastTransitionTime
			}
		}
		agents[p.Spec.NodeName] = agent
	}
	return agents
}

// replaced fails the test unless all agents' pods were replaced, and returns the new pods. It
// compares the pods' names, not the times of their conditions, because a kubelet under load may
// make a ready pod unready for a moment, which changes these times.
func (i *installed) replaced(before map[string]agentPod) (after map[string]agentPod) {
	i.Helper()
	after = i.agents()
	replaced := 0
	for node, agent := range after {
		if agent.name != before[node].name {
			replaced++
		}
	}
	if replaced != len(i.workers) || replaced != len(after) {
		i.Fatalf("the agents are %v, and were %v", after, before)
	}
	return after
}

// awaitRollout waits until all agents are replaced.
func (i *installed) awaitRollout() {
	i.Helper()
	i.cluster.Kubectl("-n", "kube-system", "rollout", "status", "ds/unwind", "--timeout=2m")
}

// ask sends an HTTP request to a worker's agent, and returns the response.
func (i *installed) ask(w *e2e.Worker, path string) (string, error) {
	i.Helper()
	return i.cluster.TryKubectl("get", "--raw", "/api/v1/namespaces/kube-system/pods/"+i.agents()[w.NodeName].name+":9469/proxy/"+path)
}

// logAgents logs the agents' pods and their logs if the test has failed.
func (i *installed) logAgents() {
	if !i.Failed() {
		return
	}
	pods, err := i.cluster.TryKubectl("-n", "kube-system", "get", "pods", "-o", "wide")
	logs, err2 := i.cluster.TryKubectl("-n", "kube-system", "logs", "--selector=app.kubernetes.io/name=unwind", "--prefix", "--tail=30")
	i.Logf("agents: %v, %v\n%s%s", err, err2, pods, logs)
}
