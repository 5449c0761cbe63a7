package netconf

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"

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
}

// ReadConflist reads the configuration in a file (see ParseConflist). Its errors do not contain the
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

// ParseConflist reads a configuration. If only unwind's own entry is invalid, it returns both the
// Conflist and an error.
func ParseConflist(data []byte) (*Conflist, error) {
	list, err := parseList(data)
	if err != nil {
		return nil, err
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

// Plain returns the chain of a configuration that does not contain unwind, so the runtime itself
// runs the chain. The Conf is the configuration that unwind would use for it.
func (c *Conflist) Plain() (*Chain, *Conf, error) {
	conf := DefaultConf()
	if err := utils.ValidateNetworkName(c.Name); err != nil {
		return nil, nil, err
	}
	conf.Name, conf.ChainFile = c.Name, c.Path
	chain, err := conf.ParseChain(c.Data, "")
	return chain, conf, err
}

// list is a list of plugins as libcni reads it. The configuration of a single plugin becomes a list
// of one.
type list struct {
	Name         string            `json:"name"`
	CNIVersion   string            `json:"cniVersion"`
	CNIVersions  []string          `json:"cniVersions"`
	DisableCheck flag              `json:"disableCheck"`
	DisableGC    flag              `json:"disableGC"`
	OnlyInlined  flag              `json:"loadOnlyInlinedPlugins"`
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

// flag is a bool that may also be a string, as libcni allows.
type flag bool

func (f *flag) UnmarshalJSON(data []byte) error {
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

// jsonError explains a JSON error by the key, without quoting the input.
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
