package e2e

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
)

const (
	multusKubeconfig = ConfDir + "/multus.d/multus.kubeconfig"
	multusAPI        = "127.0.0.1:6443"
	multusNetworks   = "/var/lib/cni/networks"
)

// MultusAPI stands in for the API server, and supports only the requests of thin Multus 4.3.0. It
// returns any requested pod, with an annotation that names an additional network, and returns that
// network's definition. It accepts a pod's status, but does not store it.
type MultusAPI struct {
	n          *Node
	definition string // spec.config of the additional network
	server     *http.Server
}

// ConfigureMultus gives the node a network with the real multus. Each pod joins two networks, each
// with addresses for 6 pods. The chain of the cluster network is bridge, firewall and the given
// plugins. The additional network has only bridge. If unwind and front are true, unwind runs
// Multus. If only unwind is true, Multus runs unwind for each of the two networks.
func (n *Node) ConfigureMultus(unwind, front bool, more ...string) *MultusAPI {
	n.Helper()
	if err := os.Symlink(tool(n, "multus/multus"), n.File(PluginDir, "multus")); err != nil {
		n.Fatal(err)
	}
	n.Write(multusKubeconfig, fmt.Sprintf(`{"apiVersion": "v1", "kind": "Config",
		"current-context": "multus", "users": [{"name": "multus", "user": {}}],
		"clusters": [{"name": "local", "cluster": {"server": "http://%s"}}],
		"contexts": [{"name": "multus", "context": {"cluster": "local", "user": "multus"}}]}`, multusAPI))
	network := func(name, bridge, subnet string, more ...string) string {
		list := fmt.Sprintf(`{"cniVersion": "1.0.0", "name": %q, "plugins": [
			{"type": "bridge", "bridge": %q, "isGateway": true, "ipMasq": true, "ipam": {"type": "host-local",
			"ranges": [[{"subnet": "%s.0/24", "rangeEnd": "%s.7"}]]}}]}`, name, bridge, subnet, subnet)
		list = n.extend(list, more)
		if unwind && !front {
			list = n.wrap(list)
		}
		return list
	}
	cluster := network(NetworkName, "cni0", "10.22.0", append([]string{Firewall}, more...)...)
	api := &MultusAPI{n: n, definition: network("extra", "cni1", "10.23.0")}
	list := fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "multus-cni-network", "plugins": [
		{"type": "multus", "kubeconfig": %q, "delegates": [%s]}]}`, multusKubeconfig, cluster)
	n.configure("multus-cni-network", list, unwind && front, nil)
	return api
}

func (a *MultusAPI) Start() {
	a.n.Helper()
	var listener net.Listener
	a.n.do(func() (err error) {
		listener, err = net.Listen("tcp", multusAPI)
		return err
	})
	definition, err := json.Marshal(a.definition)
	if err != nil {
		a.n.Fatal(err)
	}
	pod := func(w http.ResponseWriter, r *http.Request) {
		answer(w, http.StatusOK, fmt.Sprintf(`{"apiVersion": "v1", "kind": "Pod",
			"metadata": {"namespace": "default", "name": %q,
			"annotations": {"k8s.v1.cni.cncf.io/networks": "extra"}}}`, r.PathValue("pod")))
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/v1/namespaces/default/pods/{pod}", pod)
	mux.HandleFunc("PUT /api/v1/namespaces/default/pods/{pod}/status", pod)
	const definitions = "/apis/k8s.cni.cncf.io/v1/namespaces/default/network-attachment-definitions"
	mux.HandleFunc("GET "+definitions+"/extra", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, http.StatusOK, fmt.Sprintf(`{"apiVersion": "k8s.cni.cncf.io/v1",
			"kind": "NetworkAttachmentDefinition", "metadata": {"namespace": "default", "name": "extra"},
			"spec": {"config": %s}}`, definition))
	})
	a.server = &http.Server{Handler: mux}
	a.n.Cleanup(a.Stop)
	go func() { _ = a.server.Serve(listener) }()
}

func (a *MultusAPI) Stop() { _ = a.server.Close() }

// Addresses returns the number of assigned addresses in both networks.
func (a *MultusAPI) Addresses() (count int) {
	a.n.Helper()
	for _, name := range []string{NetworkName, "extra"} {
		count += len(a.n.reserved(filepath.Join(multusNetworks, name)))
	}
	return count
}
