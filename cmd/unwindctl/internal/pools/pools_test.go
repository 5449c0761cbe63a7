package pools

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// TestNerdctlsNetworks: the pools of nerdctl's own networks are found in the folders of its
// namespaces. A directory of plugins, as libcni adds them to a list, is no such folder.
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
