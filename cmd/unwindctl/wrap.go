package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/spf13/cobra"

	"cni-unwind/plugin"
)

func wrapCommand() *cobra.Command {
	return rewriteCommand(&cobra.Command{
		Use:   "wrap FILE",
		Short: "Put the chain of a conflist into unwind's entry",
		Long: "Put the chain of a conflist into unwind's entry, and print the result. The file itself becomes the value of \"chain\", byte\n" +
			"for byte; unwindctl unwrap returns it. Plugins that a runtime would add from the folder of the network's name, beside\n" +
			"FILE, are put into the chain too. The .conf of one plugin becomes a list. FILE - is the standard input, beside which\n" +
			"there is no folder. A file that unwind or the runtime would refuse is refused here, and one that is wrapped already is\n" +
			"left as it is.",
	}, "already wrapped", wrapFile)
}

// errNotAlone is of a list in which unwind has neighbours: it would undo nothing of theirs.
var errNotAlone = fmt.Errorf("%s is one plugin of several; it must be the only one, with the others in its \"chain\"", plugin.Name)

// wrapFile returns the list that has the source's chain inside unwind's entry. Without a result the source is that already.
func wrapFile(src source) ([]byte, error) {
	if src.bad != nil {
		return nil, src.bad
	}
	o, err := outline(src.Data)
	if err != nil {
		return nil, err
	}
	if o.single && filepath.Ext(src.arg) == ".conflist" {
		return nil, errors.New(`key "plugins" is missing: a runtime takes a .conflist for a list of plugins, not for one`)
	}
	var folder []json.RawMessage
	if src.arg != "-" && !o.onlyInlined {
		if folder, err = plugin.InlineFolder(filepath.Join(filepath.Dir(src.arg), o.name)); err != nil {
			return nil, err
		}
	}
	if slices.Contains(src.Types, plugin.Name) {
		return nil, checkWrapped(src.Conflist, len(folder))
	}
	return wrap(src.Data, folder)
}

// checkWrapped returns what is wrong with a list that unwind is in.
func checkWrapped(list *plugin.Conflist, neighbours int) error {
	if len(list.Types)+neighbours > 1 {
		return errNotAlone
	}
	if unknown := list.Unwind.Warnings(); len(unknown) > 0 {
		return errors.New(strings.Join(unknown, "\n"))
	}
	if list.Unwind.Chain == nil && list.Unwind.ChainFile != "" {
		return nil // of another's file its owner decides
	}
	_, err := list.Unwind.LoadChain()
	return err
}

// original is what wrap has to know of the configuration that it wraps.
type original struct {
	text        jsonText
	members     []part
	name        string // of the network
	single      bool   // the configuration of one plugin
	onlyInlined bool
}

// listKeys are those that libcni reads at the top of a list. It takes them as they are written; unwind's decoder takes "Plugins"
// for "plugins" too, so that the two would not run the same chain.
var listKeys = []string{"cniVersion", "cniVersions", "name", "disableCheck", "disableGC", "loadOnlyInlinedPlugins", "plugins", "type"}

// outline reads the top level of a configuration, and refuses one that a runtime and unwind could read differently.
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
			return nil, fmt.Errorf("key %q is there twice; keep one", m.key)
		}
		seen[m.key] = true
		for _, key := range listKeys {
			if key != m.key && strings.EqualFold(key, m.key) {
				return nil, fmt.Errorf("key %q: write it %q; a runtime knows it only so", m.key, key)
			}
		}
	}
	if o.name, err = networkName(o.members); err != nil {
		return nil, err
	}
	inlined, _ := member(o.members, "loadOnlyInlinedPlugins")
	o.single = isSingle(x)
	o.onlyInlined = o.single || strings.EqualFold(strings.Trim(string(inlined.raw), `"`), "true") // as libcni's readBool
	return o, nil
}

// networkName returns the name of the network if it is one that unwind accepts: it is part of paths.
func networkName(members []part) (string, error) {
	conf := []byte("{}")
	if name, ok := member(members, "name"); ok {
		conf = slices.Concat([]byte(`{"name": `), name.raw, []byte("}"))
	}
	parsed, err := plugin.ParseConf(conf)
	return parsed.Name, err
}

// isSingle tells the configuration of one plugin from a list, as unwind does.
func isSingle(x []byte) bool {
	var conf struct {
		Type    string            `json:"type"`
		Plugins []json.RawMessage `json:"plugins"`
	}
	return json.Unmarshal(x, &conf) == nil && conf.Type != "" && conf.Plugins == nil
}

// wrap returns the list in which x, the text of a list or of the configuration of one plugin, is the chain of unwind, with the
// plugins of a folder after its own. unwrap returns x. What a runtime would then give to unwind is checked as unwind does.
func wrap(x []byte, folder []json.RawMessage) ([]byte, error) {
	o, err := outline(x)
	if err != nil {
		return nil, err
	}
	chain, err := fold(o, folder)
	if err != nil {
		return nil, err
	}
	conf, loaded, err := readBack(layOut(o, nil, len(folder), chain))
	if err != nil {
		return nil, err
	}
	if !hasVersion(x) {
		return nil, errors.New(`key "cniVersion" is missing; write the version in which the plugins are to be called: ` +
			`without one a runtime takes 0.1.0, and unwind its own`)
	}
	out := layOut(o, loaded.LostCapabilities(conf), len(folder), chain)
	_, _, err = readBack(out)
	return out, err
}

func hasVersion(x []byte) bool {
	var conf struct {
		One  string   `json:"cniVersion"`
		More []string `json:"cniVersions"`
	}
	return json.Unmarshal(x, &conf) == nil && (conf.One != "" || len(conf.More) > 0)
}

// fold returns the text of a list with the plugins of a folder after its own, as libcni reads it. A list without the key
// "plugins" gets it as its first. One with [] is refused, as by libcni: unfold would not know which of the two it was.
func fold(o *original, folder []json.RawMessage) (jsonText, error) {
	if len(folder) == 0 {
		return o.text, nil
	}
	var more [][]byte
	for i, raw := range folder {
		if !json.Valid(raw) {
			return nil, fmt.Errorf("folder %s: file %d: not valid JSON", o.name, i+1)
		}
		more = append(more, bytes.TrimSpace(raw))
	}
	texts := bytes.Join(more, []byte(", "))
	plugins, ok := member(o.members, "plugins")
	if !ok {
		return o.text.insert(o.members[0].start, slices.Concat([]byte(`"plugins": [`), texts, []byte(`], `))...), nil
	}
	own, err := o.text.parts(plugins.value)
	if err != nil {
		return nil, fmt.Errorf("key %q: %w", "plugins", err)
	}
	if len(own) == 0 {
		return nil, errors.New(`key "plugins" is empty; write the plugins to run there`)
	}
	return o.text.insert(own[len(own)-1].end, slices.Concat([]byte(", "), texts)...), nil
}

// layOut writes the list with unwind's entry. "chain" is its last key.
func layOut(o *original, capabilities []string, folded int, chain jsonText) []byte {
	var b bytes.Buffer
	name, _ := member(o.members, "name")
	fmt.Fprintf(&b, "{\n  \"cniVersion\": \"1.0.0\",\n  \"cniVersions\": [\"1.0.0\", \"1.1.0\"],\n  \"name\": %s,\n"+
		"  \"loadOnlyInlinedPlugins\": true,\n", name.raw)
	for _, m := range o.members {
		ours := slices.Contains([]string{"cniVersion", "cniVersions", "name", "plugins", "loadOnlyInlinedPlugins"}, m.key)
		if !ours && !o.single { // what is in a plugin's configuration is the plugin's
			fmt.Fprintf(&b, "  %s,\n", o.text[m.start:m.end])
		}
	}
	fmt.Fprintf(&b, "  \"plugins\": [\n    {\n      \"type\": %q,\n", plugin.Name)
	if len(capabilities) > 0 {
		var each []string
		for _, c := range capabilities {
			key, _ := json.Marshal(c)
			each = append(each, string(key)+": true")
		}
		fmt.Fprintf(&b, "      \"capabilities\": { %s },\n", strings.Join(each, ", "))
	}
	if folded > 0 {
		fmt.Fprintf(&b, "      %q: %d,\n", plugin.FoldedKey, folded)
	}
	fmt.Fprintf(&b, "      \"chain\":%s}\n  ]\n}\n", chain)
	return b.Bytes()
}

// readBack reads a wrapped list as a runtime does, and what the runtime then gives to unwind as unwind does.
func readBack(wrapped []byte) (*plugin.Conf, *plugin.Chain, error) {
	if _, err := plugin.ReadConflistFrom(bytes.NewReader(wrapped)); err != nil {
		return nil, nil, fmt.Errorf("wrapped: %w", err)
	}
	list, err := libcni.NetworkConfFromBytes(wrapped)
	if err != nil {
		return nil, nil, err
	}
	entry, err := libcni.InjectConf(list.Plugins[0], map[string]any{"name": list.Name, "cniVersion": list.CNIVersion})
	if err != nil {
		return nil, nil, err
	}
	conf, err := plugin.ParseConf(entry.Bytes)
	if err != nil {
		return nil, nil, err
	}
	chain, err := conf.LoadChain()
	return conf, chain, err
}
