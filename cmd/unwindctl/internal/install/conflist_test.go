package install

import (
	"os"
	"path/filepath"
	"testing"

	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/nodetest"
)

// TestVersionFollowsRuntime has the configuration of one plugin, which can offer one version only,
// have the newest that the runtime speaks, and keep it while the runtime does not tell.
func TestVersionFollowsRuntime(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	text := `{"cniVersion": "0.4.0", "name": "podnet", "plugins": [{"type": "a"}]}`
	nodetest.Check(t, os.WriteFile(filepath.Join(dir, "10-provider.conflist"), []byte(text), 0o600))
	for _, c := range []struct{ runtime, want string }{
		{"", "1.0.0"}, {"1.1.0", "1.1.0"}, {"", "1.1.0"}, {"1.0.0", "1.0.0"}, {"1.1.0", "1.1.0"},
	} {
		s := Setup{ConfDir: dir, BinDir: dir, StateDir: filepath.Join(dir, "state"), File: ownJSON, CNIVersion: c.runtime}
		p, err := s.Plan()
		if err == nil {
			err = (&Changes{}).Make(t.Context(), s.WriteConflist(p))
		}
		nodetest.Check(t, err)
		if list, err := netconf.ReadConflist(s.Path()); err != nil || list.CNIVersion != c.want {
			t.Errorf("the runtime speaks %q: %+v, %v; want %s", c.runtime, list, err, c.want)
		}
	}
}
