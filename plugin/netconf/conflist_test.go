package netconf

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestChainFileRenamed: if chainFile is gone, the chain is that of the first file that a runtime
// without unwind would take for the same network.
func TestChainFileRenamed(t *testing.T) {
	const ours = `{"cniVersion": "1.0.0", "name": "podnet", "type": "unwind", "chainFile": "/x"}`
	one := func(network, plugin string) string {
		return fmt.Sprintf(`{"cniVersion": "1.0.0", "name": %q, "plugins": [{"type": %q}]}`, network, plugin)
	}
	const gone = "chainFile DIR/10-podnet.conflist: no such file or directory; "
	const none = gone + "the network's provider has not written it, or has removed it"
	for _, tt := range []struct {
		name  string
		files map[string]string
		want  string // the plugin and its file, or the error
	}{
		{"a later name", map[string]string{"20-podnet.conflist": one("podnet", "a")}, "a of 20-podnet.conflist"},
		{"as one plugin", map[string]string{"20-podnet.conf": `{"cniVersion": "1.0.0", "name": "podnet", "type": "a"}`},
			"a of 20-podnet.conf"},
		{"the first of three", map[string]string{"20.json": one("podnet", "a"), "21.conflist": one("podnet", "b"),
			"22.conf": one("podnet", "c")}, "a of 20.json"},
		{"not ours", map[string]string{"00-unwind.json": ours, "01-unwind.conflist": one("podnet", "unwind"),
			"20-podnet.conflist": one("podnet", "a")}, "a of 20-podnet.conflist"},
		{"not another network", map[string]string{"15-other.conflist": one("other", "b"),
			"20-podnet.conflist": one("podnet", "a")}, "a of 20-podnet.conflist"},
		{"not what a runtime does not read", map[string]string{"15-podnet.bak": one("podnet", "b"), "16.conflist.tmp": one("podnet", "b"),
			"17.conflist": `{"name": "podnet", "plug`, "20-podnet.conflist": one("podnet", "a")}, "a of 20-podnet.conflist"},
		{"no file", nil, none},
		{"another network alone", map[string]string{"00-unwind.json": ours, "20-other.conflist": one("other", "a"),
			"30-third.conflist": one("third", "a")}, gone + `run unwindctl install to switch from network "podnet" to "other" ` +
			`(DIR/20-other.conflist), or unwindctl off to bypass unwind`},
		{"no chain", map[string]string{"20.conflist": `{"name": "podnet", "plugins": []}`},
			none + `; DIR/20.conflist: key "plugins" is empty; put the plugins to run there`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			for name, content := range tt.files {
				if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			conf := &Conf{Name: "podnet", ChainFile: filepath.Join(dir, "10-podnet.conflist")}
			chain, err := conf.LoadChain()
			got := fmt.Sprint(err)
			if err == nil {
				got = chain.Delegates[0].Type
				warning, found := strings.CutPrefix(chain.Warning, "chainFile "+conf.ChainFile+" is gone; using ")
				file, _, _ := strings.Cut(warning, " of the same network")
				if found {
					got += " of " + filepath.Base(file)
				}
			}
			if got = strings.ReplaceAll(got, dir, "DIR"); got != tt.want {
				t.Errorf("\ngot  %s\nwant %s", got, tt.want)
			}
		})
	}
}
