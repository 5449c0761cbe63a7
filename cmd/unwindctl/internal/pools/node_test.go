package pools

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestOfNode: the ranges are those that flannel and calico pass to host-local on this node.
func TestOfNode(t *testing.T) {
	t.Parallel()
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		cidrs := map[string]string{"/api/v1/nodes/dual": `["10.244.1.0/24", "fd00::/120"]`, "/api/v1/nodes/new": `null`}[r.URL.Path]
		if cidrs == "" {
			w.WriteHeader(http.StatusForbidden)
		}
		fmt.Fprintf(w, `{"kind": "Node", "spec": {"podCIDRs": %s}}`, cidrs)
	}))
	t.Cleanup(api.Close)
	dir := t.TempDir()
	for name, text := range map[string]string{
		"both.env": "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_IPV6_SUBNET=fd00::1/120\nFLANNEL_SUBNET=10.244.1.1/24\nFLANNEL_MTU=1450\n",
		"none.env": "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=\n", "bad.env": "FLANNEL_SUBNET=10.244.1.1\n", "nodename": "dual\n",
		"kubeconfig": fmt.Sprintf(`{"current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "k"}}],
			"clusters": [{"name": "k", "cluster": {"server": %q}}]}`, api.URL),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const v4, v6 = "[10.244.1.1-10.244.1.254]", "[fd00::1-fd00::ff]"
	calico := `"type": "calico", "kubernetes": {"kubeconfig": "DIR/kubeconfig"}, `
	for _, tt := range []struct{ config, ipam, want string }{ // the sets, or a part of the error
		{`"type": "bridge"`, `"subnet": "10.244.1.0/24"`, v4},
		{`"type": "flannel", "subnetFile": "DIR/both.env"`, `"ranges": [[{"subnet": "10.9.0.0/16"}]]`, v4 + v6},
		{`"type": "flannel", "subnetFile": "DIR/none.env"`, `"dataDir": "/x"`, "none.env does not set FLANNEL_SUBNET"},
		{`"type": "flannel", "subnetFile": "DIR/bad.env"`, `"dataDir": "/x"`, "bad.env: netip.ParsePrefix"},
		{`"type": "flannel", "subnetFile": "DIR/missing"`, `"dataDir": "/x"`, "missing: no such file"},
		{calico + `"nodename": "dual"`, `"subnet": "USEPODCIDR"`, v4},
		{calico + `"nodename": "dual"`, `"ranges": [[{"subnet": "usePodCidr"}], [{"subnet": "usePodCidrIPv6"}]]`, v4 + v6},
		{calico + `"nodename_file": "DIR/nodename"`, `"ranges": [[{"subnet": "usePodCidr"}], [{"subnet": "10.1.0.0/30"}]]`, v4 + "[10.1.0.1-10.1.0.2]"},
		{calico + `"nodename": "new"`, `"subnet": "usePodCidr"`, `no pod CIDR for "usePodCidr"`},
		{calico + `"nodename": "other"`, `"subnet": "usePodCidr"`, "cannot read node other at 127.0.0.1"},
		{calico + `"nodename": "../x"`, `"subnet": "usePodCidr"`, "is not a valid node name"},
		{calico + `"nodename": "other"`, `"subnet": "10.244.1.0/24"`, v4},
		{`"type": "calico"`, `"subnet": "usePodCidr"`, "sets no kubernetes.kubeconfig"},
		{`"type": "bridge"`, `"subnet": "usePodCidr"`, "invalid CIDR address: usePodCidr"},
	} {
		text := strings.ReplaceAll(fmt.Sprintf(`{%s, "ipam": {"type": "host-local", %s}}`, tt.config, tt.ipam), "DIR", dir)
		config, err := OfNode(t.Context(), json.RawMessage(text))
		var sets []Set
		if err == nil {
			sets, err = Ranges(config)
		}
		got := fmt.Sprint(err)
		if err == nil {
			got = ""
			for _, set := range sets {
				got += fmt.Sprint(set)
			}
		}
		if got != tt.want && (err == nil || !strings.Contains(got, tt.want)) {
			t.Errorf("%s: %s\nwant %s", text, got, tt.want)
		}
	}
}
