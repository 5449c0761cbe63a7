package netconf

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/utils"
)

// Conflist is a network configuration in a file that libcni reads: a list of plugins, or the
// configuration of a single plugin.
type Conflist struct {
	Path       string
	Name       string // the network's name
	CNIVersion string
	Data       []byte
	Types      []string // the types of its plugins, in the order of the file
	Unwind     *Conf    // unwind's entry, or nil

	plugins []json.RawMessage // in the order of Types
}

// ReadConflist reads the configuration in a file. Its errors do not contain the path.
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

// ParseConflist reads a configuration. If only unwind's own entry is invalid, it returns both the
// Conflist and an error.
func ParseConflist(data []byte) (*Conflist, error) {
	list, err := parseList(data)
	if err != nil {
		return nil, err
	}
	c := &Conflist{Name: list.Name, CNIVersion: list.CNIVersion, Data: data}
	if list.Type == Name { // unwindctl's .json file, or a copy of it: a plugin that contains a list
		list.Plugins = slices.Concat([]json.RawMessage{data}, list.Plugins)
	}
	for i, raw := range list.Plugins {
		var one struct {
			Type string `json:"type"`
		}
		if err := json.Unmarshal(raw, &one); err != nil {
			return nil, fmt.Errorf("plugins[%d]: %w", i, jsonError(err))
		}
		if i > 0 && one.Type == Name && list.Type == Name {
			continue
		}
		c.Types, c.plugins = append(c.Types, one.Type), append(c.plugins, raw)
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

// Chain returns the chain that unwind runs for a configuration, and unwind's entry. For a
// configuration without unwind, it returns the chain that the runtime runs, and the defaults.
func (c *Conflist) Chain() (chain *Chain, conf *Conf, err error) {
	if conf = c.Unwind; conf != nil {
		conf.Name = c.Name
		chain, err = conf.LoadChain()
		return chain, conf, err
	}
	if err := utils.ValidateNetworkName(c.Name); err != nil {
		return nil, nil, err
	}
	conf = DefaultConf()
	conf.Name, conf.ChainFile = c.Name, c.Path
	chain, err = conf.ParseChain(c.Data, "")
	return chain, conf, err
}

// list is a list of plugins as libcni reads it. A single plugin's configuration is a list of one.
type list struct {
	Name         string            `json:"name"`
	CNIVersion   string            `json:"cniVersion"`
	CNIVersions  []string          `json:"cniVersions"`
	DisableCheck Flag              `json:"disableCheck"`
	DisableGC    Flag              `json:"disableGC"`
	OnlyInlined  Flag              `json:"loadOnlyInlinedPlugins"`
	Plugins      []json.RawMessage `json:"plugins"`
	Type         string            `json:"type"`
}

func parseList(data []byte) (l list, err error) {
	if len(data) > MaxConfig {
		return l, fmt.Errorf("too large: more than %d bytes", MaxConfig)
	}
	if err := json.Unmarshal(data, &l); err != nil {
		return l, jsonError(err)
	}
	if l.Plugins == nil && l.Type != "" {
		l.Plugins, l.OnlyInlined = []json.RawMessage{data}, true
	}
	return l, nil
}

// Flag is a bool that may also be a string, as libcni allows.
type Flag bool

func (f *Flag) UnmarshalJSON(data []byte) error {
	switch strings.ToLower(strings.Trim(string(data), `"`)) {
	case "true":
		*f = true
	case "false", "null":
		*f = false
	default:
		return &json.UnmarshalTypeError{Value: excerpt(data), Type: reflect.TypeFor[bool]()}
	}
	return nil
}

// jsonError returns an error that names the key but does not quote the input, which may be secret.
func jsonError(err error) error {
	var wrong *json.UnmarshalTypeError
	if !errors.As(err, &wrong) {
		return fmt.Errorf("not valid JSON: %w", err)
	}
	words := map[string]string{"array": "a list", "slice": "a list", "object": "an object",
		"string": "a string", "number": "a number", "bool": "true or false"}
	is := cmp.Or(words[wrong.Value], wrong.Value)
	want := cmp.Or(words[wrong.Type.Kind().String()], "an object")
	if wrong.Field == "" {
		return fmt.Errorf("%s, not %s", is, want)
	}
	return fmt.Errorf("key %q is %s, not %s", wrong.Field, is, want)
}

const readDelay = 10 * time.Second // limit for a chainFile; a disk under load may take seconds

// readChainFile reads the chain in chainFile. After readDelay, it abandons a read that hangs, for
// example because a file server does not respond. Such a read still occupies a thread.
func (c *Conf) readChainFile() (*Chain, error) {
	var chain *Chain
	read := make(chan error, 1)
	go func() {
		list, from, err := ReadProvider(c.ChainFile)
		switch {
		case err == nil && from == "":
			chain, err = c.ParseChain(list.Data, "")
		case err == nil:
			if chain, err = c.ParseChain(list.Data, ""); err == nil {
				chain.Warning = fmt.Sprintf("chainFile %s contains unwind; running the plugins of %s instead",
					c.ChainFile, from)
			}
		case errors.Is(err, fs.ErrNotExist):
			chain, err = c.readRenamed(err)
		}
		read <- err
	}()
	select {
	case err := <-read:
		return chain, err
	case <-time.After(readDelay):
		return nil, fmt.Errorf("not read within %s; check that its file system responds", readDelay)
	}
}

// readRenamed finds the chain if the chainFile is missing, because its provider may have renamed
// it. It uses the first configuration in the directory, in the runtime's order, that has the same
// network name and does not contain unwind. It uses no other network's chain, which would give pods
// other addresses under this network's name.
func (c *Conf) readRenamed(gone error) (*Chain, error) {
	paths, err := Conflists(filepath.Dir(c.ChainFile))
	if err != nil {
		return nil, gone
	}
	var other error
	for _, path := range paths {
		list, err := ReadConflist(path)
		switch {
		case err != nil || list.Unwind != nil || list.Name == "":
		case list.Name == c.Name:
			chain, err := c.ParseChain(list.Data, "")
			if err != nil {
				return nil, fmt.Errorf("%w; %s: %w", gone, path, err)
			}
			chain.Warning = fmt.Sprintf("chainFile %s is gone; using %s of the same network",
				c.ChainFile, path)
			return chain, nil
		case other == nil:
			other = fmt.Errorf("%w; run unwindctl install to switch from network %q to %q (%s), or "+
				"unwindctl off to bypass unwind", syscall.ENOENT, c.Name, list.Name, path)
		}
	}
	return nil, cmp.Or(other, gone)
}

// Copy returns the path of the copy that unwindctl keeps of the provider's configuration.
func (c *Conf) Copy() string { return filepath.Join(c.StateDir, "provider-"+c.Name+".conflist") }

// ReadProvider reads a provider's configuration. The configuration contains unwind if the
// provider's installer has made it from unwind's file (antrea's install_cni_chaining, cilium's
// chaining mode). If it does not contain unwind, or if unwind's entry contains the chain itself,
// ReadProvider returns it unchanged. Otherwise, ReadProvider replaces unwind's entry with the
// plugins of another file, and returns that file's path. The other file is the first suitable one
// of:
//
//  1. the entry's chainFile, unless the chainFile contains unwind itself;
//  2. the first configuration in path's directory that has the same network name and does not
//     contain unwind: on a node without unwind, the installer would have used this file;
//  3. the copy that unwindctl keeps of the provider's configuration.
func ReadProvider(path string) (list *Conflist, from string, err error) {
	list, err = ReadConflist(path)
	if list == nil || list.Unwind == nil || list.Unwind.ChainFile == "" {
		return list, "", err
	}
	others, _ := Conflists(filepath.Dir(path))
	paths := slices.Concat([]string{list.Unwind.ChainFile}, others, []string{list.Unwind.Copy()})
	for i, from := range paths {
		chain, err := ReadConflist(from)
		if err == nil && chain.Unwind == nil && (i == 0 || chain.Name == list.Name) {
			return list.ReplaceUnwind(chain), from, nil
		}
	}
	return nil, "", fmt.Errorf("the file contains unwind instead of the provider's plugins, and "+
		"neither another file of network %q nor %s contains them", list.Name, list.Unwind.Copy())
}

// ReplaceUnwind returns a configuration with the plugins of c, but with the chain's plugins in
// place of unwind's entry. The other keys are the chain's. ReplaceUnwind omits a plugin of c whose
// type the result already contains.
func (c *Conflist) ReplaceUnwind(chain *Conflist) *Conflist {
	var before, after []json.RawMessage
	place, types := &before, slices.Clone(chain.Types)
	for i, plugin := range c.plugins {
		if c.Types[i] == Name {
			place = &after
		} else if !slices.Contains(types, c.Types[i]) {
			*place, types = append(*place, plugin), append(types, c.Types[i])
		}
	}
	object := chain.object()
	object["plugins"] = Marshal(slices.Concat(before, chain.plugins, after))
	data, _ := json.MarshalIndent(object, "", "  ") // both were parsed before
	replaced, _ := ParseConflist(append(data, '\n'))
	replaced.Path = c.Path
	return replaced
}

// object returns the fields of a list or, for a single plugin, only the name and cniVersion.
func (c *Conflist) object() map[string]json.RawMessage {
	if list := ObjectOf(c.Data); list["plugins"] != nil {
		return list
	}
	return map[string]json.RawMessage{"name": Marshal(c.Name), "cniVersion": Marshal(c.CNIVersion)}
}

// ReadFile reads a configuration from a regular file. It doesn't follow links in a directory that
// others can write to.
func ReadFile(path string) ([]byte, error) {
	flags := os.O_RDONLY | syscall.O_NONBLOCK
	if dir, err := os.Stat(filepath.Dir(path)); err == nil && dir.Mode().Perm()&0o022 != 0 {
		flags |= syscall.O_NOFOLLOW
	}
	f, err := os.OpenFile(path, flags, 0)
	if err != nil {
		err = errors.Unwrap(err) // without the path
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%w; the network's provider has not written it, or has removed it", err)
		}
		if errors.Is(err, syscall.ELOOP) && flags&syscall.O_NOFOLLOW != 0 {
			err = fmt.Errorf("a symbolic link in a directory that other users can write to; run chmod go-w "+
				"%s", filepath.Dir(path))
		}
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, errors.New("not a regular file")
	}
	return ReadAll(f)
}

func ReadAll(r io.Reader) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, MaxConfig+1))
	if err == nil && len(data) > MaxConfig {
		err = fmt.Errorf("too large: more than %d bytes", MaxConfig)
	}
	return data, err
}

// Conflists returns the paths of the configurations in a directory, in the order in which a runtime
// reads them. The first one configures the node's network. The directory may be missing.
func Conflists(dir string) ([]string, error) {
	return filesIn(dir, ".conflist", ".conf", ".json") // the extensions that libcni reads
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

// InlineDirectory returns the plugin configurations (*.conf) in a directory, in the order of their
// names. libcni appends them to a conflist if the directory is next to it and has the network's
// name.
func InlineDirectory(dir string) (plugins []json.RawMessage, err error) {
	paths, err := filesIn(dir, ".conf")
	for _, path := range paths {
		data, err := ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		plugins = append(plugins, data)
	}
	return plugins, err
}

// FindPlugin returns the path of a plugin's binary, from the first directory in path that contains
// it.
func FindPlugin(plugin, path string) (string, error) {
	dirs := filepath.SplitList(path)
	for _, dir := range dirs {
		file := filepath.Join(dir, plugin)
		if info, err := os.Stat(file); err == nil && info.Mode().IsRegular() {
			return file, nil
		}
	}
	return "", fmt.Errorf("failed to find plugin %q in path %s", plugin, dirs) // libcni's message
}
