package install

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"cni-unwind/plugin/netconf"
)

// TestFollowsCapabilities has the union be of those that are on.
func TestFollowsCapabilities(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	i := Setup{ConfDir: dir, BinDir: dir, StateDir: filepath.Join(dir, "state")}
	for _, c := range []struct{ plugins, want string }{
		{`{"type": "a", "capabilities": {"ips": true, "mac": false}}, {"type": "b", "capabilities": {"mac": true}}`, `{"ips":true,"mac":true}`},
		{`{"type": "a", "capabilities": {"mac": false}}`, `null`},
		{`{"type": "a"}`, `null`},
		{`{"type": "b", "capabilities": {"mac": true}}`, `{"mac":true}`},
	} {
		text := fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "podnet", "plugins": [%s]}`, c.plugins)
		if err := os.WriteFile(filepath.Join(dir, "10-provider.conflist"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := writeConflist(i); err != nil {
			t.Fatal(err)
		}
		list, err := netconf.ReadConflist(i.Path())
		if err != nil {
			t.Fatal(err)
		}
		var own struct {
			Plugins []struct {
				Capabilities json.RawMessage `json:"capabilities"`
			} `json:"plugins"`
		}
		if err := json.Unmarshal(list.Data, &own); err != nil || len(own.Plugins) != 1 {
			t.Fatal(err, list.Data)
		}
		if got := string(raw(own.Plugins[0].Capabilities)); got != c.want {
			t.Errorf("%s: %s, want %s", c.plugins, got, c.want)
		}
	}
}

// TestVersionFollowsRuntime has the configuration of one plugin, which can offer one version only,
// have the newest that the runtime speaks, and keep it while the runtime does not tell.
func TestVersionFollowsRuntime(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	text := `{"cniVersion": "0.4.0", "name": "podnet", "plugins": [{"type": "a"}]}`
	if err := os.WriteFile(filepath.Join(dir, "10-provider.conflist"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ runtime, want string }{
		{"", "1.0.0"}, {"1.1.0", "1.1.0"}, {"", "1.1.0"}, {"1.0.0", "1.0.0"}, {"1.1.0", "1.1.0"},
	} {
		s := Setup{ConfDir: dir, BinDir: dir, StateDir: filepath.Join(dir, "state"), File: ownJSON, CNIVersion: c.runtime}
		if _, err := writeConflist(s); err != nil {
			t.Fatal(err)
		}
		if list, err := netconf.ReadConflist(s.Path()); err != nil || list.CNIVersion != c.want {
			t.Errorf("the runtime speaks %q: %+v, %v; want %s", c.runtime, list, err, c.want)
		}
	}
}

// writeConflist plans ours, and writes it.
func writeConflist(s Setup) (bool, error) {
	p, err := s.Plan()
	if err != nil {
		return false, err
	}
	return s.WriteConflist(p)
}
