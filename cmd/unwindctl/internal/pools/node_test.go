package pools

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestOfNode: the ranges are those that flannel passes to host-local on this node. Those of calico may be unknown.
func TestOfNode(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"both.env": "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_IPV6_SUBNET=fd00::1/120\nFLANNEL_SUBNET=10.244.1.1/24\nFLANNEL_MTU=1450\n",
		"none.env": "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=\n", "bad.env": "FLANNEL_SUBNET=10.244.1.1\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const v4, v6 = "[10.244.1.1-10.244.1.254]", "[fd00::1-fd00::ff]"
	for _, tt := range []struct{ config, ipam, want string }{ // the sets, or a part of the error
		{`"type": "bridge"`, `"subnet": "10.244.1.0/24"`, v4},
		{`"type": "flannel", "subnetFile": "DIR/both.env"`, `"ranges": [[{"subnet": "10.9.0.0/16"}]]`, v4 + v6},
		{`"type": "flannel", "subnetFile": "DIR/none.env"`, `"dataDir": "/x"`, "none.env does not set FLANNEL_SUBNET"},
		{`"type": "flannel", "subnetFile": "DIR/bad.env"`, `"dataDir": "/x"`, "bad.env: netip.ParsePrefix"},
		{`"type": "flannel", "subnetFile": "DIR/missing"`, `"dataDir": "/x"`, "missing: no such file"},
		{`"type": "calico"`, `"subnet": "USEPODCIDR"`, "which only the Kubernetes API provides"},
		{`"type": "calico"`, `"ranges": [[{"subnet": "10.1.0.0/30"}], [{"subnet": "usePodCidrIPv6"}]]`, "which only the Kubernetes API provides"},
		{`"type": "calico"`, `"subnet": "10.244.1.0/24"`, v4},
		{`"type": "bridge"`, `"subnet": "usePodCidr"`, "invalid CIDR address: usePodCidr"},
	} {
		text := strings.ReplaceAll(fmt.Sprintf(`{%s, "ipam": {"type": "host-local", %s}}`, tt.config, tt.ipam), "DIR", dir)
		config, err := OfNode(json.RawMessage(text))
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
