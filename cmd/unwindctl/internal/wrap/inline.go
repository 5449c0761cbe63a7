// Package wrap moves the chain of a conflist into unwind's entry (Inline) and back (Restore).
//
// Both edit the text itself, so Restore returns exactly the bytes that Inline received.
package wrap

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"

	"cni-unwind/plugin/netconf"
)

// Inline returns a list with the source's chain in unwind's entry, or nil if it is already wrapped.
func Inline(src Source) ([]byte, error) {
	if src.bad != nil {
		return nil, src.bad
	}
	o, err := outline(src.Data)
	if err != nil {
		return nil, err
	}
	if o.single && filepath.Ext(src.arg) == ".conflist" {
		return nil, errors.New(
			`key "plugins" is missing: a .conflist file contains a list of plugins`)
	}
	var directory []json.RawMessage
	if src.arg != "-" && !o.onlyInlined {
		path := filepath.Join(filepath.Dir(src.arg), o.name)
		if directory, err = netconf.InlineDirectory(path); err != nil {
			return nil, err
		}
	}
	if slices.Contains(src.Types, netconf.Name) {
		return nil, checkWrapped(src.Conflist, len(directory))
	}
	return inline(o, directory)
}

// inline returns a list in which the original is unwind's chain. It appends the plugins of a
// directory to the chain. restore returns the original. inline checks the result by reading it as
// the runtime and unwind will.
func inline(o *original, directory []json.RawMessage) ([]byte, error) {
	chain, err := fold(o, directory)
	if err != nil {
		return nil, err
	}
	loaded, err := readBack(layOut(o, nil, len(directory), chain))
	if err != nil {
		return nil, err
	}
	if !hasVersion(o.text) {
		return nil, errors.New(`key "cniVersion" is missing; set it to a CNI version that the plugins ` +
			`support: without the key, a runtime uses 0.1.0, but unwind another version`)
	}
	out := layOut(o, loaded.EntryCapabilities(), len(directory), chain)
	_, err = readBack(out)
	return out, err
}

func hasVersion(x []byte) bool {
	var conf struct {
		One  string   `json:"cniVersion"`
		More []string `json:"cniVersions"`
	}
	return json.Unmarshal(x, &conf) == nil && (conf.One != "" || len(conf.More) > 0)
}

// fold appends the plugins of a directory to the text of a list, as libcni does when it loads them.
// If the list has no key "plugins", fold adds it as the first key. It refuses an empty "plugins",
// as libcni does: unfold could not tell the two cases apart.
func fold(o *original, directory []json.RawMessage) (jsonText, error) {
	if len(directory) == 0 {
		return o.text, nil
	}
	var more [][]byte
	for i, raw := range directory {
		if !json.Valid(raw) {
			return nil, fmt.Errorf("directory %s: file %d: not valid JSON", o.name, i+1)
		}
		more = append(more, bytes.TrimSpace(raw))
	}
	texts := bytes.Join(more, []byte(", "))
	plugins, ok := member(o.members, "plugins")
	if !ok {
		return o.text.insert(o.members[0].start, slices.Concat([]byte(`"plugins": [`), texts,
			[]byte(`], `))...), nil
	}
	own, err := o.text.parts(plugins.value)
	if err != nil {
		return nil, fmt.Errorf("key %q: %w", "plugins", err)
	}
	if len(own) == 0 {
		return nil, errors.New(`key "plugins" is empty; list the plugins to run`)
	}
	return o.text.insert(own[len(own)-1].end, slices.Concat([]byte(", "), texts)...), nil
}

// layOut writes the list with unwind's entry. "chain" is its last key.
func layOut(o *original, capabilities []string, folded int, chain jsonText) []byte {
	var b bytes.Buffer
	own := []string{"cniVersion", "cniVersions", "name", "plugins", "loadOnlyInlinedPlugins"}
	fmt.Fprintf(&b, `{
  "cniVersion": "1.0.0",
  "cniVersions": ["1.0.0", "1.1.0"],
  "name": %q,
  "loadOnlyInlinedPlugins": true,
`, o.name)
	for _, m := range o.members {
		// all keys of a single plugin's configuration belong to that plugin
		if !slices.Contains(own, m.key) && !o.single {
			fmt.Fprintf(&b, "  %s,\n", o.text[m.start:m.end])
		}
	}
	fmt.Fprintf(&b, "  \"plugins\": [\n    {\n      \"type\": %q,\n", netconf.Name)
	if len(capabilities) > 0 {
		var each []string
		for _, c := range capabilities {
			key, _ := json.Marshal(c)
			each = append(each, string(key)+": true")
		}
		fmt.Fprintf(&b, "      \"capabilities\": { %s },\n", strings.Join(each, ", "))
	}
	if folded > 0 {
		fmt.Fprintf(&b, "      %q: %d,\n", netconf.FoldedKey, folded)
	}
	fmt.Fprintf(&b, "      \"chain\":%s}\n  ]\n}\n", chain)
	return b.Bytes()
}

// readBack reads a wrapped list as a runtime does, and the chain in unwind's entry as unwind does.
func readBack(wrapped []byte) (*netconf.Chain, error) {
	if _, err := netconf.ParseConflist(wrapped); err != nil {
		return nil, fmt.Errorf("the wrapped configuration: %w", err)
	}
	list, err := libcni.NetworkConfFromBytes(wrapped)
	if err != nil {
		return nil, err
	}
	entry, err := libcni.InjectConf(list.Plugins[0], map[string]any{"name": list.Name,
		"cniVersion": list.CNIVersion})
	if err != nil {
		return nil, err
	}
	conf, err := netconf.ParseConf(entry.Bytes)
	if err != nil {
		return nil, err
	}
	return conf.LoadChain()
}

// checkWrapped returns an error if a list that already contains unwind has a problem.
func checkWrapped(list *netconf.Conflist, neighbours int) error {
	if len(list.Types)+neighbours > 1 {
		return errNotAlone
	}
	if unknown := list.Unwind.Warnings; len(unknown) > 0 {
		return errors.New(strings.Join(unknown, "\n"))
	}
	if list.Unwind.Chain == nil && list.Unwind.ChainFile != "" {
		return nil // the chain's file belongs to the provider
	}
	_, err := list.Unwind.LoadChain()
	return err
}

// errNotAlone is the error for a list with plugins next to unwind: unwind cannot undo them.
var errNotAlone = fmt.Errorf("%s must be the only plugin in the list; move the others into its "+
	"\"chain\"", netconf.Name)

// original is the top level of a configuration to wrap.
type original struct {
	text        jsonText
	members     []part
	name        string // of the network
	single      bool   // it configures one plugin and is not a list
	onlyInlined bool
}

// listKeys are the keys that libcni reads at the top of a list, exactly as written. unwind's
// decoder also accepts "Plugins" for "plugins", so it could run a chain that libcni does not run.
var listKeys = []string{"cniVersion", "cniVersions", "name", "disableCheck", "disableGC",
	"loadOnlyInlinedPlugins", "plugins", "type"}

// outline reads the top level of a configuration, and refuses one that a runtime and unwind could
// read differently.
func outline(x []byte) (*original, error) {
	if !json.Valid(x) {
		return nil, errors.New("not valid JSON")
	}
	o := &original{text: x}
	var err error
	if o.members, err = o.text.parts(0); err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	for _, m := range o.members {
		if seen[m.key] {
			return nil, fmt.Errorf("key %q is set twice; keep one", m.key)
		}
		seen[m.key] = true
		for _, key := range listKeys {
			if key != m.key && strings.EqualFold(key, m.key) {
				return nil, fmt.Errorf("key %q: spell it %q; runtimes accept only this spelling", m.key,
					key)
			}
		}
	}
	if o.name, err = networkName(o.members); err != nil {
		return nil, err
	}
	inlined, _ := member(o.members, "loadOnlyInlinedPlugins")
	o.single = isSingle(x)
	// like libcni's readBool
	o.onlyInlined = o.single || strings.EqualFold(strings.Trim(string(inlined.raw), `"`), "true")
	return o, nil
}

// networkName returns the network's name, or an error if unwind does not accept the name, which
// becomes part of paths.
func networkName(members []part) (string, error) {
	name, ok := member(members, "name")
	conf := []byte("{}")
	if ok {
		conf = slices.Concat([]byte(`{"name": `), name.raw, []byte("}"))
	}
	parsed, err := netconf.ParseConf(conf)
	return parsed.Name, err
}

// isSingle reports whether unwind reads a text as the configuration of one plugin, not as a list.
func isSingle(x []byte) bool {
	var conf struct {
		Type    string            `json:"type"`
		Plugins []json.RawMessage `json:"plugins"`
	}
	return json.Unmarshal(x, &conf) == nil && conf.Type != "" && conf.Plugins == nil
}
