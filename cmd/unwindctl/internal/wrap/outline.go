package wrap

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"cni-unwind/plugin/netconf"
)

// errNotAlone is the error of a list in which unwind has neighbours: it would undo nothing of
// theirs.
var errNotAlone = fmt.Errorf("%s is one plugin of several; it must be the only one, with the "+
	"others in its \"chain\"", netconf.Name)

// original is the top level of a configuration to wrap.
type original struct {
	text        jsonText
	members     []part
	name        string // of the network
	single      bool   // the configuration of one plugin
	onlyInlined bool
}

// listKeys are the keys that libcni reads at the top of a list, exactly as written. unwind's
// decoder takes "Plugins" for "plugins" too, so that the two would not run the same chain.
var listKeys = []string{"cniVersion", "cniVersions", "name", "disableCheck", "disableGC",
	"loadOnlyInlinedPlugins", "plugins", "type"}

// outline reads the top level of a configuration, and refuses one that a runtime and unwind could
// read differently. A name that is missing or "" is the default one.
func outline(x []byte, defaultName string) (*original, error) {
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
				return nil, fmt.Errorf("key %q: write it %q; runtimes accept only this spelling", m.key,
					key)
			}
		}
	}
	if o.name, err = networkName(o.members, defaultName); err != nil {
		return nil, err
	}
	inlined, _ := member(o.members, "loadOnlyInlinedPlugins")
	o.single = isSingle(x)
	// as libcni's readBool
	o.onlyInlined = o.single || strings.EqualFold(strings.Trim(string(inlined.raw), `"`), "true")
	return o, nil
}

// networkName returns the name of the network if unwind accepts it: it becomes part of paths.
func networkName(members []part, defaultName string) (string, error) {
	name, ok := member(members, "name")
	if defaultName != "" && (!ok || string(name.raw) == `""`) {
		name.raw, ok = netconf.Marshal(defaultName), true
	}
	conf := []byte("{}")
	if ok {
		conf = slices.Concat([]byte(`{"name": `), name.raw, []byte("}"))
	}
	parsed, err := netconf.ParseConf(conf)
	return parsed.Name, err
}

// isSingle reports whether a text is the configuration of one plugin and not a list, as unwind sees
// it.
func isSingle(x []byte) bool {
	var conf struct {
		Type    string            `json:"type"`
		Plugins []json.RawMessage `json:"plugins"`
	}
	return json.Unmarshal(x, &conf) == nil && conf.Type != "" && conf.Plugins == nil
}
