package netconf

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/containernetworking/cni/pkg/utils"
)

// Conflist is a network configuration in a file, as libcni reads it: a list of plugins, or the
// configuration of one.
type Conflist struct {
	Path       string
	Name       string // of the network
	CNIVersion string
	Data       []byte
	Types      []string // of its plugins, in their order
	Unwind     *Conf    // the entry of unwind, or nil
}

// Conflists returns the paths of the configurations in a directory (/etc/cni/net.d), in the order
// of a runtime: the first is the node's network. It returns none for a missing directory.
func Conflists(dir string) ([]string, error) {
	return filesIn(dir, ".conflist", ".conf", ".json") // as libcni
}

// filesIn returns the paths of the files in a directory with one of the extensions.
func filesIn(dir string, extensions ...string) (paths []string, err error) {
	files, err := os.ReadDir(dir) // sorted by name
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, f := range files {
		if !f.IsDir() && slices.Contains(extensions, filepath.Ext(f.Name())) {
			paths = append(paths, filepath.Join(dir, f.Name()))
		}
	}
	return paths, err
}

// ReadConflist reads the configuration in a file, as ParseConflist does. Errors do not contain the
// path.
func ReadConflist(path string) (*Conflist, error) {
	data, err := ReadFile(path)
	if err != nil {
		return nil, err
	}
	c, err := ParseConflist(data)
	if c != nil {
		c.Path = path
	}
	return c, err
}

// ParseConflist reads a configuration. For an error in unwind's own entry, it also returns the rest
// of the Conflist.
func ParseConflist(data []byte) (*Conflist, error) {
	if len(data) > MaxConfig {
		return nil, fmt.Errorf("more than %d bytes", MaxConfig)
	}
	var list struct {
		Name       string            `json:"name"`
		CNIVersion string            `json:"cniVersion"`
		Type       string            `json:"type"`
		Plugins    []json.RawMessage `json:"plugins"`
	}
	err := json.Unmarshal(data, &list)
	if err != nil {
		return nil, jsonError(err)
	}
	if list.Plugins == nil && list.Type != "" {
		list.Plugins = []json.RawMessage{data}
	}
	c := &Conflist{Name: list.Name, CNIVersion: list.CNIVersion, Data: data}
	for i, raw := range list.Plugins {
		var one struct {
			Type string `json:"type"`
		}
		if err := json.Unmarshal(raw, &one); err != nil {
			return nil, fmt.Errorf("plugins[%d]: %w", i, jsonError(err))
		}
		c.Types = append(c.Types, one.Type)
		if one.Type == Name && c.Unwind == nil {
			entry := ObjectOf(raw)
			entry["name"], entry["cniVersion"] = Marshal(list.Name), Marshal(list.CNIVersion)
			var confErr error
			c.Unwind, confErr = ParseConf(Marshal(entry))
			err = errors.Join(err, confErr)
		}
	}
	return c, err
}

// Plain returns the chain of a configuration without unwind in it, as the runtime runs it, with the
// configuration that unwind would have for it.
func (c *Conflist) Plain() (*Chain, *Conf, error) {
	conf := DefaultConf()
	if err := utils.ValidateNetworkName(c.Name); err != nil {
		return nil, nil, err
	}
	conf.Name, conf.ChainFile = c.Name, c.Path
	chain, err := conf.ParseChain(c.Data, "")
	return chain, conf, err
}
