package pools

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cni-unwind/ipam"
	"cni-unwind/plugin/known"
)

// TestNerdctlsNetworks: Read finds the pools of nerdctl's own networks in the directories of
// nerdctl's namespaces. It ignores a directory that is named after a network: from there, libcni
// adds plugins to the network's conflist.
func TestNerdctlsNetworks(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for file, text := range map[string]string{
		"10-podnet.conflist":            `{"cniVersion": "1.0.0", "name": "podnet", "plugins": [{"type": "bridge", "ipam": {"type": "host-local", "subnet": "10.1.0.0/24"}}]}`,
		"default/nerdctl-net1.conflist": `{"cniVersion": "1.0.0", "name": "net1", "nerdctlID": "0", "plugins": [{"type": "bridge", "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.4.1.0/24"}]]}}]}`,
		"podnet/20-more.conf":           `{"type": "portmap"}`,
	} {
		path := filepath.Join(dir, file)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	pools, _, err := Read("/var/lib/cni/unwind", dir)
	if err != nil || len(pools) != 2 || pools[0].Network != "podnet" || pools[1].Network != "net1" {
		t.Errorf("%+v, %v", pools, err)
	}
}

// TestOfNode: for flannel, OfNode returns the ranges that flannel passes to host-local on this
// node. For calico, it returns an error if only the Kubernetes API knows the ranges.
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
				got += fmt.Sprintf("[%s]", &set[0])
			}
		}
		if got != tt.want && (err == nil || !strings.Contains(got, tt.want)) {
			t.Errorf("%s: %s\nwant %s", text, got, tt.want)
		}
	}
}

// TestSize covers sizes at which counting could go wrong. inspect.TestFull compares small pools
// with host-local itself.
func TestSize(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		ipam string
		want int64
	}{
		{`"subnet": "10.1.0.0/16"`, 65533},
		{`"subnet": "0.0.0.0/0"`, 1<<32 - 3},
		{`"subnet": "10.1.0.0/24", "gateway": "10.1.0.0"`, 254},
		{`"subnet": "fd00::/120"`, 254},
		{`"subnet": "fd00::/75", "gateway": "fd00::"`, 1<<53 - 1},
		{`"subnet": "fd00::/75"`, 1<<53 - 2},
		{`"subnet": "fd00::/74"`, Unbounded},
		{`"subnet": "fd00::/64"`, Unbounded},
		{`"subnet": "::/0"`, Unbounded},
		{`"subnet": "fd00::/48", "rangeStart": "fd00::ffff:ffff:ffff:fffe", "rangeEnd": "fd00::1:0:0:0:1"`, 4},
		{`"ranges": [[{"subnet": "10.1.0.0/24"}, {"subnet": "10.2.0.0/30"}]]`, 254},
		{`"ranges": [[{"subnet": "fd00::/64"}, {"subnet": "fd01::/64"}]]`, Unbounded},
		{`"ranges": [[{"subnet": "fd00::/75"}, {"subnet": "fd01::/75"}]]`, Unbounded},
	} {
		sets, err := Ranges(json.RawMessage(`{"ipam": {"type": "host-local", ` + tt.ipam + `}}`))
		if err != nil || len(sets) != 1 || sets[0].Size() != tt.want {
			t.Errorf("%s: %v, %v; want the size %d", tt.ipam, sets, err, tt.want)
		}
	}
}

// FuzzRanges checks arbitrary plugin configurations. A pool's path is absolute and ends with the
// network's name. A range set's size is from 0 to Unbounded.
func FuzzRanges(f *testing.F) {
	for _, ipam := range []string{
		`"subnet": "10.1.0.0/24"`, `"subnet": "10.1.0.0/31"`, `"subnet": "fd00::/64", "dataDir": "/tmp/../x"`,
		`"ranges": [[{"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.9", "rangeEnd": "10.1.0.2"}]]`, `"ranges": [[]]`, `"ranges": [null]`,
		`"ranges": [[{"subnet": "10.1.0.0/24"}, {"subnet": "fd00::/64"}]], "dataDir": "relative"`, `"subnet": "10.1.0.5"`, `"subnet": "0.0.0.0/0"`,
		`"subnet": "::/0"`, `"subnet": "10.1.0.0/24", "gateway": "fd00::1"`, `"ranges": [[{"subnet": "10.1.0.0/24", "gateway": ""}]]`,
	} {
		f.Add([]byte(`{"cniVersion": "1.0.0", "name": "podnet", "type": "bridge", "ipam": {"type": "host-local", ` + ipam + `}}`))
	}
	f.Add([]byte(`{"ipam": {"type": "static"}}`))
	f.Fuzz(func(t *testing.T, config []byte) {
		pool := ipam.Pool(known.IPAMOf(config).Name, config, "podnet")
		if pool != "" && (!filepath.IsAbs(pool) || filepath.Base(pool) != "podnet" || filepath.Clean(pool) != pool) {
			t.Errorf("pool %q", pool)
		}
		sets, err := Ranges(config)
		if err != nil {
			return
		}
		for _, set := range sets {
			if size := set.Size(); size < 0 || size > Unbounded {
				t.Errorf("%+v has the size %d", set, size)
			}
		}
	})
}
