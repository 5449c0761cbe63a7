package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"

	"cni-unwind/plugin"
)

// pair is a key of an object, in its order.
type pair struct {
	key   string
	value any
}

// conflist returns our conflist. What a person added to the one that is there stays; what follows the provider's file, the
// network's name, the capabilities and whether CHECK and GC are off, is as that has it.
func (i installation) conflist(w *wrapping, old *plugin.Conflist) ([]byte, error) {
	list, entry := map[string]json.RawMessage{}, map[string]json.RawMessage{}
	if old != nil {
		var plugins []map[string]json.RawMessage
		if json.Unmarshal(old.Data, &list) != nil || json.Unmarshal(list["plugins"], &plugins) != nil || len(plugins) != 1 {
			return nil, refuse("remove it", "%s has no list of plugins", w.path) // as the .conf of one plugin may
		}
		entry = plugins[0]
	}
	i.setEntry(entry, w)
	head := []pair{
		{"cniVersion", keep(list, "cniVersion", "1.0.0")},
		{"cniVersions", keep(list, "cniVersions", []string{"1.0.0", "1.1.0"})},
		{"name", w.source.Name},
		{"loadOnlyInlinedPlugins", true},
	}
	if w.chain.DisableCheck {
		head = append(head, pair{"disableCheck", true})
	}
	if w.chain.DisableGC {
		head = append(head, pair{"disableGC", true})
	}
	var content bytes.Buffer
	written := object(head, list, "plugins", "disableCheck", "disableGC")
	body := object([]pair{{"type", plugin.Name}, {"capabilities", entry["capabilities"]}, {"chainFile", entry["chainFile"]}},
		entry)
	err := json.Indent(&content, fmt.Appendf(nil, `%s,"plugins":[%s]}`, written[:len(written)-1], body), "", "  ")
	if err != nil {
		return nil, err
	}
	content.WriteByte('\n')
	return content.Bytes(), w.check(entry)
}

// setEntry sets what is ours in unwind's entry.
func (i installation) setEntry(entry map[string]json.RawMessage, w *wrapping) {
	capabilities := map[string]bool{}
	for _, d := range w.chain.Delegates {
		for name, enabled := range d.Capabilities {
			if enabled {
				capabilities[name] = true
			}
		}
	}
	delete(entry, "capabilities")
	if len(capabilities) > 0 {
		entry["capabilities"] = raw(capabilities)
	}
	entry["chainFile"] = raw(w.source.Path)
	switch i.StateDir {
	case "":
	case plugin.DefaultStateDir:
		delete(entry, "stateDir")
	default:
		entry["stateDir"] = raw(i.StateDir)
	}
	switch {
	case i.Observe:
		entry["sweepOnStatus"], entry["disableGC"] = raw(false), raw(true)
	case string(entry["sweepOnStatus"]) == "false" && string(entry["disableGC"]) == "true": // only both are ours
		delete(entry, "sweepOnStatus")
		delete(entry, "disableGC")
	}
}

// check reads the entry as unwind will.
func (w *wrapping) check(entry map[string]json.RawMessage) error {
	conf := maps.Clone(entry)
	conf["name"], conf["cniVersion"] = raw(w.source.Name), raw("1.0.0")
	c, err := plugin.ParseConf(raw(conf))
	if err == nil && c.Chain != nil {
		err = errors.New(`"chain" and "chainFile" are both set; keep one`)
	}
	if err != nil {
		return refuse("unwind could not use it; nothing was changed", "%s: %w", w.path, err)
	}
	return nil
}

// object encodes members, and after them those of a map that are not among them nor left out, by their names.
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
		if value := raw(m.value); string(value) != "null" {
			fields = append(fields, fmt.Appendf(nil, "%s:%s", raw(m.key), value))
		}
	}
	return fmt.Appendf(nil, "{%s}", bytes.Join(fields, []byte(",")))
}

// keep returns what an object has under a key, or the default.
func keep(object map[string]json.RawMessage, key string, absent any) any {
	if value, ok := object[key]; ok {
		return value
	}
	return absent
}

// raw encodes values of types that always can be.
func raw(v any) json.RawMessage {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return data
}

// sameJSON says whether two texts mean the same.
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
