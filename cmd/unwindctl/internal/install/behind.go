package install

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/netconf"
)

// behind are plugins that another program has put behind unwind in our file, as the installer of a
// mesh does that takes it for the provider's. There they run past unwind, and a second time if the
// provider's file has them too. They belong at the end of the provider's chain, each once.
type behind struct {
	plugins []json.RawMessage
	types   []string
	source  *netconf.Conflist // the provider's, as it is
	lacking []string          // those of types that it lacks
}

// add takes the plugins of a file of ours. Of a type that two files have, the first counts.
func (b *behind) add(own *netconf.Conflist) {
	var list struct {
		Plugins []json.RawMessage `json:"plugins"`
	}
	_ = json.Unmarshal(own.Data, &list) // it was read
	for i := 1; i < len(own.Types); i++ {
		if !slices.Contains(b.types, own.Types[i]) {
			b.plugins = append(b.plugins, list.Plugins[i])
			b.types = append(b.types, own.Types[i])
		}
	}
}

// giveTo returns the provider's conflist with those of the plugins at its end that it lacks. The
// configuration of one plugin becomes a list, in a file for lists, as the installers make it.
func (b *behind) giveTo(source *netconf.Conflist) (*netconf.Conflist, error) {
	b.source, b.lacking = source, nil
	list, plugins, err := asList(source)
	if err != nil {
		return nil, err
	}
	path := strings.TrimSuffix(source.Path, filepath.Ext(source.Path)) + ".conflist"
	for i, plugin := range b.plugins {
		if !slices.Contains(source.Types, b.types[i]) {
			plugins = append(plugins, plugin)
			b.lacking = append(b.lacking, b.types[i])
		}
	}
	if b.lacking == nil {
		return source, nil
	}
	list["plugins"] = raw(plugins)
	var content bytes.Buffer
	if err := json.Indent(&content, raw(list), "", "  "); err != nil {
		return nil, err
	}
	content.WriteByte('\n')
	return &netconf.Conflist{Path: path, Name: source.Name, CNIVersion: source.CNIVersion,
		Data: content.Bytes(), Types: slices.Concat(source.Types, b.lacking)}, nil
}

// asList returns the keys of a list and its plugins. That of one plugin is made one.
func asList(c *netconf.Conflist) (
	list map[string]json.RawMessage, plugins []json.RawMessage, err error,
) {
	list = netconf.ObjectOf(c.Data)
	if list["plugins"] == nil {
		list = map[string]json.RawMessage{"name": raw(c.Name), "cniVersion": raw(c.CNIVersion)}
		return list, []json.RawMessage{c.Data}, nil
	}
	err = json.Unmarshal(list["plugins"], &plugins)
	return list, plugins, err
}

// write writes what giveTo returned, whole.
func (b *behind) write(given *netconf.Conflist) error {
	if b.lacking == nil {
		return nil
	}
	like, err := os.Stat(b.source.Path)
	if err == nil {
		err = durable.ReplaceLike(given.Path, bytes.NewReader(given.Data), like)
	}
	if err == nil && given.Path != b.source.Path {
		err = durable.Remove(b.source.Path)
	}
	return err
}

// sentences say what becomes of the plugins.
func (b *behind) sentences(to string) (texts []string) {
	for _, plugin := range b.types {
		text := fmt.Sprintf("%s was behind unwind: %s has it, and has it once", plugin, to)
		if slices.Contains(b.lacking, plugin) {
			text = fmt.Sprintf("%s was behind unwind: it is now at the end of %s", plugin, to)
		}
		if known.Of(plugin).Restarts {
			text += "; if " + plugin + "'s pod on this node is not ready then, start it anew"
		}
		texts = append(texts, text)
	}
	return texts
}

// returnBehind returns the plugins behind unwind in a file of ours to the provider's, before that
// file goes. It returns sentences about it.
func returnBehind(own *netconf.Conflist) ([]string, error) {
	var b behind
	if b.add(own); len(b.types) == 0 {
		return nil, nil
	}
	source, err := netconf.ReadConflist(own.Unwind.ChainFile)
	if err == nil && source.Unwind != nil {
		err = errors.New("it runs unwind itself")
	}
	var given *netconf.Conflist
	if err == nil {
		given, err = b.giveTo(source)
	}
	if err == nil {
		err = b.write(given)
	}
	if err != nil {
		return nil, fmt.Errorf("%s of %s could not be returned to %s: %w",
			strings.Join(b.types, ", "), own.Path, own.Unwind.ChainFile, err)
	}
	return b.sentences(given.Path), nil
}
