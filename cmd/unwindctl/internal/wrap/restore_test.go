package wrap

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/google/go-cmp/cmp"

	"cni-unwind/plugin/netconf"
)

// TestUnwrapEdited has the chain returned of a list that was edited by hand, and an error where
// there is none.
func TestUnwrapEdited(t *testing.T) {
	for _, tt := range []struct{ name, entry, want string }{
		{"as wrap lays it out", `{"type": "unwind", "chain":` + "\n{ }\n" + `}`, "\n{ }\n"},
		{"spaces", `{ "type": "unwind", "chain" : { } }`, " { } "},
		{"keys after it", `{"type": "unwind", "chain": {"a": 1} , "stateDir": "/x"}`, ` {"a": 1} `},
		{"first", `{"chain":{},"type":"unwind"}`, `{}`},
		{"in other objects", `{"type": "unwind", "args": {"chain": 1}, "chain":{}, "x": {"chain": 2}}`, `{}`},
		{"in strings", `{"type": "unwind", "x": "\"chain\": {", "chain":{":": "}"}}`, `{":": "}"}`},
		{"an escape", `{"type": "unwind", "\u0063hain":{}}`, `{}`},
		{"the last of two", `{"type": "unwind", "chain":{"a":1}, "chain":{"a":2}}`, `{"a":2}`},
		{"a wrong key", `{"type": "unwind", "stateDir": "x", "chain":{}}`, `{}`},
		{"nothing folded", `{"type": "unwind", "folded": 0, "chain":{"plugins": [1]}}`, `{"plugins": [1]}`},
		{"one folded", `{"type": "unwind", "folded": 1, "chain":{"plugins": [1 , 2 ]}}`, `{"plugins": [1 ]}`},
		{"all folded", `{"type": "unwind", "folded": 2, "chain":{"plugins": [1, 2], "name": "x"}}`, `{"name": "x"}`},
		{"all folded, moved to the end", `{"type": "unwind", "folded": 1, "chain":{"name": "x", "plugins": [1]}}`, `{"name": "x"}`},
		{"all folded, nothing else", `{"type": "unwind", "folded": 1, "chain":{"plugins": [1]}}`, `{}`},
		{"fewer than were folded", `{"type": "unwind", "folded": 2, "chain":{"plugins": [1]}}`, `error: key "folded": the chain has 1 plugins, fewer than 2`},
		{"folded is no number", `{"type": "unwind", "folded": "1", "chain":{"plugins": [1]}}`, `error: key "folded" is not a number of plugins`},
		{"less than nothing folded", `{"type": "unwind", "folded": -1, "chain":{"plugins": [1]}}`, `error: key "folded" is not a number of plugins`},
		{"chainFile", `{"type": "unwind", "chainFile": "/x"}`, `error: the entry sets "chainFile" instead of "chain", so there is nothing to unwrap; to switch unwind off, remove the file`},
		{"chainFile and null", `{"type": "unwind", "chain": null, "chainFile": "/x"}`, `error: the entry sets "chainFile" instead of "chain", so there is nothing to unwrap; to switch unwind off, remove the file`},
		{"no chain", `{"type": "unwind"}`, `error: key "chain" is missing`},
		{"no object", `{"type": "unwind", "chain": []}`, `error: key "chain" is not an object`},
		{"a neighbour", `{"type": "unwind", "chain": {}}, {"type": "a"}`, "error: " + errNotAlone.Error()},
	} {
		t.Run(tt.name, func(t *testing.T) {
			list, _ := netconf.ParseConflist([]byte(`{"cniVersion": "1.0.0", "name": "net", "plugins": [` + tt.entry + `]}`))
			if list == nil {
				t.Fatal("not read")
			}
			out, err := Restore(Source{Conflist: list})
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

func inlineText(x []byte, directory []json.RawMessage) ([]byte, error) {
	o, err := outline(x)
	if err != nil {
		return nil, err
	}
	return inline(o, directory)
}

// FuzzWrap has, of all that wrap takes: a runtime sees unwind alone, the delegates get what libcni
// would give them, and unwrap returns the same bytes. folded is the text of a plugin in the
// directory of the network's name, or empty.
func FuzzWrap(f *testing.F) {
	files, err := filepath.Glob("../../../../testdata/conflists/*")
	if err != nil || len(files) == 0 {
		f.Fatalf("%v: %v", files, err)
	}
	for _, file := range files {
		x, err := os.ReadFile(file)
		check(f, err)
		f.Add(x, "")
		f.Add(x, ` {"type": "tuning", "capabilities": {"mac": true}} `)
	}
	f.Add([]byte(`{"name":"a","cniVersion":"1.0.0"}`), `{"type":"b"}`)
	f.Add([]byte(`{"name":"a","cniVersion":"1.0.0","type":"x","plugins":[{"type":"b"}]}`), "")
	f.Add([]byte("{\"name\":\"a\",\"cniVersions\":[\"0.4.0\",\"9.0.0\"],\"plugins\":[{\"type\":\"b\",\"type\":\"c\",\"x\":\"\xff\"}],\"\xff\":[]}"), `{"type":"b"}`)
	f.Add([]byte(`{"name":"a","cniVersion":"1.0.0","plugins":[{"type":"b"}]}, "x": {}`), `{"type":"b"}, {"type":"c"}`)
	f.Fuzz(func(t *testing.T, x []byte, folded string) {
		list, err := netconf.ParseConflist(x)
		if err != nil {
			if list == nil {
				if _, err := inlineText(x, nil); err == nil {
					t.Errorf("wrap takes what cannot be read: %v", err)
				}
			}
			return
		}
		var directory []json.RawMessage
		if folded != "" && !isSingle(x) {
			directory = []json.RawMessage{json.RawMessage(folded)}
		}
		out, err := inlineText(x, directory)
		if err != nil {
			return
		}
		back, err := restore(out)
		if err != nil || !bytes.Equal(back, x) {
			t.Fatalf("unwrapped: %v\n%q, want\n%q, from\n%s", err, back, x, out)
		}
		if l, err := netconf.ParseConflist(out); err != nil || l.Unwind == nil || len(l.Types) != 1 {
			t.Fatalf("%v: %s", err, out)
		}
		readable, err := libcni.NetworkConfFromBytes(out)
		got := readWrapped(t, out, readable, err)
		var original *libcni.NetworkConfigList
		if isSingle(x) {
			original, err = single(x)
		} else if original, err = libcni.NetworkConfFromBytes(x); err == nil && directory != nil {
			var p *libcni.PluginConfig
			p, err = libcni.NetworkPluginConfFromBytes(directory[0])
			original.Plugins = append(original.Plugins, p)
		}
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

// FuzzUnwrap has what is returned of any list be an object.
func FuzzUnwrap(f *testing.F) {
	f.Add([]byte(`{"plugins":[{"type":"unwind","folded":1,"chain":{"name":"x","plugins":[{"type":"b"}]}}]}`))
	f.Add([]byte(`{"type":"unwind","folded":1,"chain": {"plugins":[1 , 2],"x":{}} ,"y":1}`))
	f.Add([]byte(`{"plugins":[],"Plugins":[{"type":"unwind","chain":{}}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		list, _ := netconf.ParseConflist(text)
		if list == nil {
			return
		}
		out, err := Restore(Source{Conflist: list})
		var object map[string]json.RawMessage
		if out != nil && (err != nil || json.Unmarshal(out, &object) != nil) {
			t.Errorf("%v: %q", err, out)
		}
	})
}
