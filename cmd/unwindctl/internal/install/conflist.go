package install

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/plugin/netconf"
)

// content returns the text of unwind's conflist. It keeps the keys that somebody has added to
// unwind's entry or to the top level of a list. The network's name comes from the provider's file.
// The capabilities are those in conventions and in the provider's file. In a list, disableCheck and
// disableGC also come from that file.
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
		// libcni wraps a single plugin's configuration in a list with only a name and a version at the
		// top level (libcni conf.go ConfListFromConf). So runtimes ignore the key "plugins". It is for
		// installers that append their plugin to "plugins" and write a list: that list still runs unwind.
		if p.chain.DisableGC {
			p.warnings = append(p.warnings, "the provider's conflist sets disableGC, which runtimes ignore "+
				"in a .json file: the runtime's GC would delete attachments that it does not list. If several "+
				"runtimes share the network, use an --unwind-file that ends in .conflist")
		}
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
			delete(list, key)
			if is {
				set(key, "true")
			}
		}
		switch {
		case list["cniVersions"] != nil:
		// With 1.1.0, Nomad would call STATUS before each DEL, and omit the DEL if STATUS failed (nomad
		// 1.9.7 client/allocrunner/networking_cni.go Teardown). nerdctl and podman never call STATUS.
		case s.ByName:
			set("cniVersions", `["1.0.0"]`)
		default:
			set("cniVersions", `["1.0.0", "1.1.0"]`)
		}
	}
	list["name"], list["plugins"] = netconf.Marshal(p.Source.Name), netconf.Marshal([]any{entry})
	content, err := json.MarshalIndent(list, "", "  ")
	return append(content, '\n'), cmp.Or(err, p.check(entry))
}

// split returns the keys of the list in unwind's conflist, and the keys of unwind's entry. Without
// a file, it returns an empty list and an entry with only a type. For a single plugin's
// configuration, the list contains only the version.
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
	setCapabilities(entry, slices.Concat(conventions, p.chain.EntryCapabilities()))
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

// conventions are the capabilities that runtimes pass to plugins (CNI's CONVENTIONS.md). unwind's
// file declares them all, so that a plugin that the provider adds later gets its arguments without
// another installation. unwind passes on to each plugin only what that plugin declares.
var conventions = []string{"aliases", "bandwidth", "cgroupPath", "deviceID", "dns",
	"infinibandGUID", "ipRanges", "ips", "mac", "portMappings"}

// setCapabilities declares capabilities in unwind's entry, and no others.
func setCapabilities(entry map[string]json.RawMessage, names []string) {
	capabilities := map[string]bool{}
	for _, name := range names {
		capabilities[name] = true
	}
	delete(entry, "capabilities")
	if len(capabilities) > 0 {
		entry["capabilities"] = netconf.Marshal(capabilities)
	}
}

// check returns an error if unwind could not use the entry.
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

// repaired is the kind of a change to another program's file. The change's text names the file, and
// its plugins after and before the change.
const repaired = "changed"

// repairs returns the changes that remove unwind from the directory's other files, and that move
// other plugins out of unwind's conflist. Both are necessary after an installer has copied or
// edited the directory's first file, which is unwind's conflist.
//
//  1. In a file that an installer has made from unwind's conflist, the plugins of unwind's chain
//     replace unwind (netconf.ReadProvider).
//  2. A copy of unwind's conflist is removed. Otherwise, the runtime would load the copy once the
//     conflist itself is removed.
//  3. Plugins that an installer has added to unwind's conflist move to the end of the provider's
//     file, because unwind runs only the plugins of that file. The caller then writes or removes
//     unwind's conflist. After a crash in between, the plugins run twice rather than not at all.
//
// An error names the files that cannot be changed; the other changes are valid.
func (s Setup) repairs() (all []*Change, err error) {
	paths, err := netconf.Conflists(s.ConfDir)
	own, source := s.addedTo()
	if own != nil && !slices.Contains(paths, source) {
		paths = append(paths, source)
	}
	for _, path := range paths {
		was, _ := netconf.ReadConflist(path)
		if s.isCopy(path) {
			one := remove(path, "")
			one.What, one.path = fmt.Sprintf("%s (a copy of %s)", path, s.Path()), path
			all = append(all, one)
			continue
		}
		if path == s.Path() || path != source && !madeFromOurs(was) {
			continue
		}
		is, readErr := s.readOther(path)
		if readErr == nil && filepath.Ext(path) != ".conflist" {
			readErr = fmt.Errorf("only a .conflist file can contain %s", strings.Join(is.Types, " → "))
		}
		if readErr != nil {
			if path == source {
				readErr = fmt.Errorf("cannot move %s from %s to this file: %w",
					strings.Join(own.Types[1:], ", "), own.Path, readErr)
			}
			err = errors.Join(err, term.WithHint("replace "+path+" with the provider's conflist", "%s: %w",
				path, readErr))
			continue
		}
		text := fmt.Sprintf("%s: %s", path, strings.Join(is.Types, " → "))
		if was != nil {
			text += fmt.Sprintf(" (previously %s)", strings.Join(was.Types, " → "))
		}
		if path == source {
			text += fmt.Sprintf(", with %s from %s", strings.Join(own.Types[1:], ", "), own.Path)
		}
		all = append(all, &Change{Change: repaired, What: text, path: path, apply: func(*Change) error {
			like, err := os.Stat(path)
			if err != nil || was != nil && sameJSON(was.Data, is.Data) {
				return err
			}
			return durable.ReplaceLike(path, bytes.NewReader(is.Data), like)
		}})
	}
	return all, err
}

// addedTo returns unwind's conflist if another program has added plugins to it, and the path of the
// provider's file, to which these plugins belong.
func (s Setup) addedTo() (own *netconf.Conflist, source string) {
	own, _ = netconf.ReadConflist(s.Path())
	if !ours(own) || len(own.Types) == 1 {
		return nil, ""
	}
	source, _ = filepath.Abs(cmp.Or(s.Source, s.firstOther()))
	return own, source
}

// readOther reads another program's conflist as it will be after the repairs.
func (s Setup) readOther(path string) (*netconf.Conflist, error) {
	c, _, err := netconf.ReadProvider(path)
	own, source := s.addedTo()
	if err == nil && own != nil && path == source {
		c, own.Path = own.ReplaceUnwind(c), path
		c.Path = path
	}
	return c, err
}

// madeFromOurs reports whether another program has made a file from unwind's conflist: the program
// has added its own plugins, or replaced the provider's file with a copy.
func madeFromOurs(c *netconf.Conflist) bool {
	return c != nil && c.Unwind != nil && c.Unwind.ChainFile != "" &&
		(len(c.Types) > 1 || namesItself(c))
}

// keepCopy keeps a copy of the provider's file. unwind reads the copy if an installer replaces the
// provider's file with a file that the installer has made from unwind's conflist.
func (s Setup) keepCopy(source *netconf.Conflist) error {
	path := (&netconf.Conf{Name: source.Name, StateDir: s.stateDir()}).Copy()
	if kept, err := netconf.ReadFile(path); err == nil && bytes.Equal(kept, source.Data) {
		return nil
	}
	return durable.Replace(path, bytes.NewReader(source.Data), 0o600)
}
