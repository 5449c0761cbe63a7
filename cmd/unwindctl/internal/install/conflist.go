package install

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"reflect"
	"slices"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/plugin/netconf"
)

// pair is a member of an object whose order matters.
type pair struct {
	key   string
	value any
}

// content returns the text of our file. It keeps keys that somebody has added to unwind's entry or,
// in a list, at the top level. The network's name, the capabilities, disableCheck and disableGC
// come from the provider's file.
func (s Setup) content(p *Plan, old *netconf.Conflist) ([]byte, error) {
	list, entry, err := s.split(old)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", old.Path, err)
	}
	isJSON := filepath.Ext(p.path) == ".json"
	var version any = keep(list, "cniVersion", "1.0.0")
	if isJSON && s.CNIVersion != "" {
		version = s.CNIVersion
	}
	if isJSON {
		list = nil
	}
	s.setEntry(entry, p)
	own := []pair{
		{"type", netconf.Name}, {"capabilities", entry["capabilities"]},
		{"chainFile", entry["chainFile"]},
	}
	var text []byte
	if isJSON {
		// libcni makes a list from a single plugin's configuration, and copies only these two keys to
		// the list (libcni conf.go ConfListFromConf). An installer that appends its plugin to
		// "plugins" gets a list that runs unwind too; runtimes ignore that key.
		head := []pair{{"cniVersion", version}, {"name", p.Source.Name}}
		text = addPlugins(object(append(head, own...), entry), object(own, entry))
	} else {
		text = s.list(p, list, version, object(own, entry))
	}
	var content bytes.Buffer
	if err := json.Indent(&content, text, "", "  "); err != nil {
		return nil, err
	}
	content.WriteByte('\n')
	return content.Bytes(), p.check(entry)
}

// split returns the keys of our file's list, and those of unwind's entry. The two are empty if
// there is no file. For a single plugin's configuration, the list contains the keys that libcni
// copies to it.
func (s Setup) split(old *netconf.Conflist) (list, entry map[string]json.RawMessage, err error) {
	if old == nil {
		return nil, map[string]json.RawMessage{}, nil
	}
	list = netconf.ObjectOf(old.Data)
	if list["type"] == nil {
		var plugins []map[string]json.RawMessage
		err = json.Unmarshal(list["plugins"], &plugins)
		return list, plugins[0], err // the first plugin is unwind
	}
	entry = maps.Clone(list)
	for _, key := range []string{"name", "cniVersion", "plugins"} {
		delete(entry, key)
	}
	return map[string]json.RawMessage{"cniVersion": list["cniVersion"]}, entry, nil
}

// list returns the text of a list with unwind's entry in it.
func (s Setup) list(p *Plan, old map[string]json.RawMessage, version any, entry []byte) []byte {
	head := []pair{
		{"cniVersion", version},
		{"cniVersions", keep(old, "cniVersions", []string{"1.0.0", "1.1.0"})},
		{"name", p.Source.Name},
		{"loadOnlyInlinedPlugins", true},
	}
	if p.chain.DisableCheck {
		head = append(head, pair{"disableCheck", true})
	}
	if p.chain.DisableGC {
		head = append(head, pair{"disableGC", true})
	}
	return addPlugins(object(head, old, "plugins", "disableCheck", "disableGC"), entry)
}

func addPlugins(object, entry []byte) []byte {
	return fmt.Appendf(nil, `%s,"plugins":[%s]}`, object[:len(object)-1], entry)
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

// object encodes the members in head, and after them the other members of more, sorted by name. It
// omits those in leftOut.
func object(head []pair, more map[string]json.RawMessage, leftOut ...string) []byte {
	for _, m := range head {
		leftOut = append(leftOut, m.key)
	}
	for _, key := range slices.Sorted(maps.Keys(more)) {
		if !slices.Contains(leftOut, key) {
			head = append(head, pair{key, more[key]})
		}
	}
	var fields [][]byte
	for _, m := range head {
		if value := netconf.Marshal(m.value); string(value) != "null" {
			fields = append(fields, fmt.Appendf(nil, "%s:%s", netconf.Marshal(m.key), value))
		}
	}
	return fmt.Appendf(nil, "{%s}", bytes.Join(fields, []byte(",")))
}

func keep(object map[string]json.RawMessage, key string, absent any) any {
	if value, ok := object[key]; ok {
		return value
	}
	return absent
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
