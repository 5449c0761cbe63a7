package netconf

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/version"
	"github.com/google/go-cmp/cmp"
)

// load returns the chain of a configuration with the given keys.
func load(t *testing.T, keys string) (*Chain, *Conf) {
	t.Helper()
	c, err := parse(keys)
	if err != nil {
		t.Fatal(err)
	}
	chain, err := c.LoadChain()
	if err != nil {
		t.Fatal(err)
	}
	return chain, c
}

func TestLoadChain(t *testing.T) {
	for _, tt := range []struct{ name, keys, want string }{
		{"in the configuration", `"chain": {"plugins": [{"type": "a"}, {"type": "b", "ipam": {"type": "i"}}]}`, "1.0.0: a b/i"},
		{"one plugin", `"chain": {"type": "a", "cniVersion": "0.4.0"}`, "0.4.0: a"},
		{"the highest of cniVersions", `"chain": {"cniVersion": "0.3.1", "cniVersions": ["0.4.0"], "plugins": [{"type": "a"}]}`, "0.4.0: a"},
		{"no CHECK", `"chain": {"disableCheck": "TRUE", "plugins": [{"type": "a"}]}`, "1.0.0: a, no CHECK"},

		{"a file without a version", `"chainFile": "DIR/list"`, ": a b/i"},
		{"a file with one plugin", `"chainFile": "DIR/plugin"`, "0.3.1: a"},
	} {
		chain, _ := load(t, strings.ReplaceAll(tt.keys, "DIR", chainFiles(t)))
		got := chain.CNIVersion + ":"
		for _, d := range chain.Delegates {
			got += " " + strings.TrimSuffix(d.Type+"/"+d.IPAM, "/")
		}
		if chain.DisableCheck {
			got += ", no CHECK"
		}
		if got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
}

func TestLoadChainErrors(t *testing.T) {
	for _, tt := range []struct{ name, keys, want string }{
		{"both", `"chain": {"plugins": [{"type": "a"}]}, "chainFile": "/s3cret"`, `"chain" and "chainFile" are both set; keep one`},
		{"neither", ``, `neither "chain" nor "chainFile" is set; list the plugins in "chain": {"plugins": [...]}`},

		{"a string", `"chain": "{\"password\": \"s3cret\"}"`, `key "chain": a string, not an object`},
		{"empty", `"chain": {}`, `key "chain": key "plugins" is missing or empty; list the plugins in it`},
		{"plugins is an object", `"chain": {"plugins": {"a": "s3cret"}}`, `key "chain": key "plugins" is an object, not a list`},
		{"an invalid flag", `"chain": {"disableCheck": "yes", "plugins": []}`,
			`key "chain": key "disableCheck" is "yes", not true or false`},
		{"another name", `"chain": {"name": "other", "plugins": [{"type": "a"}]}`, `key "chain": key "name" is "other", but the ` +
			`network is "podnet"; they must be the same, because plugins keep addresses and rules under that name`},
		{"an invalid version", `"chain": {"cniVersion": "one", "plugins": [{"type": "a"}]}`,
			`key "chain": cniVersion "one": failed to convert major version part "one": strconv.Atoi: parsing "one": invalid syntax`},
		{"an unsupported version", `"chain": {"cniVersion": "9.0.0", "plugins": [{"type": "a"}]}`,
			`key "chain": cniVersion "9.0.0" is not supported (supported: 0.1.0, 0.2.0, 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0)`},

		{"a plugin is null", `"chain": {"plugins": [{"type": "a"}, null]}`, `key "chain": plugins[1]: key "type" is missing`},
		{"type is a path", `"chain": {"plugins": [{"type": "../bin/sh"}]}`, `key "chain": plugins[0]: key "type": "../bin/sh" is not a valid plugin name`},
		{"type is ..", `"chain": {"plugins": [{"type": ".."}]}`, `key "chain": plugins[0]: key "type": ".." is not a valid plugin name`},
		{"type with a NUL byte", `"chain": {"plugins": [{"type": "a\u0000b"}]}`, `key "chain": plugins[0]: key "type": "a\x00b" is not a valid plugin name`},
		{"ipam.type is a path", `"chain": {"plugins": [{"type": "a", "ipam": {"type": "/bin/sh"}}]}`,
			`key "chain": plugins[0]: key "ipam.type": "/bin/sh" is not a valid plugin name`},
		{"a capability that is a string", `"chain": {"plugins": [{"type": "a", "capabilities": {"ips": "s3cret"}}]}`,
			`key "chain": plugins[0]: key "capabilities" is a string, not true or false`},
		{"unwind in unwind", `"chain": {"plugins": [{"type": "a"}, {"type": "unwind", "chain": {}}]}`,
			`key "chain": plugins[1]: key "type": unwind cannot run inside itself; list the plugins of its chain here`},

		{"no file", `"chainFile": "DIR/none"`, `chainFile DIR/none: no such file or directory; the network's provider has not ` +
			`written it, or has removed it`},
	} {
		dir := chainFiles(t)
		c, err := parse(strings.ReplaceAll(tt.keys, "DIR", dir))
		if err != nil {
			t.Fatal(tt.name, err)
		}
		_, err = c.LoadChain()
		if got := strings.ReplaceAll(fmt.Sprint(err), dir, "DIR"); got != tt.want {
			t.Errorf("%s:\ngot  %s\nwant %s", tt.name, got, tt.want)
		}
	}
}

// chainFiles creates a directory with two files that are valid as chainFile.
func chainFiles(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for name, content := range map[string]string{
		"list":   `{"name": "podnet", "plugins": [{"type": "a"}, {"type": "b", "ipam": {"type": "i"}}]}`,
		"plugin": `{"cniVersion": "0.3.1", "name": "podnet", "type": "a"}`,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// TestHighest compares highest with libcni. If libcni chooses a version that no CNI release has,
// highest returns an error.
func TestHighest(t *testing.T) {
	for _, tt := range []struct {
		one    string
		listed []string
	}{
		{"1.0.0", nil}, {"", nil}, {"0.3.1", []string{"0.4.0", "1.0.0"}}, {"1.1.0", []string{"0.4.0"}},
		{"", []string{"0.3.1", "1.0.0", "0.4.0"}}, {"1.0.0", []string{"1.1.0", "1.2.0", "9.0.0"}},
		{"9.0.0", []string{"0.4.0", "1.0.0"}}, {"1.0.0", []string{"9.0.0"}}, {"", []string{"9.0.0"}}, {"0.4.0", []string{"1"}},
	} {
		conf := map[string]any{"name": "podnet", "plugins": []any{map[string]string{"type": "a"}}}
		if tt.one != "" {
			conf["cniVersion"] = tt.one
		}
		if tt.listed != nil {
			conf["cniVersions"] = tt.listed
		}
		list, err := libcni.NetworkConfFromBytes(Marshal(conf))
		if err != nil {
			t.Fatal(tt, err)
		}
		got, err := highest(tt.one, tt.listed, "")
		// No CNI release has the version "1", so every plugin would reject it.
		if err != nil && list.CNIVersion != "1" || err == nil && got != list.CNIVersion {
			t.Errorf("%+v: %q, %v; libcni chooses %q", tt, got, err, list.CNIVersion)
		}
	}
	if got, err := highest("", nil, "0.4.0"); got != "0.4.0" || err != nil {
		t.Errorf("without any version: %q, %v, want the default", got, err)
	}
}

// recorder is an invoke.Exec that runs no plugin. It records the stdin that each plugin would get.
type recorder struct {
	version.PluginDecoder
	stdin []json.RawMessage
}

func (r *recorder) ExecPlugin(_ context.Context, _ string, stdin []byte, _ []string) ([]byte, error) {
	r.stdin = append(r.stdin, stdin)
	return []byte(`{"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.7/24"}]}`), nil
}

func (r *recorder) FindInPath(plugin string, _ []string) (string, error) { return plugin, nil }

// TestConfigAsLibcni runs a chain with libcni, and compares the stdin of each plugin with the stdin
// that unwind gives it.
func TestConfigAsLibcni(t *testing.T) {
	chain := `{"cniVersion": "1.0.0", "cniVersions": ["0.4.0"], "name": "podnet", "plugins": [
		{"type": "a", "name": "not this", "cniVersion": "0.3.1", "nested": {"a": [1, null, "<&>"]}},
		{"type": "b", "capabilities": {"portMappings": true, "ips": false, "mac": true, "none": true}},
		{"type": "c", "capabilities": {"ips": true}, "runtimeConfig": {"mac": "kept"}},
		{"type": "d", "runtimeConfig": {"mac": "kept"}, "args": {"cni": {"x": "y"}}, "ipam": {"type": "i", "ranges": []}}]}`
	capabilities := `{"portMappings": [{"hostPort": 80}], "ips": ["10.0.0.7"], "mac": "02:00:00:00:00:01", "other": true}`

	list, err := libcni.NetworkConfFromBytes([]byte(chain))
	if err != nil {
		t.Fatal(err)
	}
	rt := libcni.RuntimeConf{ContainerID: "c", NetNS: "/n", IfName: "eth0"}
	if err := json.Unmarshal([]byte(capabilities), &rt.CapabilityArgs); err != nil {
		t.Fatal(err)
	}
	plugins := &recorder{}
	result, err := libcni.NewCNIConfigWithCacheDir([]string{"/"}, t.TempDir(), plugins).AddNetworkList(t.Context(), list, &rt)
	if err != nil {
		t.Fatal(err)
	}

	ours, c := load(t, fmt.Sprintf(`"chain": %s, "runtimeConfig": %s`, chain, capabilities))
	prevResult := json.RawMessage(nil)
	for i := range ours.Delegates {
		if diff := cmp.Diff(value(t, plugins.stdin[i]), value(t, WithPrevResult(ours.Config(i, c), prevResult))); diff != "" {
			t.Errorf("stdin of plugin %d (-libcni +unwind):\n%s", i, diff)
		}
		prevResult = Marshal(result)
	}
}

// TestConfigAsPodman: for a container with static addresses, podman overwrites the capabilities of
// the list's first plugin with "ips", unless that plugin already declares "ips". With unwind as the
// first plugin, bridge gets the same runtimeConfig as without unwind. portmap does, too, if
// unwind's entry declares "ips" and "portMappings", as the entry that unwindctl writes does.
func TestConfigAsPodman(t *testing.T) {
	const chain = `{"cniVersion": "1.0.0", "name": "podnet", "plugins": [
		{"type": "bridge"}, {"type": "portmap", "capabilities": {"portMappings": true}}]}`
	given := func(list string) (all []map[string]json.RawMessage) {
		t.Helper()
		l, err := libcni.NetworkConfFromBytes([]byte(list))
		if err == nil && !l.Plugins[0].Network.Capabilities["ips"] { // as podman does
			l.Plugins[0], err = libcni.InjectConf(l.Plugins[0], map[string]any{"capabilities": map[string]bool{"ips": true}})
		}
		if err != nil {
			t.Fatal(err)
		}
		rt := libcni.RuntimeConf{ContainerID: "c", NetNS: "/n", IfName: "eth0", CapabilityArgs: map[string]any{
			"ips": []string{"10.0.0.7", "fd00::7"}, "portMappings": []any{map[string]any{"hostPort": 80}}}}
		plugins := &recorder{}
		if _, err := libcni.NewCNIConfigWithCacheDir([]string{"/"}, t.TempDir(), plugins).AddNetworkList(t.Context(), l, &rt); err != nil {
			t.Fatal(err)
		}
		for _, stdin := range plugins.stdin {
			all = append(all, ObjectOf(stdin))
		}
		return all
	}
	plain := given(chain)
	for entry, ports := range map[string]bool{`"capabilities": {"ips": true, "portMappings": true}, `: true, `"capabilities": {"portMappings": true}, `: false, ``: false} {
		stdin := given(`{"cniVersion": "1.0.0", "name": "podnet", "plugins": [{"type": "unwind", ` + entry + `"chain": ` + chain + `}]}`)
		c, err := ParseConf(Marshal(stdin[0]))
		if err != nil {
			t.Fatal(err)
		}
		ours, err := c.LoadChain()
		if err != nil {
			t.Fatal(err)
		}
		ours.AdoptIPs(c)
		for i := range ours.Delegates {
			got, want := string(ObjectOf(ours.Config(i, c))["runtimeConfig"]), string(plain[i]["runtimeConfig"])
			if i == 1 && !ports { // libcni drops a capability that unwind's entry does not declare
				want = ""
			}
			if got != want {
				t.Errorf("with %q, plugin %d gets %s, want %s", entry, i, got, want)
			}
		}
		if want := []string{"ips", "portMappings"}; !slices.Equal(ours.EntryCapabilities(), want) {
			t.Errorf("the entry should declare %q", ours.EntryCapabilities())
		}
	}
}

// TestAdoptIPs: the first delegate adopts the capability "ips" from unwind's entry only if no
// delegate declares it.
func TestAdoptIPs(t *testing.T) {
	for _, tt := range []struct{ entry, first, second, want string }{
		{`{"ips": true}`, `{}`, `{}`, "ips "},
		{`{"ips": true}`, `{"ips": false, "mac": true, "none": false}`, `{}`, "ips mac "},
		{`{"ips": true, "mac": true}`, `{}`, `{"mac": true}`, "ips "},
		{`{"ips": true}`, `{}`, `{"ips": true}`, ""},
		{`{"ips": true}`, `{"ips": true}`, `{}`, "ips "},
		{`{"ips": false, "portMappings": true}`, `{}`, `{}`, ""},
	} {
		chain, c := load(t, fmt.Sprintf(`"capabilities": %s, "chain": {"plugins": [{"type": "a", "capabilities": %s}, {"type": "b", "capabilities": %s}]}`,
			tt.entry, tt.first, tt.second))
		chain.AdoptIPs(c)
		got := ""
		for _, name := range slices.Sorted(maps.Keys(chain.Delegates[0].Capabilities)) {
			if chain.Delegates[0].Capabilities[name] {
				got += name + " "
			}
		}
		if got != tt.want {
			t.Errorf("%+v: %q", tt, got)
		}
	}
}

// value decodes JSON. It keeps numbers as they are written.
func value(t testing.TB, data json.RawMessage) (v any) {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	if err := d.Decode(&v); err != nil {
		t.Fatalf("%v in %s", err, data)
	}
	return v
}

// TestStepsMayAllocate: a step's MayAllocate is true if the delegate has an IPAM plugin other than
// host-local. It is also true if package known has no row for the delegate, and no earlier delegate
// names an IPAM plugin.
func TestStepsMayAllocate(t *testing.T) {
	for _, tt := range []struct {
		plugins string
		want    []bool
	}{
		{`{"type": "bridge", "ipam": {"type": "host-local"}}, {"type": "own"}`, []bool{false, false}},
		{`{"type": "own", "ipam": {"type": "host-local"}}`, []bool{true}},
		{`{"type": "bridge", "ipam": {"type": "static"}}, {"type": "own"}`, []bool{true, false}},
		{`{"type": "bridge"}, {"type": "own"}, {"type": "own"}`, []bool{false, true, true}},
		{`{"type": "own"}, {"type": "bridge", "ipam": {"type": "host-local"}}, {"type": "tuning"}, {"type": "own"}`,
			[]bool{true, false, false, false}},
	} {
		chain, c := load(t, `"chain": {"plugins": [`+tt.plugins+`]}`)
		var got []bool
		for _, s := range chain.Steps(c) {
			got = append(got, s.MayAllocate)
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s: %v, want %v", tt.plugins, got, tt.want)
		}
	}
}

func TestConfig(t *testing.T) {
	for _, tt := range []struct{ name, plugin, keys, want string }{
		{"numbers are not changed", `{"type": "a", "n": [12345678901234567890, 1e400, 1.10]}`, ``,
			`{"cniVersion": "1.0.0", "n": [12345678901234567890, 1e400, 1.10], "name": "podnet", "type": "a"}`},
		{"a prevResult of its own", `{"type": "a", "prevResult": {"ips": []}}`, ``,
			`{"cniVersion": "1.0.0", "name": "podnet", "type": "a"}`},
		{"keys that multus injects", `{"type": "a", "args": {"x": 1, "cni": {"mac": "m", "ips": "i"}}, "deviceID": "own"}`,
			`"args": {"y": 2, "cni": {"ips": "other"}}, "deviceID": "0000:01", "pciBusID": "0000:02"`,
			`{"args": {"x": 1, "y": 2, "cni": {"mac": "m", "ips": "other"}}, "cniVersion": "1.0.0", "deviceID": "0000:01",
				"name": "podnet", "pciBusID": "0000:02", "type": "a"}`},
		{"capabilities", `{"type": "a", "capabilities": {"ips": true, "mac": false, "none": true}}`,
			`"runtimeConfig": {"ips": ["10.0.0.1"], "mac": "m", "portMappings": []}`,
			`{"capabilities": {"ips": true, "mac": false, "none": true}, "cniVersion": "1.0.0", "name": "podnet",
				"runtimeConfig": {"ips": ["10.0.0.1"]}, "type": "a"}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.keys != "" {
				tt.keys += ", "
			}
			chain, c := load(t, tt.keys+`"chain": {"plugins": [`+tt.plugin+`]}`)
			want, got := value(t, json.RawMessage(tt.want)), value(t, chain.Config(0, c))
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if again := value(t, chain.Config(0, c)); !reflect.DeepEqual(got, again) {
				t.Errorf("the second call returned %v", again)
			}
		})
	}
}

func TestWithPrevResult(t *testing.T) {
	for _, tt := range []struct{ config, prevResult, want string }{
		{`{"a":1}`, ``, `{"a":1}`}, {`{"a":1}`, `{"ips":[]}`, `{"a":1,"prevResult":{"ips":[]}}`},
		{`{}`, `{}`, `{"prevResult":{}}`}, {``, `{}`, ``},
	} {
		if got := WithPrevResult(json.RawMessage(tt.config), json.RawMessage(tt.prevResult)); string(got) != tt.want {
			t.Errorf("%+v: %s", tt, got)
		}
	}
}

func TestLostCapabilities(t *testing.T) {
	for _, tt := range []struct {
		name, outer string
		want        []string
	}{
		{"all declared", `{"ips": true, "mac": true, "portMappings": true, "more": true}`, nil},
		{"none declared", `{}`, []string{"ips", "mac", "portMappings"}},
		{"one switched off", `{"ips": true, "mac": false, "portMappings": true}`, []string{"mac"}},
	} {
		chain, c := load(t, fmt.Sprintf(`"capabilities": %s, "chain": {"plugins": [
			{"type": "a", "capabilities": {"portMappings": true, "mac": true, "off": false}},
			{"type": "b", "capabilities": {"ips": true, "mac": true}}, {"type": "c"}]}`, tt.outer))
		if diff := cmp.Diff(tt.want, chain.LostCapabilities(c)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
	for declared, want := range map[string]string{`{}`: "[]", `{"mac": true}`: "[ips mac]"} {
		chain, _ := load(t, fmt.Sprintf(`"chain": {"plugins": [{"type": "a", "capabilities": %s}]}`, declared))
		if got := fmt.Sprint(chain.EntryCapabilities()); got != want {
			t.Errorf("%s: the entry should declare %s, want %s", declared, got, want)
		}
	}
}

func TestMissing(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"first/a", "second/bridge", "second/i", "second/folder/x"} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		name, path string
		want       []string
	}{
		{"two directories", dir + "/first:" + dir + "/second", []string{"folder", "gone"}},
		{"one directory", dir + "/first", []string{"bridge", "i", "folder", "gone"}},
		{"a missing directory", dir + "/none:" + dir + "/second", []string{"a", "folder", "gone"}},
	} {
		chain := &Chain{Delegates: []Delegate{
			{Type: "a", IPAM: "own"}, {Type: "bridge", IPAM: "i"}, {Type: "bridge", IPAM: "i"}, {Type: "folder"},
			{Type: "gone"}, {Type: "gone"},
		}}
		if diff := cmp.Diff(tt.want, chain.Missing(tt.path)); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
}

// TestMissingOfProviders: each provider's chain needs the binaries of its delegates and of the IPAM
// plugins that they execute. It needs no binary for an ipam.type that a delegate implements itself.
func TestMissingOfProviders(t *testing.T) {
	want := map[string]string{
		"antrea.conflist": "antrea portmap bandwidth", "aws-vpc-cni.conflist": "aws-cni egress-cni portmap",
		"azure.conflist":                "azure-vnet azure-vnet-ipam portmap",
		"azure-overlay.conflist":        "azure-vnet portmap",
		"azure-pod-subnet.conflist":     "azure-vnet portmap",
		"azure-multitenancy.conflist":   "azure-vnet portmap",
		"azure-chained-cilium.conflist": "azure-vnet cilium-cni",
		"calico.conflist":               "calico calico-ipam bandwidth portmap",
		"cilium.conflist":               "cilium-cni", "cilium-aws-cni.conflist": "aws-cni portmap cilium-cni",
		"cilium-azure-ipam.conflist": "cilium-cni", "cilium-generic-veth.conflist": "ptp host-local portmap cilium-cni",
		"cilium-portmap.conflist": "cilium-cni portmap", "cri-o.conflist": "bridge host-local",
		"flannel.conflist": "flannel host-local portmap", "istio-cni.conflist": "bridge host-local istio-cni",
		"kindnet.conflist": "ptp host-local portmap", "multus-thick.conf": "multus-shim", "multus-thin.conf": "multus",
		"nerdctl.conflist":    "bridge host-local portmap firewall tuning",
		"ovn-kubernetes.conf": "ovn-k8s-cni-overlay", "podman.conflist": "bridge host-local portmap firewall tuning",
	}
	files, err := filepath.Glob("../../testdata/conflists/*")
	if err != nil || len(files) != len(want) {
		t.Fatalf("%d files, this test knows %d: %v", len(files), len(want), err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		list, err := ReadConflist(file)
		if err != nil {
			t.Fatal(err)
		}
		chain, err := (&Conf{Name: list.Name}).ParseChain(data, "")
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(chain.Missing(t.TempDir()), " "); got != want[filepath.Base(file)] {
			t.Errorf("%s: %q, want %q", filepath.Base(file), got, want[filepath.Base(file)])
		}
	}
	on := `{"type": "egress-cni", "enabled": "true", "ipam": {"type": "host-local"}}`
	chain, err := (&Conf{Name: "aws-cni"}).ParseChain([]byte(on), "1.0.0")
	if err != nil || !slices.Equal(chain.Missing(t.TempDir()), []string{"egress-cni", "host-local"}) {
		t.Errorf("egress-cni, enabled: %v, %v", chain.Missing(t.TempDir()), err)
	}
}

// ours lists the keys of a delegate's configuration that unwind may set.
var ours = []string{"name", "cniVersion", "args", "deviceID", "pciBusID", "runtimeConfig", "prevResult"}

func FuzzChain(f *testing.F) {
	f.Add([]byte(`{"cniVersion": "0.4.0", "plugins": [{"type": "a", "n": 1e400, "capabilities": {"ips": true}, "args": {"cni": {}}}]}`))
	f.Add([]byte(`{"type": "a", "cniVersions": ["1.1.0"], "ipam": {"type": "i"}, "s": "<&>\u2028", "prevResult": 1}`))
	f.Add([]byte(`{"plugins": [{"type": "a", "name": 5, "runtimeConfig": []}, {"type": "b", "a": {"a": {"a": 12345678901234567890}}}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		c := &Conf{Name: "podnet", CNIVersion: "1.0.0", Chain: data,
			Injected:      map[string]json.RawMessage{"args": json.RawMessage(`{"cni": {"x": "y"}}`), "deviceID": json.RawMessage(`"d"`)},
			RuntimeConfig: map[string]json.RawMessage{"ips": json.RawMessage(`["10.0.0.1"]`)}}
		chain, err := c.LoadChain()
		if err != nil {
			return
		}
		for i, d := range chain.Delegates {
			if d.Type == "" || d.Type == Name || d.IPAM == Name || strings.Contains(d.Type+d.IPAM, "/") {
				t.Errorf("type %q, ipam.type %q", d.Type, d.IPAM)
			}
			config := WithPrevResult(chain.Config(i, c), json.RawMessage(`{"ips":[]}`))
			got, ok := value(t, config).(map[string]any)
			if !ok || got["name"] != "podnet" || got["cniVersion"] != chain.CNIVersion ||
				!reflect.DeepEqual(got["prevResult"], map[string]any{"ips": []any{}}) {
				t.Fatalf("%s", config)
			}
			object := value(t, Marshal(d.object)).(map[string]any)
			for _, key := range ours {
				delete(object, key)
				delete(got, key)
			}
			if !reflect.DeepEqual(object, got) {
				t.Errorf("the delegate's own keys changed from %v to %v", object, got)
			}
		}
	})
}
