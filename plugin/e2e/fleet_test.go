//go:build e2e

package e2e_test

import (
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/websocket"

	"cni-unwind/plugin/e2e"
	"cni-unwind/plugin/plugintest/nodetest"
)

type object = map[string]any

// nodes is the number of nodes in the fleet. Of the first hundred, every tenth hangs.
const nodes = 500

func hangs(i int) bool { return i < 100 && i%10 == 0 }

// TestKubernetesFleet: "kubectl unwind doctor", with a real kubectl, reaches 500 nodes. Ten of them
// hang: five do not respond to the exec request, and on the other five, unwindctl prints nothing.
// "kubectl unwind" reports these ten nodes, and prints the output of all others.
func TestKubernetesFleet(t *testing.T) {
	var execs atomic.Int32
	server := httptest.NewTLSServer(fleet(&execs))
	defer server.CloseClientConnections()
	cmd := exec.Command(e2e.Path(t, "bin/kubectl-unwind"), "doctor", "--timeout=1m")
	cmd.Env = environment(t, server)
	var errs strings.Builder
	cmd.Stderr = &errs
	began := time.Now()
	out, err := cmd.Output()
	spent := cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	t.Logf("%d nodes, 10 of which hang for 1m: %.1f s, %.1f s of CPU time", nodes, time.Since(began).Seconds(),
		spent.Seconds())
	var exited *exec.ExitError
	if !errors.As(err, &exited) || exited.ExitCode() != 1 {
		t.Errorf("%v, want exit code 1", err)
	}
	if n := execs.Load(); n != nodes {
		t.Errorf("%d execs, want %d", n, nodes)
	}
	var names, want []string
	for i := range nodes {
		if hangs(i) {
			names = append(names, nodeName(i))
		} else {
			want = append(want, nodeName(i)+": ok")
		}
	}
	if got := strings.Split(strings.TrimSpace(string(out)), "\n"); !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	if want := fmt.Sprintf("error: no answer within 1m0s (--timeout) on 10 of %d nodes: %s\n", nodes,
		strings.Join(names, ", ")); errs.String() != want {
		t.Errorf("stderr %s, want %s", errs.String(), want)
	}
}

func nodeName(i int) string { return fmt.Sprintf("node-%03d", i) }

// fleet is a fake API server with an agent's pod on each node. It serves only what kubectl requests
// in this test: discovery, lists of nodes and pods, a pod, and exec.
func fleet(execs *atomic.Int32) http.Handler {
	mux := http.NewServeMux()
	give := func(path string, answer object) {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(answer)
		})
	}
	give("/api", object{"kind": "APIVersions", "versions": []string{"v1"}})
	give("/apis", object{"kind": "APIGroupList", "apiVersion": "v1", "groups": []any{}})
	give("/api/v1", object{"kind": "APIResourceList", "groupVersion": "v1", "resources": []any{
		object{"name": "pods", "singularName": "pod", "namespaced": true, "kind": "Pod", "verbs": []string{"get", "list"}},
		object{"name": "nodes", "singularName": "node", "kind": "Node", "verbs": []string{"get", "list"}}}})
	const path = "/api/v1/namespaces/kube-system/pods"
	var podItems, nodeItems []any
	for i := range nodes {
		name := fmt.Sprintf("unwind-%03d", i)
		nodeItems = append(nodeItems, object{"kind": "Node", "apiVersion": "v1", "metadata": object{"name": nodeName(i)}})
		pod := object{"kind": "Pod", "apiVersion": "v1", "metadata": object{"name": name, "namespace": "kube-system"},
			"spec": object{"nodeName": nodeName(i), "containers": []any{object{"name": "agent"}}},
			"status": object{"phase": "Running", "containerStatuses": []any{
				object{"name": "agent", "state": object{"running": object{"startedAt": "2026-11-22T12:00:00Z"}}}}}}
		podItems = append(podItems, pod)
		give(path+"/"+name, pod)
		mux.HandleFunc("GET "+path+"/"+name+"/exec", func(w http.ResponseWriter, r *http.Request) {
			execs.Add(1)
			if hangs(i) && i%20 == 0 {
				<-r.Context().Done()
			}
			serveExec(i).ServeHTTP(w, r)
		})
	}
	give("/api/v1/nodes", object{"kind": "NodeList", "apiVersion": "v1", "items": nodeItems})
	give(path, object{"kind": "PodList", "apiVersion": "v1", "items": podItems})
	return mux
}

// serveExec serves exec over WebSocket, with the output of "unwindctl doctor" on a healthy node. If
// the node hangs, serveExec sends nothing. The first byte of a message is the number of its stream.
// The last message is a status on stream 3.
func serveExec(i int) http.Handler {
	return websocket.Server{
		Handshake: func(config *websocket.Config, _ *http.Request) error {
			if !slices.Contains(config.Protocol, "v5.channel.k8s.io") {
				return fmt.Errorf("no supported exec protocol in %q", config.Protocol)
			}
			config.Protocol = []string{"v5.channel.k8s.io"}
			return nil
		},
		Handler: func(conn *websocket.Conn) {
			conn.PayloadType = websocket.BinaryFrame
			if hangs(i) {
				<-conn.Request().Context().Done()
			}
			for _, message := range []string{"\x01ok\n", "\x03" + `{"kind": "Status", "status": "Success"}`} {
				_, _ = conn.Write([]byte(message))
			}
			_ = conn.WriteClose(1000)
		},
	}
}

// environment returns an environment with kubectl in PATH and a kubeconfig for the server.
func environment(t *testing.T, server *httptest.Server) []string {
	t.Helper()
	dir := t.TempDir()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	kubeconfig, err := json.Marshal(object{"apiVersion": "v1", "kind": "Config", "current-context": "fleet",
		"clusters": []any{object{"name": "fleet", "cluster": object{"server": server.URL, "certificate-authority-data": ca}}},
		"users":    []any{object{"name": "ann", "user": object{"token": "t"}}},
		"contexts": []any{object{"name": "fleet", "context": object{"cluster": "fleet", "user": "ann"}}}})
	nodetest.Check(t, err)
	kubectl := fmt.Sprintf("#!/bin/sh\nexec '%s' kubectl \"$@\"\n", e2e.Path(t, ".tools/e2e/kubernetes/hyperkube"))
	nodetest.Check(t, errors.Join(os.WriteFile(filepath.Join(dir, "config"), kubeconfig, 0o600),
		os.WriteFile(filepath.Join(dir, "kubectl"), []byte(kubectl), 0o700)))
	return []string{"PATH=" + dir, "KUBECONFIG=" + filepath.Join(dir, "config"), "KUBECACHEDIR=" + dir}
}
