package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"

	"cni-unwind/plugin"
)

// TestUnwrapEdited has the chain returned of a list that was edited by hand, and an error where there is none.
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
		{"chainFile", `{"type": "unwind", "chainFile": "/x"}`, `error: it has "chainFile" and no "chain", so there is nothing to unwrap; remove the file to switch unwind off`},
		{"chainFile and null", `{"type": "unwind", "chain": null, "chainFile": "/x"}`, `error: it has "chainFile" and no "chain", so there is nothing to unwrap; remove the file to switch unwind off`},
		{"no chain", `{"type": "unwind"}`, `error: key "chain" is missing`},
		{"no object", `{"type": "unwind", "chain": []}`, `error: key "chain" is not an object`},
		{"a neighbour", `{"type": "unwind", "chain": {}}, {"type": "a"}`, "error: " + errNotAlone.Error()},
	} {
		t.Run(tt.name, func(t *testing.T) {
			list, _ := plugin.ReadConflistFrom(strings.NewReader(`{"cniVersion": "1.0.0", "name": "net", "plugins": [` + tt.entry + `]}`))
			if list == nil {
				t.Fatal("not read")
			}
			out, err := unwrapFile(source{Conflist: list})
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

// FuzzWrap has, of all that wrap takes: a runtime sees unwind alone, the delegates get what libcni would give them, and unwrap
// returns the same bytes. folded is the text of a plugin in the folder of the network's name, or empty.
func FuzzWrap(f *testing.F) {
	files, err := filepath.Glob("../../testdata/conflists/*")
	if err != nil || len(files) == 0 {
		f.Fatalf("%v: %v", files, err)
	}
	for _, file := range files {
		x, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(x, "")
		f.Add(x, ` {"type": "tuning", "capabilities": {"mac": true}} `)
	}
	f.Add([]byte(`{"name":"a","cniVersion":"1.0.0"}`), `{"type":"b"}`)
	f.Add([]byte(`{"name":"a","cniVersion":"1.0.0","type":"x","plugins":[{"type":"b"}]}`), "")
	f.Add([]byte("{\"name\":\"a\",\"cniVersions\":[\"0.4.0\",\"9.0.0\"],\"plugins\":[{\"type\":\"b\",\"type\":\"c\",\"x\":\"\xff\"}],\"\xff\":[]}"), `{"type":"b"}`)
	f.Add([]byte(`{"name":"a","cniVersion":"1.0.0","plugins":[{"type":"b"}]}, "x": {}`), `{"type":"b"}, {"type":"c"}`)
	f.Fuzz(func(t *testing.T, x []byte, folded string) {
		list, err := plugin.ReadConflistFrom(bytes.NewReader(x))
		if err != nil {
			if list == nil {
				if _, err := wrap(x, nil); err == nil {
					t.Errorf("wrap takes what cannot be read: %v", err)
				}
			}
			return
		}
		var folder []json.RawMessage
		if folded != "" && !isSingle(x) {
			folder = []json.RawMessage{json.RawMessage(folded)}
		}
		out, err := wrap(x, folder)
		if err != nil {
			return
		}
		back, err := unwrap(out)
		if err != nil || !bytes.Equal(back, x) {
			t.Fatalf("unwrapped: %v\n%q, want\n%q, from\n%s", err, back, x, out)
		}
		if l, err := plugin.ReadConflistFrom(bytes.NewReader(out)); err != nil || l.Unwind == nil || len(l.Types) != 1 {
			t.Fatalf("%v: %s", err, out)
		}
		readable, err := libcni.NetworkConfFromBytes(out)
		got := readWrapped(t, out, readable, err)
		var original *libcni.NetworkConfigList
		if isSingle(x) {
			original, err = single(x)
		} else if original, err = libcni.NetworkConfFromBytes(x); err == nil && folder != nil {
			var p *libcni.PluginConfig
			p, err = libcni.NetworkPluginConfFromBytes(folder[0])
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
		list, _ := plugin.ReadConflistFrom(bytes.NewReader(text))
		if list == nil {
			return
		}
		out, err := unwrapFile(source{Conflist: list})
		var object map[string]json.RawMessage
		if out != nil && (err != nil || json.Unmarshal(out, &object) != nil) {
			t.Errorf("%v: %q", err, out)
		}
	})
}

// TestWrappedRuns wraps the network of nerdctl and runs an ADD and a DEL through it, as a runtime does: the delegates are real.
func TestWrappedRuns(t *testing.T) {
	n := newNode(t)
	x, err := os.ReadFile("../../testdata/conflists/nerdctl.conflist")
	if err != nil {
		t.Fatal(err)
	}
	x = bytes.ReplaceAll(x, []byte(`"type": "host-local"`), []byte(`"type": "host-local", "dataDir": "`+n.dir+`/ipam"`))
	path := filepath.Join(n.dir, "nerdctl-bridge.conflist")
	if err := os.WriteFile(path, x, 0o600); err != nil {
		t.Fatal(err)
	}
	n.must(home.command(n, filepath.Join(n.bin, "unwindctl"), "wrap", "--in-place", path))
	wrapped, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	wrapped = bytes.Replace(wrapped, []byte(`"type": "unwind",`), []byte(`"type": "unwind", "stateDir": "`+n.state+`",`), 1)
	if err := os.WriteFile(path, wrapped, 0o600); err != nil {
		t.Fatal(err)
	}
	list, err := libcni.NetworkConfFromFile(path)
	if err != nil {
		t.Fatal(err)
	}
	n.removeLink("nerdctl0")
	n.netns("web")
	runtime := libcni.NewCNIConfigWithCacheDir([]string{n.bin, filepath.Join(n.tools, "cni")}, filepath.Join(n.dir, "cache"), nil)
	container := &libcni.RuntimeConf{ContainerID: "web", NetNS: n.pin("web"), IfName: "eth0",
		CapabilityArgs: map[string]any{"portMappings": []map[string]any{{"hostPort": 18081, "containerPort": 80, "protocol": "tcp"}}}}
	result, err := runtime.AddNetworkList(context.Background(), list, container)
	if err != nil {
		t.Fatal(err)
	}
	if r, err := types100.GetResult(result); err != nil || len(r.IPs) != 1 || r.IPs[0].Address.String() != "10.4.0.2/24" {
		t.Errorf("%v, %v", r, err)
	}
	rules := func() string {
		return n.must(home.command(n, "iptables", "-t", "nat", "-S")) + n.must(home.command(n, "nft", "list", "ruleset"))
	}
	if !strings.Contains(rules(), "18081") {
		t.Errorf("the port is not mapped:\n%s", rules())
	}
	if err := runtime.CheckNetworkList(context.Background(), list, container); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	if err := runtime.DelNetworkList(context.Background(), list, container); err != nil {
		t.Fatal(err)
	}
	if ids := n.ids(); len(ids) != 0 || strings.Contains(rules(), "18081") {
		t.Errorf("after the DEL: %v\n%s", ids, rules())
	}
	n.must(home.command(n, filepath.Join(n.bin, "unwindctl"), "unwrap", "--in-place", path))
	if back, err := os.ReadFile(path); err != nil || !bytes.Equal(back, x) {
		t.Errorf("unwrapped: %v\n%s", err, back)
	}
}
