//go:build e2e

package main

import (
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
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

	"cni-unwind/cmd/internal/term"
	"cni-unwind/testdata/e2e"
	"cni-unwind/testdata/nodetest"
)

type object = map[string]any

// fleet is an API server with a pod of the agent on each of its nodes, as far as kubectl asks for
// them: discovery, lists, and exec.
type fleet struct {
	nodes int
	hangs func(i int) bool
	asked atomic.Int32 // execs
}

// TestKubernetesFleet: kubectl unwind doctor with a real kubectl asks 500 nodes. 50 that hang cost
// the time of one: in all less than 30 s, or on a loaded machine than what it takes without them,
// twice, and 20 s. Half of these hang as a kubelet does that takes no connections, and half as an
// unwindctl does that prints nothing.
func TestKubernetesFleet(t *testing.T) {
	well, table, err := doctor(t, 500, func(int) bool { return false })
	if err != nil || !strings.HasSuffix(table, "\n500 nodes: 500 ok.\n") {
		t.Fatalf("%v\n%s", err, table)
	}
	hangs := func(i int) bool { return i%10 == 0 }
	took, table, err := doctor(t, 500, hangs)
	t.Logf("500 nodes: %.1f s; 50 of them hang: %.1f s", well.Seconds(), took.Seconds())
	if limit := max(30*time.Second, 20*time.Second+2*well); took > limit {
		t.Errorf("%s, not %s", took, limit)
	}
	var exited *exec.ExitError
	if !errors.As(err, &exited) || exited.ExitCode() != term.ExitError {
		t.Errorf("%v, not exit code %d", err, term.ExitError)
	}
	if !strings.HasSuffix(table, "\n500 nodes: 450 ok, 50 unreachable.\n") {
		t.Errorf("the last line is another:\n%s", table)
	}
	var named []string
	for line := range strings.Lines(table) {
		if strings.HasSuffix(line, "no answer within 20s (--timeout)\n") {
			named = append(named, strings.Fields(line)[0])
		}
	}
	for i := range 500 {
		if hangs(i) != slices.Contains(named, node(i)) {
			t.Errorf("%s: it hangs: %t; it is named: %t", node(i), hangs(i), !hangs(i))
		}
	}
}

// doctor runs kubectl unwind doctor, which asks each node once.
func doctor(t *testing.T, nodes int, hangs func(int) bool) (took time.Duration, table string, err error) {
	t.Helper()
	f := &fleet{nodes: nodes, hangs: hangs}
	server := httptest.NewTLSServer(f.handler())
	defer server.CloseClientConnections()
	cmd := exec.Command(e2e.Path(t, "bin/kubectl-unwind"), "doctor")
	cmd.Env = f.environment(t, server)
	began := time.Now()
	out, err := cmd.Output()
	if n := f.asked.Load(); n != int32(nodes) {
		t.Errorf("%d execs, not %d", n, nodes)
	}
	return time.Since(began), string(out), err
}

func node(i int) string { return fmt.Sprintf("node-%03d", i) }

func (f *fleet) handler() http.Handler {
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
	var pods, nodes []any
	for i := range f.nodes {
		name := fmt.Sprintf("unwind-%03d", i)
		nodes = append(nodes, object{"kind": "Node", "apiVersion": "v1", "metadata": object{"name": node(i)}})
		pods = append(pods, object{"kind": "Pod", "apiVersion": "v1", "metadata": object{"name": name},
			"spec": object{"nodeName": node(i)}, "status": object{"phase": "Running", "containerStatuses": []any{
				object{"name": container, "state": object{"running": object{}}}}}})
		mux.HandleFunc("GET "+path+"/"+name+"/exec", func(w http.ResponseWriter, r *http.Request) { f.exec(w, r, i) })
	}
	give("/api/v1/nodes", object{"kind": "NodeList", "apiVersion": "v1", "items": nodes})
	give(path, object{"kind": "PodList", "apiVersion": "v1", "items": pods})
	return mux
}

// exec is what unwindctl doctor does on a node.
func (f *fleet) exec(w http.ResponseWriter, r *http.Request, i int) {
	f.asked.Add(1)
	const forever = time.Hour
	if f.hangs(i) && i%20 == 0 {
		time.Sleep(forever)
	}
	serveExec(w, r, func(out, _ io.Writer) int {
		if f.hangs(i) {
			time.Sleep(forever)
		}
		time.Sleep(300 * time.Millisecond)
		fmt.Fprint(out, `{"version": 1, "checks": []}`)
		return 0
	})
}

// environment has a kubectl, and a kubeconfig for the server.
func (f *fleet) environment(t *testing.T, server *httptest.Server) []string {
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
