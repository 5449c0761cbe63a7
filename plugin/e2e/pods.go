package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
)

// KubePod is a pod as the API server reports it.
type KubePod struct {
	Name, UID, Node, IP string
	Ready, Ending       bool
}

// podSpec returns the spec of a pod that does nothing and runs on this worker.
func podSpec(w *Worker) object {
	return object{
		"nodeSelector":                  object{"kubernetes.io/hostname": w.NodeName},
		"dnsPolicy":                     "Default",
		"automountServiceAccountToken":  false,
		"enableServiceLinks":            false,
		"terminationGracePeriodSeconds": 1,
		"containers":                    []object{{"name": "pause", "image": PauseImage, "imagePullPolicy": "Never"}},
	}
}

// RunPods creates count pods on a worker, with the names prefix-0, prefix-1 and so on.
func (w *Worker) RunPods(prefix string, count int) {
	w.Helper()
	w.RunPodsWithPorts(prefix, count, 0)
}

// RunPodsWithPorts is like RunPods, but the pods get consecutive host ports, starting with first.
// If first is 0, no pod gets a host port.
func (w *Worker) RunPodsWithPorts(prefix string, count, first int) {
	w.Helper()
	var pods []object
	for i := range count {
		spec := podSpec(w)
		if first != 0 {
			spec["containers"].([]object)[0]["ports"] = []object{{"containerPort": 80, "hostPort": first + i}}
		}
		pods = append(pods, object{"apiVersion": "v1", "kind": "Pod", "spec": spec,
			"metadata": object{"name": fmt.Sprintf("%s-%d", prefix, i), "namespace": w.Namespace(), "labels": object{"app": prefix}}})
	}
	w.cluster.apply(pods...)
}

// RunStatefulSet creates a StatefulSet on a worker. Its pods all start at the same time.
func (w *Worker) RunStatefulSet(name string, replicas int) {
	w.Helper()
	labels := object{"app": name}
	w.cluster.apply(object{"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": object{"name": name, "namespace": w.Namespace()},
		"spec": object{"replicas": replicas, "serviceName": name, "podManagementPolicy": "Parallel", "selector": object{"matchLabels": labels},
			"template": object{"metadata": object{"labels": labels}, "spec": podSpec(w)}}})
}

// Namespace returns the Kubernetes namespace of the worker's pods. Each worker has its own, so that
// pods on different workers can have the same name.
func (w *Worker) Namespace() string { return "on-" + w.NodeName }

func (c *Cluster) apply(objects ...object) {
	c.Helper()
	data, err := json.Marshal(object{"apiVersion": "v1", "kind": "List", "items": objects})
	if err != nil {
		c.Fatal(err)
	}
	path := kubernetesDir + "/apply.json"
	c.control.Write(path, string(data))
	c.Kubectl("apply", "-f", path)
}

// Pods lists a worker's pods whose app label begins with a prefix.
func (w *Worker) Pods(prefix string) (pods []KubePod) {
	w.Helper()
	var list struct {
		Items []struct {
			Metadata struct {
				Name, UID         string
				DeletionTimestamp string
				Labels            map[string]string
			}
			Spec   struct{ NodeName string }
			Status struct {
				PodIP      string
				Conditions []struct{ Type, Status string }
			}
		}
	}
	out := w.cluster.Kubectl("get", "--raw", "/api/v1/namespaces/"+w.Namespace()+"/pods")
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		w.Fatal(err)
	}
	for _, p := range list.Items {
		if !strings.HasPrefix(p.Metadata.Labels["app"], prefix) {
			continue
		}
		pod := KubePod{Name: p.Metadata.Name, UID: p.Metadata.UID, Node: p.Spec.NodeName, IP: p.Status.PodIP, Ending: p.Metadata.DeletionTimestamp != ""}
		for _, condition := range p.Status.Conditions {
			pod.Ready = pod.Ready || condition.Type == "Ready" && condition.Status == "True"
		}
		pods = append(pods, pod)
	}
	return pods
}

// AwaitPods waits until exactly count pods exist and all are ready, and returns how long that took.
// It returns an error if none of these numbers changes for the given time: the pods, the ready pods,
// and the containers' resources on the node (see Left). Under load, all DELs of a node progress
// together, because each iptables that exits waits for the kernel's nf_tables lock. So for minutes,
// it may be that no pod has gone.
func (w *Worker) AwaitPods(prefix string, count int, within time.Duration) (took time.Duration, err error) {
	w.Helper()
	begin := time.Now()
	var ready, all int
	left := w.Left()
	for changed := begin; ; time.Sleep(300 * time.Millisecond) {
		pods := w.Pods(prefix)
		allBefore, readyBefore := all, ready
		all, ready = len(pods), 0
		for _, p := range pods {
			if p.Ready && !p.Ending {
				ready++
			}
		}
		if all != allBefore || ready != readyBefore {
			changed = time.Now()
		}
		took = time.Since(begin)
		if ready == count && all == count {
			return took, nil
		}
		if time.Since(changed) > within {
			if now := w.Left(); now != left {
				left, changed = now, time.Now()
				continue
			}
			return took, fmt.Errorf("%s: after %s %d of %d pods %s-* are ready, for %s", w.NodeName, took.Round(time.Second), ready, count,
				prefix, within)
		}
	}
}

// DeletePods runs "kubectl delete" in the worker's namespace. It waits until the API server has
// removed the pods, unless args contain --wait=false.
func (w *Worker) DeletePods(args ...string) {
	w.Helper()
	w.cluster.Kubectl(append([]string{"delete", "--namespace", w.Namespace(), "--timeout=120s"}, args...)...)
}

// Events returns the last warning events of pods whose names begin with a prefix.
func (w *Worker) Events(prefix string) string {
	w.Helper()
	const most = 10
	out := w.cluster.Kubectl("get", "events", "--namespace", w.Namespace(), "--field-selector=type=Warning",
		"-o", `jsonpath={range .items[*]}{.involvedObject.name} {.reason} {.message}{"\n"}{end}`)
	lines := slices.DeleteFunc(strings.SplitAfter(out, "\n"), func(l string) bool { return !strings.HasPrefix(l, prefix) })
	return strings.Join(lines[max(0, len(lines)-most):], "")
}

// pingTime bounds the time that a ready pod may need to answer a ping.
const pingTime = 15 * time.Second

// Silent returns the pods that don't answer a ping from the worker itself. First, it removes the
// pods' entries from the kernel's neighbor table: for up to a minute, an entry may contain the MAC
// address of the IP address's previous owner.
func (w *Worker) Silent(pods []KubePod) []string {
	w.Helper()
	for _, p := range pods {
		if p.IP != "" {
			w.Run("ip", "neigh", "flush", "to", p.IP)
		}
	}
	return w.silent(pods)
}

// SilentToPods pings the pods from each of the worker's own pods, and returns those that don't
// answer. First, it waits until each of the worker's own pods has the address that the API server
// reports for it, because the API server's state may lag behind.
func (w *Worker) SilentToPods(pods []KubePod) (silent []string) {
	w.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Second) {
		own, inside := w.Pods(""), [][]string{}
		pins, _ := os.ReadDir(w.File("/run/netns"))
		for _, pin := range pins {
			enter := []string{"nsenter", "--net=/run/netns/" + pin.Name()}
			addresses, _, _ := w.Try(enter[0], enter[1], "ip", "-4", "-o", "addr", "show", "eth0")
			if slices.ContainsFunc(own, func(p KubePod) bool { return p.IP != "" && strings.Contains(addresses, " "+p.IP+"/") }) {
				inside = append(inside, enter) // other namespaces belong to sandboxes whose DEL failed
			}
		}
		if len(inside) == len(own) {
			for _, enter := range inside {
				silent = append(silent, w.silent(pods, enter...)...)
			}
			return silent
		}
		if time.Now().After(end) {
			w.Fatalf("%s: %d pods, and %d network namespaces of theirs", w.NodeName, len(own), len(inside))
		}
	}
}

// silent pings pods, and returns those that don't answer. prefix, such as nsenter and its
// arguments, precedes the ping command.
func (w *Worker) silent(pods []KubePod, prefix ...string) (silent []string) {
	w.Helper()
	var mu sync.Mutex
	var all sync.WaitGroup
	limit := make(chan struct{}, 16)
	for _, p := range pods {
		all.Go(func() {
			limit <- struct{}{}
			defer func() { <-limit }()
			ping := append(slices.Clone(prefix), "ping", "-c1", "-W1", p.IP)
			answers := false
			for end := time.Now().Add(pingTime); !answers && p.IP != "" && time.Now().Before(end); {
				_, _, err := w.Try(ping[0], ping[1:]...)
				answers = err == nil
			}
			if !answers {
				mu.Lock()
				defer mu.Unlock()
				silent = append(silent, p.Name+" "+p.IP)
			}
		})
	}
	all.Wait()
	slices.Sort(silent)
	return silent
}
