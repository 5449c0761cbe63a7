package wrap

import (
	"bytes"
	"context"
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/version"
	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
	"pgregory.net/rapid"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/plugin/netconf"
	"cni-unwind/testdata/nodetest"
)

// check ends a test that has an error.
var check = nodetest.Check

// rewritten returns what the command prints of a text on its standard input.
func rewritten(change func(Source) ([]byte, error), text string) (out, notes string, err error) {
	var stdout, stderr bytes.Buffer
	err = Rewrite{Change: change, Unchanged: "as it is", Streams: term.Streams{
		In: strings.NewReader(text), Out: &stdout, Err: &stderr}}.Run("-")
	return stdout.String(), stderr.String(), err
}

// definitionOf returns a NetworkAttachmentDefinition with a configuration, in JSON.
func definitionOf(name string, config any) string {
	return string(netconf.Marshal(map[string]any{
		"apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
		"metadata": map[string]string{"name": name, "namespace": "prod"}, "spec": map[string]any{"config": config},
	}))
}

// configOf returns the configuration in a definition.
func configOf(t testing.TB, definition string) string {
	t.Helper()
	var o object
	if err := yaml.Unmarshal([]byte(definition), &o); err != nil {
		t.Fatalf("%v in\n%s", err, definition)
	}
	config, _ := o.Spec.Config.(string)
	return config
}

// TestDefinitionDelegates gives configurations, plain and wrapped, to what multus does with them:
// each delegate gets the same name, device, arguments and runtimeConfig.
func TestDefinitionDelegates(t *testing.T) {
	t.Parallel()
	const caps = `"capabilities": {"ips": true, "mac": true, "portMappings": true, "bandwidth": false, "deviceID": true,
		"infinibandGUID": true, "CNIDeviceInfoFile": true}`
	for _, tt := range []struct{ name, config string }{
		{"one plugin", `{"cniVersion": "0.3.1", "type": "sriov", "name": "sriov-net", "vlan": 5, ` + caps + `}`},
		{"one plugin without a name", `{"cniVersion": "0.3.1", "type": "sriov", ` + caps + `}`},
		{"one plugin with an empty name", `{"cniVersion": "0.3.1", "type": "sriov", "name": ""}`},
		{"a device of its own", `{"cniVersion": "0.3.1", "type": "host-device", "pciBusID": "0000:00:01.0"}`},
		{"a list", `{"cniVersion": "0.4.0", "name": "ib", "plugins": [{"type": "ib-sriov", ` + caps + `}, {"type": "tuning"}]}`},
		{"a list without a name", `{"cniVersion": "1.0.0", "disableCheck": true, "plugins": [{"type": "macvlan",
			"args": {"cni": {"a": "own", "b": "own"}, "x": 1}}, {"type": "tuning", "capabilities": {"mac": true}}]}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			out, _, err := rewritten(Inline, definitionOf("of-the-definition", tt.config))
			check(t, err)
			plain := asMultus(t, "of-the-definition", tt.config)
			wrapped := asMultus(t, "of-the-definition", configOf(t, out))
			if len(wrapped) != 1 || wrapped[0]["type"] != netconf.Name {
				t.Fatalf("multus runs %v", wrapped)
			}
			conf, err := netconf.ParseConf(netconf.Marshal(wrapped[0]))
			if err != nil || len(conf.Warnings) > 0 {
				t.Fatalf("unwind: %v, %v", err, conf.Warnings)
			}
			chain, err := conf.LoadChain()
			check(t, err)
			var delegates []map[string]any
			for i := range chain.Delegates {
				var given map[string]any
				check(t, json.Unmarshal(chain.Config(i, conf), &given))
				delegates = append(delegates, given)
			}
			if diff := cmp.Diff(plain, delegates); diff != "" {
				t.Errorf("what the delegates get (-plain +unwind):\n%s", diff)
			}
		})
	}
}

// asMultus returns what each plugin of a configuration gets on stdin if multus attaches a pod that
// has a device and asks for everything: multus-cni v4.3.0, pkg/types/conf.go, LoadDelegateNetConf,
// and GetCNIConfigFromSpec of network-attachment-definition-client v1.7.6. The rest is libcni's.
func asMultus(t testing.TB, definition, config string) []map[string]any {
	t.Helper()
	var raw map[string]any
	check(t, json.Unmarshal([]byte(config), &raw))
	if name, ok := raw["name"]; !ok || name == "" {
		raw["name"] = definition
	}
	plugins, _ := raw["plugins"].([]any)
	kind, _ := raw["type"].(string)
	if kind != "" {
		plugins = []any{raw}
	}
	for _, p := range plugins {
		object := p.(map[string]any)
		object["deviceID"], object["pciBusID"] = "0000:03:02.0", "0000:03:02.0"
		args, _ := object["args"].(map[string]any)
		if args == nil {
			args = map[string]any{}
			object["args"] = args
		}
		cni, _ := args["cni"].(map[string]any)
		if cni == nil {
			cni = map[string]any{}
			args["cni"] = cni
		}
		cni["a"] = "asked for"
	}
	data, err := json.Marshal(raw)
	check(t, err)
	exec := &recording{}
	cni := libcni.NewCNIConfigWithCacheDir([]string{"/bin"}, t.TempDir(), exec)
	rt := &libcni.RuntimeConf{ContainerID: "a", NetNS: "/proc/self/ns/net", IfName: "net1", CapabilityArgs: map[string]any{
		"ips": []string{"10.1.0.9/24"}, "mac": "02:00:00:00:00:01", "infinibandGUID": "02:00:00:00:00:00:00:01",
		"portMappings": []any{map[string]any{"hostPort": 80}}, "bandwidth": map[string]any{"ingressRate": 1},
		"deviceID": "0000:03:02.0", "CNIDeviceInfoFile": "/var/run/x",
	}}
	if kind != "" {
		var conf *libcni.PluginConfig
		if conf, err = libcni.NetworkPluginConfFromBytes(data); err == nil {
			_, err = cni.AddNetwork(context.Background(), conf, rt)
		}
	} else {
		var list *libcni.NetworkConfigList
		if list, err = libcni.NetworkConfFromBytes(data); err == nil {
			_, err = cni.AddNetworkList(context.Background(), list, rt)
		}
	}
	check(t, err)
	return exec.stdin
}

// recording stands in for plugins: it keeps what they get, and prints an empty result.
type recording struct {
	version.PluginDecoder
	stdin []map[string]any
}

func (*recording) FindInPath(plugin string, _ []string) (string, error) {
	return filepath.Join("/bin", plugin), nil
}

func (r *recording) ExecPlugin(_ context.Context, _ string, stdin []byte, _ []string) ([]byte, error) {
	object := map[string]any{}
	err := json.Unmarshal(stdin, &object)
	delete(object, "prevResult")
	r.stdin = append(r.stdin, object)
	return netconf.Marshal(map[string]any{"cniVersion": object["cniVersion"], "ips": []map[string]string{
		{"version": "4", "address": "10.1.0.9/24"}}}), err
}

// TestDefinitionsRefused has an error that names the definition and the key, and nothing printed.
func TestDefinitionsRefused(t *testing.T) {
	t.Parallel()
	const good = `{"cniVersion": "1.0.0", "type": "macvlan"}`
	list := func(definitions ...string) string {
		return `{"apiVersion": "v1", "kind": "List", "items": [` + strings.Join(definitions, ", ") + `]}`
	}
	const of = "stdin: NetworkAttachmentDefinition prod/b: "
	for _, tt := range []struct{ name, text, want string }{
		{"no JSON in it", list(definitionOf("a", good), definitionOf("b", `{"type`)), of + `key "spec.config": not valid JSON`},
		{"no version", definitionOf("b", `{"type": "a"}`), of + `key "spec.config": key "cniVersion" is missing`},
		{"a wrong name", definitionOf("b", `{"cniVersion": "1.0.0", "name": "../x", "type": "a"}`), of + `key "spec.config": key "name": "../x" is not`},
		{"no name at all", definitionOf("", good), `Definition prod: key "spec.config": key "name" is missing`},
		{"a list that multus takes for one plugin", definitionOf("b", `{"cniVersion": "1.0.0", "type": "a", "plugins": [{"type": "b"}]}`),
			of + `key "spec.config": keys "type" and "plugins" are both set: Multus would run one plugin instead of the list; keep one of the keys`},
		{"no string", definitionOf("b", map[string]string{"type": "a"}), of + `key "spec.config" is not a string`},
		{"a number", definitionOf("b", 5), of + `key "spec.config" is not a string`},
		{"no object", strings.Replace(definitionOf("b", good), `"spec":{`, `"spec":[],"x":{`, 1), of},
		{"no object, in YAML", strings.Replace("---\n"+definitionOf("b", good), `"spec":{`, `"spec":[],"x":{`, 1), of},
		{"unwind beside another", definitionOf("b", `{"cniVersion": "1.0.0", "plugins": [{"type": "unwind", "chain": {}}, {"type": "a"}]}`),
			of + `key "spec.config": ` + errNotAlone.Error()},
		{"the second document", "---\n" + definitionOf("a", good) + "\n---\n" + definitionOf("b", `5`), of + `key "spec.config": a number, not an object`},
		{"no YAML", "kind: [\n", "stdin: not valid YAML: "},
		{"a second document that is no YAML", "---\n" + definitionOf("a", good) + "\n---\nx: [\n", "stdin: not valid YAML: "},
		{"a key twice", "apiVersion: k8s.cni.cncf.io/v1\nkind: NetworkAttachmentDefinition\nmetadata: {name: b, namespace: prod}\n" +
			"spec: {config: 'x', config: 'y'}\n", of},
		{"what the library does not write as it reads it", "apiVersion: k8s.cni.cncf.io/v1\nkind: NetworkAttachmentDefinition\n" +
			"metadata:\n  name: b\n  annotations:\n    x: |1\n     \ty\nspec:\n  config: '" + good + "'\n", "stdin: cannot rewrite this YAML without changing other parts of it"},
		{"an anchor", "apiVersion: k8s.cni.cncf.io/v1\nkind: NetworkAttachmentDefinition\nmetadata: {name: b, namespace: prod}\n" +
			"spec: {config: &a '" + good + "', x: *a}\n", of + `key "spec.config" has an anchor or an alias`},
		{"an alias", "apiVersion: k8s.cni.cncf.io/v1\nkind: NetworkAttachmentDefinition\nmetadata: {name: b, namespace: prod}\n" +
			"x: &a '" + good + "'\nspec: {config: *a}\n", of + `key "spec.config" has an anchor or an alias`},
		{"half of a definition", definitionOf("b", good)[:60], "stdin: not valid JSON: "},
		{"no object of Kubernetes", "a: b\n", "stdin: not valid JSON: "},
		{"nothing", "", "stdin: not valid JSON: "},
		{"too much", "---\n" + definitionOf("a", good) + strings.Repeat("\n", netconf.MaxConfig), "stdin: too large: more than 4194304 bytes"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			out, _, err := rewritten(Inline, tt.text)
			if err == nil || !strings.Contains(err.Error(), tt.want) || out != "" {
				t.Errorf("%v, want %s\n%s", err, tt.want, out)
			}
		})
	}
}

// TestDefinitionsLeft has definitions that need nothing printed as they are, with a note of why.
func TestDefinitionsLeft(t *testing.T) {
	t.Parallel()
	const onTheNode = "it has no spec.config, so Multus uses the conflist"
	for _, tt := range []struct{ name, text, want string }{
		{"wrapped by hand, without a name", definitionOf("b", `{"cniVersion": "1.0.0", "plugins": [{"type": "unwind", "chain": {"plugins": [{"type": "a"}]}}]}`), "as it is"},
		{"wrapped by hand, one plugin", definitionOf("b", `{"cniVersion": "1.0.0", "type": "unwind", "chain": {"plugins": [{"type": "a"}]}}`), "as it is"},
		{"a chainFile", definitionOf("b", `{"cniVersion": "1.0.0", "plugins": [{"type": "unwind", "chainFile": "/etc/x"}]}`), "as it is"},
		{"an empty configuration", definitionOf("b", ""), onTheNode},
		{"null", definitionOf("b", nil), onTheNode},
		{"no spec", "apiVersion: k8s.cni.cncf.io/v1\nkind:   NetworkAttachmentDefinition\nmetadata: {name: b, namespace: prod}\n", onTheNode},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			out, notes, err := rewritten(Inline, tt.text)
			want := "stdin: NetworkAttachmentDefinition prod/b: " + tt.want
			if err != nil || out != tt.text || !strings.HasPrefix(notes, want) || !strings.HasSuffix(notes, "; nothing to change\n") {
				t.Errorf("%v, %s, want %s\n%s", err, notes, want, out)
			}
		})
	}
}

// TestManifestIdentity has, of any manifest in YAML or JSON: wrap changes spec.config alone, leaves
// what is wrapped, and unwrap returns the manifest.
func TestManifestIdentity(t *testing.T) {
	t.Parallel()
	space := rapid.StringOfN(rapid.SampledFrom([]rune(" \n\t\r")), 0, 3, -1)
	text := rapid.StringOfN(rapid.SampledFrom([]rune("a \n\t\r:#-'\"|>{}[]&*!%@\\,é\u0085\u2028\ufeff😀\x7f0")), 0, 12, -1)
	rapid.Check(t, func(t *rapid.T) {
		config := func() string {
			var b strings.Builder
			tokens := []string{"{", `"cniVersion"`, ":", `"1.0.0"`, ",", `"type"`, ":", `"macvlan"`, ",", `"x"`, ":",
				string(netconf.Marshal(text.Draw(t, "value"))), "}"}
			for _, token := range tokens {
				b.WriteString(space.Draw(t, "space") + token)
			}
			return b.String() + space.Draw(t, "space")
		}
		definition := func() map[string]any {
			return map[string]any{
				"apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition",
				"metadata": map[string]any{"name": "a", "annotations": map[string]any{"x/" + text.Draw(t, "key"): text.Draw(t, "value")}},
				"spec":     map[string]any{"config": config(), text.Draw(t, "key"): text.Draw(t, "value")},
				"status":   []any{text.Draw(t, "value"), 1, true, nil},
			}
		}
		var original any = definition()
		if rapid.Bool().Draw(t, "list") {
			original = map[string]any{"kind": "List", "apiVersion": "v1", "items": []any{original, definition(), map[string]any{"kind": "Pod"}}}
		}
		marshal := rapid.SampledFrom([]func(any) ([]byte, error){json.Marshal, inYAML}).Draw(t, "format")
		in, err := marshal(original)
		check(t, err)
		if !json.Valid(in) && yaml.Unmarshal(in, new(any)) != nil {
			t.Skip("the library does not read what it wrote")
		}
		wrapped, _, err := rewritten(Inline, string(in))
		if err != nil {
			t.Fatalf("wrap: %v\n%s", err, in)
		}
		if diff := cmp.Diff(withoutConfigs(decode(t, string(in)), false), withoutConfigs(decode(t, wrapped), true)); diff != "" {
			t.Errorf("beside spec.config (-plain +wrapped):\n%s", diff)
		}
		if again, notes, err := rewritten(Inline, wrapped); err != nil || again != wrapped || !strings.Contains(notes, "as it is") {
			t.Errorf("wrapped again: %v, %s\n%s", err, notes, again)
		}
		back, _, err := rewritten(Restore, wrapped)
		if err != nil {
			t.Fatalf("unwrap: %v\n%s", err, wrapped)
		}
		if diff := cmp.Diff(decode(t, string(in)), decode(t, back)); diff != "" {
			t.Errorf("unwrapped (-original):\n%s", diff)
		}
	})
}

// FuzzManifest has what was wrapped left as it is, and unwrapped.
func FuzzManifest(f *testing.F) {
	f.Add(definitionOf("a", `{"cniVersion": "1.0.0", "type": "a"}`))
	f.Add("---\n# x\n---\n" + definitionOf("a", `{"cniVersion": "1.0.0", "type": "a"}`) + "\n...\n")
	f.Add("apiVersion: v1\nkind: List\nitems:\n- apiVersion: k8s.cni.cncf.io/v1\n  kind: NetworkAttachmentDefinition\n" +
		"  metadata: {name: a}\n  spec:\n    config: |\n      {\"cniVersion\": \"1.0.0\",\n      \"type\": \"a\"}\n")
	f.Fuzz(func(t *testing.T, text string) {
		wrapped, _, err := rewritten(Inline, text)
		if err != nil {
			return
		}
		if again, _, err := rewritten(Inline, wrapped); err != nil || again != wrapped {
			t.Errorf("wrapped again: %v\n%q, from\n%q", err, again, wrapped)
		}
		if _, _, err := rewritten(Restore, wrapped); err != nil && !strings.Contains(err.Error(), "chain") {
			t.Errorf("unwrapped: %v\n%q", err, wrapped)
		}
	})
}

// inYAML is yaml.Marshal with the indentation of kubectl.
func inYAML(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	err := enc.Encode(v)
	return b.Bytes(), err
}

func decode(t *rapid.T, text string) any {
	t.Helper()
	var v any
	read := yaml.Unmarshal // takes no control characters
	if json.Valid([]byte(text)) {
		read = json.Unmarshal
	}
	if err := read([]byte(text), &v); err != nil {
		t.Fatalf("%v in\n%q", err, text)
	}
	return v
}

// withoutConfigs empties spec.config of a decoded manifest; a wrapped one must have unwind in it.
func withoutConfigs(v any, wrapped bool) any {
	o, _ := v.(map[string]any)
	items, _ := o["items"].([]any)
	for _, item := range items {
		withoutConfigs(item, wrapped)
	}
	if spec, ok := o["spec"].(map[string]any); ok {
		config, _ := spec["config"].(string)
		spec["config"] = !wrapped || strings.Contains(config, `"type": "unwind"`)
	}
	return v
}
