package install

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/google/go-cmp/cmp"

	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/nodetest"
)

// check fails the test at once if its error is not nil.
var check = nodetest.Check

// plain returns the configurations that libcni passes to the plugins of a list without unwind.
func plain(list *libcni.NetworkConfigList, err error) ([]map[string]any, error) {
	if err != nil {
		return nil, err
	}
	var all []map[string]any
	for _, p := range list.Plugins {
		given, err := libcni.InjectConf(p, map[string]any{"name": list.Name, "cniVersion": list.CNIVersion})
		if err != nil {
			return nil, err
		}
		object := map[string]any{}
		if err := json.Unmarshal(given.Bytes, &object); err != nil {
			return nil, err
		}
		delete(object, "prevResult")
		all = append(all, object)
	}
	return all, nil
}

// single returns the list that a runtime makes from the configuration of one plugin.
func single(x []byte) (*libcni.NetworkConfigList, error) {
	conf, err := libcni.NetworkPluginConfFromBytes(x)
	if err != nil {
		return nil, err
	}
	//lint:ignore SA1019 runtimes still read such files with this function
	return libcni.ConfListFromConf(conf)
}

// wrapped is a list that wrap has written, as a runtime and unwind read it.
type wrapped struct {
	list      *libcni.NetworkConfigList
	top       map[string]any
	conf      *netconf.Conf
	delegates []map[string]any // the configurations that unwind passes to the plugins
}

func readWrapped(t testing.TB, out []byte, list *libcni.NetworkConfigList, err error) wrapped {
	t.Helper()
	w := wrapped{list: list}
	if err == nil {
		err = json.Unmarshal(out, &w.top)
	}
	if err != nil {
		t.Fatalf("%v in\n%s", err, out)
	}
	if len(list.Plugins) != 1 || list.Plugins[0].Network.Type != netconf.Name {
		t.Fatalf("a runtime sees %d plugins, not unwind alone, in\n%s", len(list.Plugins), out)
	}
	given, err := libcni.InjectConf(list.Plugins[0], map[string]any{"name": list.Name, "cniVersion": list.CNIVersion})
	check(t, err)
	w.conf, err = netconf.ParseConf(given.Bytes)
	if err != nil || len(w.conf.Warnings) > 0 {
		t.Fatalf("unwind: %v, %v", err, w.conf.Warnings)
	}
	chain, err := w.conf.LoadChain()
	if err != nil {
		t.Fatalf("unwind: %v", err)
	}
	for i := range chain.Delegates {
		object := map[string]any{}
		check(t, json.Unmarshal(chain.Config(i, w.conf), &object))
		w.delegates = append(w.delegates, object)
	}
	if lost := chain.LostCapabilities(w.conf); len(lost) > 0 {
		t.Errorf("capabilities %v are not those of unwind's entry", lost)
	}
	return w
}

// wrapPath wraps a file as unwindctl wrap does.
func wrapPath(path string) ([]byte, error) {
	list, err := netconf.ReadConflist(path)
	if list == nil {
		return nil, err
	}
	return Inline(list, err)
}

// compareTop compares the top-level keys that wrap must not change.
func compareTop(t *testing.T, x []byte, got map[string]any) {
	t.Helper()
	var want map[string]any
	check(t, json.Unmarshal(x, &want))
	for _, ours := range []string{"cniVersion", "cniVersions", "loadOnlyInlinedPlugins", "plugins"} {
		delete(want, ours)
		delete(got, ours)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("keys beside the plugins (-original +wrapped):\n%s", diff)
	}
}

// TestWrapDirectory: wrap refuses a list if libcni would add plugins from a directory. It accepts
// the list if loadOnlyInlinedPlugins is true.
func TestWrapDirectory(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, x, want string }{
		{"plain", `"plugins": [{"type": "a"}]`, "would also run the plugins in "},
		{"asked for", `"loadOnlyInlinedPlugins": false, "plugins": [{"type": "a"}]`, "would also run the plugins in "},
		{"no plugins of its own", `"disableCheck": true`, `key "plugins" is missing or empty`},
		{"not asked for", `"loadOnlyInlinedPlugins": true, "plugins": [{"type": "a"}]`, ""},
		{"not asked for, as a string", `"loadOnlyInlinedPlugins": "TRUE", "plugins": [{"type": "a"}]`, ""},
		{"beside unwind", `"plugins": [{"type": "unwind", "chain": {"plugins": [{"type": "a"}]}}]`, "would also run the plugins in "},
		{"beside unwind alone", `"loadOnlyInlinedPlugins": true, "plugins": [{"type": "unwind", "chain": {"plugins": [{"type": "a"}]}}]`, ""},
	} {
		dir := t.TempDir()
		path := filepath.Join(dir, "10-net.conflist")
		check(t, errors.Join(os.WriteFile(path, []byte(`{"cniVersion": "1.0.0", "name": "net", `+tt.x+`}`), 0o600), os.Mkdir(filepath.Join(dir, "net"), 0o700),
			os.WriteFile(filepath.Join(dir, "net", "x.json"), nil, 0o600)))
		if _, err := wrapPath(path); err != nil && tt.want != `key "plugins" is missing or empty` {
			t.Errorf("%s: an empty directory: %v", tt.name, err)
		}
		check(t, os.WriteFile(filepath.Join(dir, "net", "10.conf"), []byte(`{"type": "c"}`), 0o600))
		if _, err := wrapPath(path); tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s: %v, want %s", tt.name, err, tt.want)
		}
	}
}

// wrapText wraps a text as unwindctl wrap wraps its stdin.
func wrapText(x string) ([]byte, error) {
	list, err := netconf.ParseConflist([]byte(x))
	if list == nil {
		return nil, err
	}
	return Inline(list, err)
}

// TestWrapRefuses: wrap refuses a list that unwind would refuse at ADD, or that a runtime and
// unwind would read differently.
func TestWrapRefuses(t *testing.T) {
	t.Parallel()
	const a = `"plugins": [{"type": "a"}]`
	for _, tt := range []struct{ name, x, want string }{
		{"nothing", ``, "not valid JSON"},
		{"cut off", `{"cniVersion": "1.0.0", "name": "net", "plugins": [{"type"`, "not valid JSON"},
		{"more behind it", `{"cniVersion": "1.0.0", "name": "net", ` + a + `} {}`, "not valid JSON"},
		{"a byte order mark", "\ufeff" + `{"cniVersion": "1.0.0", "name": "net", ` + a + `}`, "not valid JSON"},
		{"no object", `[]`, "a list, not an object"},
		{"null", `null`, `key "name" is missing`},
		{"huge", `{"cniVersion": "1.0.0", "name": "net", ` + a + `}` + strings.Repeat(" ", 4<<20), "more than 4194304 bytes"},
		{"huge when wrapped", `{"cniVersion": "1.0.0", "name": "net", ` + a + `}` + strings.Repeat(" ", 4<<20-100), "the wrapped configuration: too large: more than 4194304 bytes"},
		{"huge as a runtime writes it", `{"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "a", "x": "` + strings.Repeat("<", 700<<10) + `"}]}`, "bytes; at most 4194304 are allowed"},
		{"too deep when wrapped", `{"cniVersion": "1.0.0", "name": "net", "x": ` + strings.Repeat("[", 9998) + strings.Repeat("]", 9998) + `, ` + a + `}`, "the wrapped configuration: not valid JSON"},
		{"nerdctl's", `{"cniVersion": "1.0.0", "name": "net", "nerdctlID": "0", "nerdctlLabels": {}, ` + a + `}`, "this network belongs to nerdctl"},
		{"podman's", `{"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "bridge", "bridge": "cni-podman1"}]}`, "this network belongs to podman"},
		{"no name", `{"cniVersion": "1.0.0", ` + a + `}`, `key "name" is missing`},
		{"no name in it", `{"cniVersion": "1.0.0", "name": null, ` + a + `}`, `key "name" is missing`},
		{"a name that is a path", `{"cniVersion": "1.0.0", "name": "../net", ` + a + `}`, `key "name": "../net" is not a valid network name`},
		{"a name that is none", `{"cniVersion": "1.0.0", "name": 1, ` + a + `}`, `key "name" is a number, not a string`},
		{"another case", `{"cniVersion": "1.0.0", "name": "net", "Plugins": [{"type": "b"}], ` + a + `}`, `key "Plugins": spell it "plugins"`},
		{"another letter", `{"cniVersion": "1.0.0", "name": "net", "di\u017fableCheck": true, ` + a + `}`, `spell it "disableCheck"`},
		{"no version", `{"name": "net", ` + a + `}`, `key "cniVersion" is missing; set it to a CNI version`},
		{"an empty version", `{"cniVersion": "", "cniVersions": [], "name": "net", ` + a + `}`, `key "cniVersion" is missing; set it to a CNI version`},
		{"an unknown version", `{"cniVersion": "0.5.0", "name": "net", ` + a + `}`, `cniVersion "0.5.0" is not supported`},
		{"no plugins", `{"cniVersion": "1.0.0", "name": "net"}`, `key "plugins" is missing or empty; list the plugins in it`},
		{"none in the list", `{"cniVersion": "1.0.0", "name": "net", "plugins": []}`, `key "plugins" is missing or empty; list the plugins in it`},
		{"no list", `{"cniVersion": "1.0.0", "name": "net", "plugins": {}}`, `key "plugins" is an object, not a list`},
		{"no type", `{"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "a"}, {}]}`, `plugins[1]: key "type" is missing`},
		{"a type that is a path", `{"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "../a"}]}`, `"../a" is not a valid plugin name`},
		{"unwind as the IPAM", `{"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "a", "ipam": {"type": "unwind"}}]}`, `key "ipam.type": unwind cannot run inside itself`},
		{"a number for libcni", `{"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "a", "x": 1e999}]}`, `1e999`},
		{"a flag for libcni", `{"cniVersion": "1.0.0", "name": "net", "disableGC": 1, ` + a + `}`, `disableGC`},
		{"unwind and another", `{"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "unwind", "chain": {}}, {"type": "a"}]}`, `key "plugins" is `},
		{"wrapped, a wrong key", `{"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "unwind", "stateDir": "x", "chain": {` + a + `}}]}`, `key "stateDir": "x" is not an absolute path`},
		{"wrapped, an unknown key", `{"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "unwind", "statedir": "/x", "chain": {` + a + `}}]}`, `unknown key "statedir"`},
		{"wrapped, a wrong chain", `{"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "unwind", "chain": {"plugins": []}}]}`, `key "plugins" is missing or empty`},
		{"wrapped, no chain", `{"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "unwind"}]}`, `neither "chain" nor "chainFile" is set`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			out, err := wrapText(tt.x)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %s\n%.2000s", err, tt.want, out)
			}
		})
	}
}

// TestUnwrapEdited: unwrap returns the chain of a list that was edited by hand, or an error if the
// list has no chain.
func TestUnwrapEdited(t *testing.T) {
	for _, tt := range []struct{ name, entry, want string }{
		{"as wrap lays it out", `{"type": "unwind", "chain":` + "\n{ }\n" + `}`, "\n{ }\n"},
		{"spaces", `{ "type": "unwind", "chain" : { } }`, "{ } "},
		{"keys after it", `{"type": "unwind", "chain": {"a": 1} , "stateDir": "/x"}`, `{"a": 1} `},
		{"formatted by jq", `{"type": "unwind", "chain": {
      }
    }`, "{\n      }\n"},
		{"first", `{"chain":{},"type":"unwind"}`, `{}`},
		{"in other objects", `{"type": "unwind", "args": {"chain": 1}, "chain":{}, "x": {"chain": 2}}`, `{}`},
		{"in strings", `{"type": "unwind", "x": "\"chain\": {", "chain":{":": "}"}}`, `{":": "}"}`},
		{"an escape", `{"type": "unwind", "\u0063hain":{}}`, `{}`},
		{"the last of two", `{"type": "unwind", "chain":{"a":1}, "chain":{"a":2}}`, `{"a":2}`},
		{"a wrong key", `{"type": "unwind", "stateDir": "x", "chain":{}}`, `{}`},
		{"chainFile", `{"type": "unwind", "chainFile": "/x"}`, `error: the entry sets "chainFile" instead of "chain", so there is nothing to unwrap; to switch unwind off, run unwindctl off`},
		{"chainFile and null", `{"type": "unwind", "chain": null, "chainFile": "/x"}`, `error: the entry sets "chainFile" instead of "chain", so there is nothing to unwrap; to switch unwind off, run unwindctl off`},
		{"no chain", `{"type": "unwind"}`, `error: key "chain" is missing`},
		{"no object", `{"type": "unwind", "chain": []}`, `error: key "chain" must be an object`},
		{"an equal text after it", `{"type": "unwind", "chain": {} , "x": [1, {}], "y": "{}"}`, `{}`},
		{"a neighbour", `{"type": "unwind", "chain": {}}, {"type": "a"}`, "error: " + errNotAlone.Error()},
	} {
		t.Run(tt.name, func(t *testing.T) {
			list, _ := netconf.ParseConflist([]byte(`{"cniVersion": "1.0.0", "name": "net", "plugins": [` + tt.entry + `]}`))
			if list == nil {
				t.Fatal("not read")
			}
			out, err := Restore(list, nil)
			got := string(out)
			if err != nil {
				got = "error: " + err.Error()
			}
			if got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

// FuzzWrap: if wrap accepts a list, a runtime sees only unwind, with the capabilities of the
// plugins and the other keys of the list. The plugins get the same configurations as from libcni,
// and unwrap returns the original bytes. The conflists of providers are among the seeds.
func FuzzWrap(f *testing.F) {
	files, err := filepath.Glob("../../../../testdata/conflists/*")
	if err != nil || len(files) == 0 {
		f.Fatalf("%v: %v", files, err)
	}
	for _, file := range files {
		x, err := os.ReadFile(file)
		check(f, err)
		f.Add(x)
		_, err = wrapText(string(x))
		if refused := filepath.Base(file) == "nerdctl.conflist"; refused != (err != nil) {
			f.Errorf("%s: %v", file, err)
		}
	}
	f.Add([]byte(`{"name":"a","cniVersion":"1.0.0"}`))
	f.Add([]byte(`{"name":"a","cniVersion":"1.0.0","type":"x","plugins":[{"type":"b"}]}`))
	f.Add([]byte("{\"name\":\"a\",\"cniVersions\":[\"0.4.0\",\"9.0.0\"],\"plugins\":[{\"type\":\"b\",\"type\":\"c\",\"x\":\"\xff\"}],\"\xff\":[]}"))
	f.Add([]byte(`{"name":"a","name":"b","cniVersion":"1.0.0","plugins":[{"type":"b"},{"type":"d"}],"x":1,"plugins":[{"type":"c"}],"x":2}`))
	f.Fuzz(func(t *testing.T, x []byte) {
		out, err := wrapText(string(x))
		if out == nil || err != nil {
			return
		}
		list, err := netconf.ParseConflist(out)
		if err != nil || list.Unwind == nil || len(list.Types) != 1 {
			t.Fatalf("%v: %s", err, out)
		}
		back, err := Restore(list, nil)
		if err != nil || !bytes.Equal(back, x) {
			t.Fatalf("unwrapped: %v\n%q, want\n%q, from\n%s", err, back, x, out)
		}
		readable, err := libcni.NetworkConfFromBytes(out)
		got := readWrapped(t, out, readable, err)
		if readable.CNIVersion != "1.1.0" {
			t.Errorf("a runtime sees version %q", readable.CNIVersion)
		}
		read := libcni.NetworkConfFromBytes
		if isSingle(x) {
			read = single
		} else {
			compareTop(t, x, got.top)
		}
		original, err := read(x)
		delegates, err := plain(original, err)
		if err != nil {
			return // libcni would not run it without unwind
		}
		if diff := cmp.Diff(delegates, got.delegates); diff != "" {
			t.Errorf("what the delegates get (-plain +unwind):\n%s", diff)
		}
		if readable.Name != original.Name || readable.DisableCheck != original.DisableCheck || readable.DisableGC != original.DisableGC {
			t.Errorf("a runtime sees %q, %v, %v", readable.Name, readable.DisableCheck, readable.DisableGC)
		}
	})
}

// FuzzUnwrap: everything that unwrap returns is a JSON object.
func FuzzUnwrap(f *testing.F) {
	f.Add([]byte(`{"plugins":[{"type":"unwind","chain":{"name":"x","plugins":[{"type":"b"}]}}]}`))
	f.Add([]byte(`{"type":"unwind","chain": {"plugins":[1 , 2],"x":{}} ,"y":1}`))
	f.Add([]byte(`{"plugins":[],"Plugins":[{"type":"unwind","chain":{}}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		list, _ := netconf.ParseConflist(text)
		if list == nil {
			return
		}
		out, err := Restore(list, nil)
		var object map[string]json.RawMessage
		if out != nil && (err != nil || json.Unmarshal(out, &object) != nil) {
			t.Errorf("%v: %q", err, out)
		}
	})
}
