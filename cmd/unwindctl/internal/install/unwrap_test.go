package install

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
		{"chainFile", `{"type": "unwind", "chainFile": "/x"}`, `error: the entry sets "chainFile" instead of "chain", so there is nothing to unwrap; to switch unwind off, remove the file`},
		{"chainFile and null", `{"type": "unwind", "chain": null, "chainFile": "/x"}`, `error: the entry sets "chainFile" instead of "chain", so there is nothing to unwrap; to switch unwind off, remove the file`},
		{"no chain", `{"type": "unwind"}`, `error: key "chain" is missing`},
		{"no object", `{"type": "unwind", "chain": []}`, `error: key "chain" is not an object`},
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

// FuzzWrap has, of all that wrap takes, such as the configurations of providers: a runtime sees unwind
// alone, with the capabilities of its delegates and the other keys of the list; the delegates get what
// libcni would give them, and unwrap returns the same bytes.
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

// FuzzUnwrap has what is returned of any list be an object.
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
