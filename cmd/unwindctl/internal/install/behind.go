package install

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/cmd/unwindctl/internal/providers"
	"cni-unwind/plugin/netconf"
)

// behind holds plugins that another program has added after unwind in our list, such as the
// installer of a mesh that mistakes our list for the provider's. There they bypass unwind, and they
// run twice if the provider's list also contains them. They belong at the end of the provider's
// chain, each once.
type behind struct {
	plugins []json.RawMessage
	types   []string
	lacking []string // the types that are not in the provider's list
}

// behindIn returns the plugins after unwind in our file. There are none if it is not a list.
func behindIn(own *netconf.Conflist) (b behind) {
	if _, plugins, err := splitList(own); err == nil {
		b.plugins, b.types = plugins[1:], own.Types[1:]
	}
	return b
}

// giveTo returns the provider's list, and appends the plugins that it lacks.
func (b *behind) giveTo(source *netconf.Conflist) (*netconf.Conflist, error) {
	b.lacking = nil
	if len(b.types) == 0 {
		return source, nil
	}
	list, plugins, err := splitList(source)
	if err != nil {
		return nil, err
	}
	for i, plugin := range b.plugins {
		if !slices.Contains(slices.Concat(source.Types, b.lacking), b.types[i]) {
			plugins = append(plugins, plugin)
			b.lacking = append(b.lacking, b.types[i])
		}
	}
	if b.lacking == nil {
		return source, nil
	}
	list["plugins"] = raw(plugins)
	given := *source
	content, err := json.MarshalIndent(list, "", "  ")
	given.Data, given.Types = append(content, '\n'), slices.Concat(source.Types, b.lacking)
	return &given, err
}

func splitList(c *netconf.Conflist) (
	list map[string]json.RawMessage, plugins []json.RawMessage, err error,
) {
	list = netconf.ObjectOf(c.Data)
	if list["plugins"] == nil {
		return nil, nil, errors.New("not a list of plugins")
	}
	err = json.Unmarshal(list["plugins"], &plugins)
	return list, plugins, err
}

func (b *behind) write(given *netconf.Conflist) error {
	if b.lacking == nil {
		return nil
	}
	like, err := os.Stat(given.Path)
	if err != nil {
		return err
	}
	return durable.ReplaceLike(given.Path, bytes.NewReader(given.Data), like)
}

// sentences returns a text for each plugin, which continues "would move:", "moved:" or "returned:".
func (b *behind) sentences(to string) (texts []string) {
	for _, plugin := range b.types {
		text := fmt.Sprintf("%s out of unwind's file, because %s already contains it", plugin, to)
		if slices.Contains(b.lacking, plugin) {
			text = fmt.Sprintf("%s from unwind's file to the end of %s", plugin, to)
		}
		if providers.Of(plugin).Restarts {
			text += "; if " + plugin + "'s pod on this node is not ready afterwards, restart it"
		}
		texts = append(texts, text)
	}
	return texts
}

// returnBehind returns a text about each plugin after unwind in our file, and a function that moves
// them to the provider's file, before our file is removed.
func returnBehind(own *netconf.Conflist) (texts []string, move func() error, err error) {
	b := behindIn(own)
	source, err := netconf.ReadConflist(own.Unwind.ChainFile)
	if err == nil && source.Unwind != nil {
		err = errors.New("the file already runs unwind")
	}
	var given *netconf.Conflist
	if err == nil {
		given, err = b.giveTo(source)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("cannot move %s from %s back to %s: %w",
			strings.Join(b.types, ", "), own.Path, own.Unwind.ChainFile, err)
	}
	return b.sentences(given.Path), func() error { return b.write(given) }, nil
}
