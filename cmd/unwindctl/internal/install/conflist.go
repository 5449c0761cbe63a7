package install

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"reflect"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/plugin/netconf"
)

// content returns the text of our file. It keeps keys that somebody has added to unwind's entry or,
// in a list, at the top level. The network's name, the capabilities, disableCheck and disableGC
// come from the provider's file.
func (s Setup) content(p *Plan, old *netconf.Conflist) ([]byte, error) {
	list, entry, err := split(old)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", old.Path, err)
	}
	s.setEntry(entry, p)
	set := func(key, value string) { list[key] = json.RawMessage(value) }
	if list["cniVersion"] == nil {
		set("cniVersion", `"1.0.0"`)
	}
	if filepath.Ext(p.path) == ".json" {
		// libcni makes a list from a single plugin's configuration, and copies only the name and the
		// version to the list (libcni conf.go ConfListFromConf). An installer that appends its plugin
		// to "plugins" gets a list that runs unwind too; runtimes ignore that key.
		version := list["cniVersion"]
		if s.CNIVersion != "" {
			version = netconf.Marshal(s.CNIVersion)
		}
		list = maps.Clone(entry)
		list["cniVersion"] = version
	} else {
		set("loadOnlyInlinedPlugins", "true")
		for key, is := range map[string]bool{"disableCheck": p.chain.DisableCheck,
			"disableGC": p.chain.DisableGC} {
			if delete(list, key); is {
				set(key, "true")
			}
		}
		if list["cniVersions"] == nil {
			set("cniVersions", `["1.0.0", "1.1.0"]`)
		}
	}
	list["name"], list["plugins"] = netconf.Marshal(p.Source.Name), netconf.Marshal([]any{entry})
	content, err := json.MarshalIndent(list, "", "  ")
	return append(content, '\n'), cmp.Or(err, p.check(entry))
}

// split returns the keys of our file's list, and those of unwind's entry. The two are empty if
// there is no file. For a single plugin's configuration, the list contains the version, which
// libcni copies to it.
func split(old *netconf.Conflist) (list, entry map[string]json.RawMessage, err error) {
	if old == nil {
		return map[string]json.RawMessage{}, map[string]json.RawMessage{
			"type": netconf.Marshal(netconf.Name)}, nil
	}
	list = netconf.ObjectOf(old.Data)
	if list["type"] == nil {
		var plugins []map[string]json.RawMessage
		err = json.Unmarshal(list["plugins"], &plugins)
		return list, plugins[0], err // the first plugin is unwind
	}
	entry = list
	list = map[string]json.RawMessage{"cniVersion": entry["cniVersion"]}
	for _, key := range []string{"name", "cniVersion", "plugins"} {
		delete(entry, key)
	}
	return list, entry, nil
}

// setEntry sets the keys of unwind's entry that unwindctl writes.
func (s Setup) setEntry(entry map[string]json.RawMessage, p *Plan) {
	setCapabilities(entry, p.chain)
	entry["chainFile"] = netconf.Marshal(p.Source.Path)
	switch s.StateDir {
	case "":
	case netconf.DefaultStateDir:
		delete(entry, "stateDir")
	default:
		entry["stateDir"] = netconf.Marshal(s.StateDir)
	}
	switch {
	case s.Observe:
		entry["sweepOnStatus"], entry["disableGC"] = netconf.Marshal(false), netconf.Marshal(true)
	// --observe sets both keys, so remove them only together
	case string(entry["sweepOnStatus"]) == "false" && string(entry["disableGC"]) == "true":
		delete(entry, "sweepOnStatus")
		delete(entry, "disableGC")
	}
}

// setCapabilities declares the chain's capabilities in unwind's entry.
func setCapabilities(entry map[string]json.RawMessage, chain *netconf.Chain) {
	capabilities := map[string]bool{}
	for _, name := range chain.EntryCapabilities() {
		capabilities[name] = true
	}
	delete(entry, "capabilities")
	if len(capabilities) > 0 {
		entry["capabilities"] = netconf.Marshal(capabilities)
	}
}

// check reads the entry as unwind will.
func (p *Plan) check(entry map[string]json.RawMessage) error {
	conf := maps.Clone(entry)
	conf["name"], conf["cniVersion"] = netconf.Marshal(p.Source.Name), netconf.Marshal("1.0.0")
	c, err := netconf.ParseConf(netconf.Marshal(conf))
	if err == nil && c.Chain != nil {
		err = errors.New(`"chain" and "chainFile" are both set; keep one`)
	}
	if err != nil {
		return term.WithHint("correct unwind's entry in this file; nothing was changed", "%s: %w",
			p.path, err)
	}
	return nil
}

func sameJSON(a, b []byte) bool {
	var values [2]any
	for i, data := range [][]byte{a, b} {
		d := json.NewDecoder(bytes.NewReader(data))
		d.UseNumber()
		if d.Decode(&values[i]) != nil {
			return false
		}
	}
	return reflect.DeepEqual(values[0], values[1])
}
