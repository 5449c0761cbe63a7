package netconf

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestChainFileRenamed: an installer has removed or renamed chainFile, or has overwritten it with a
// list that contains unwind. LoadChain then uses the file that a runtime without unwind would use
// for the same network. If the network has no file besides an overwritten chainFile, LoadChain uses
// the copy in stateDir.
func TestChainFileRenamed(t *testing.T) {
	const ours = `{"cniVersion": "1.0.0", "name": "podnet", "type": "unwind", "chainFile": "/x"}`
	one := func(network, plugin string) string {
		return fmt.Sprintf(`{"cniVersion": "1.0.0", "name": %q, "plugins": [{"type": %q}]}`, network, plugin)
	}
	const made = `{"name": "podnet", "plugins": [{"type": "unwind", "chainFile": "DIR/10-podnet.conflist", "stateDir": "DIR/state"}, {"type": "b"}]}`
	const gone = "chainFile DIR/10-podnet.conflist: no such file or directory; "
	const none = gone + "the network's provider has not written it, or has removed it"
	for _, tt := range []struct {
		name  string
		files map[string]string
		want  string // the plugin and its file, or the error
	}{
		{"a file with a later name", map[string]string{"20-podnet.conflist": one("podnet", "a")}, "a of 20-podnet.conflist"},
		{"a file with a single plugin", map[string]string{"20-podnet.conf": `{"cniVersion": "1.0.0", "name": "podnet", "type": "a"}`},
			"a of 20-podnet.conf"},
		{"the first of three", map[string]string{"20.json": one("podnet", "a"), "21.conflist": one("podnet", "b"),
			"22.conf": one("podnet", "c")}, "a of 20.json"},
		{"files of unwind are skipped", map[string]string{"00-unwind.json": ours, "01-unwind.conflist": one("podnet", "unwind"),
			"20-podnet.conflist": one("podnet", "a")}, "a of 20-podnet.conflist"},
		{"files of other networks are skipped", map[string]string{"15-other.conflist": one("other", "b"),
			"20-podnet.conflist": one("podnet", "a")}, "a of 20-podnet.conflist"},
		{"files that a runtime does not read are skipped", map[string]string{"15-podnet.bak": one("podnet", "b"), "16.conflist.tmp": one("podnet", "b"),
			"17.conflist": `{"name": "podnet", "plug`, "20-podnet.conflist": one("podnet", "a")}, "a of 20-podnet.conflist"},
		{"made from unwind's file: another file of the network", map[string]string{"10-podnet.conflist": made, "20-podnet.conflist": one("podnet", "a")},
			"a of 20-podnet.conflist"},
		{"made from unwind's file: the copy in stateDir", map[string]string{"10-podnet.conflist": made, "state/provider-podnet.conflist": one("podnet", "a"),
			"20-other.conflist": one("other", "b")}, "a of provider-podnet.conflist"},
		{"made from unwind's file: no other file", map[string]string{"10-podnet.conflist": made}, `chainFile DIR/10-podnet.conflist: the file contains ` +
			`unwind instead of the provider's plugins, and neither another file of network "podnet" nor DIR/state/provider-podnet.conflist contains them`},
		{"no file", nil, none},
		{"only files of other networks", map[string]string{"00-unwind.json": ours, "20-other.conflist": one("other", "a"),
			"30-third.conflist": one("third", "a")}, gone + `run unwindctl install to switch from network "podnet" to "other" ` +
			`(DIR/20-other.conflist), or unwindctl off to bypass unwind`},
		{"a file without plugins", map[string]string{"20.conflist": `{"name": "podnet", "plugins": []}`},
			none + `; DIR/20.conflist: key "plugins" is missing or empty; list the plugins in it`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			for name, content := range tt.files {
				if err := errors.Join(os.MkdirAll(filepath.Join(dir, "state"), 0o700), os.WriteFile(filepath.Join(dir, name), []byte(strings.ReplaceAll(content, "DIR", dir)), 0o600)); err != nil {
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
				if made, is := strings.CutPrefix(chain.Warning, "chainFile "+conf.ChainFile+" contains unwind; running the plugins of "); is {
					file, found = strings.TrimSuffix(made, " instead"), true
				}
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

// TestReplaceUnwind: ReplaceUnwind replaces unwind in a list with the plugins of a chain. No plugin
// occurs twice, and all other keys are the chain's.
func TestReplaceUnwind(t *testing.T) {
	const chain = `{"cniVersion":"0.4.0","name":"n","disableGC":true,"plugins":[{"type":"a","mtu":1},{"type":"b"}]}`
	const single = `{"cniVersion": "0.4.0", "name": "n", "type": "a"}`
	for _, tt := range []struct{ name, list, chain, want string }{
		{"a plugin after unwind", `{"name": "n", "plugins": [{"type": "unwind", "chainFile": "/x"}, {"type": "c"}]}`, chain,
			`{"cniVersion":"0.4.0","disableGC":true,"name":"n","plugins":[{"type":"a","mtu":1},{"type":"b"},{"type":"c"}]}`},
		{"a plugin before unwind, and unwind twice", `{"name": "n", "plugins": [{"type": "c"}, {"type": "unwind"}, {"type": "c"}, {"type": "a"}, {"type": "unwind"}]}`, chain,
			`{"cniVersion":"0.4.0","disableGC":true,"name":"n","plugins":[{"type":"c"},{"type":"a","mtu":1},{"type":"b"}]}`},
		{"from unwindctl's .json file", `{"name": "n", "type": "unwind", "chainFile": "/x", "plugins": [{"type": "unwind", "chainFile": "/x"}, {"type": "c"}]}`,
			single, `{"cniVersion":"0.4.0","name":"n","plugins":[{"cniVersion":"0.4.0","name":"n","type":"a"},{"type":"c"}]}`},
		{"from a .json file without a list", `{"name": "n", "type": "unwind", "chainFile": "/x", "plugins": [{"type": "c"}]}`,
			single, `{"cniVersion":"0.4.0","name":"n","plugins":[{"cniVersion":"0.4.0","name":"n","type":"a"},{"type":"c"}]}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			list, err := ParseConflist([]byte(tt.list))
			chain, chainErr := ParseConflist([]byte(tt.chain))
			if err != nil || chainErr != nil || list.Unwind == nil {
				t.Fatal(err, chainErr, list)
			}
			got := list.ReplaceUnwind(chain)
			var compact bytes.Buffer
			if err := json.Compact(&compact, got.Data); err != nil || compact.String() != tt.want || got.Unwind != nil {
				t.Errorf("\ngot  %s, %v\nwant %s", compact.String(), err, tt.want)
			}
		})
	}
}
