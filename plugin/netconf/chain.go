package netconf

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/version"

	"cni-unwind/journal"
	"cni-unwind/plugin/known"
)

// Chain is the conflist that unwind runs.
type Chain struct {
	CNIVersion   string
	DisableCheck bool
	DisableGC    bool
	Delegates    []Delegate
	Warning      string // for the log, if this is not the chain that the configuration names
}

type Delegate struct {
	Type         string
	IPAM         string                     // the IPAM plugin, or ""
	Capabilities map[string]bool            // the capabilities that are set to true
	object       map[string]json.RawMessage // its entry in the conflist
}

// maxDelegates limits a chain's length, because a journal record contains the whole chain. The
// longest chains in use have six plugins.
const maxDelegates = 500

// ErrNoChain is the error for a configuration that neither contains nor names a chain.
var ErrNoChain = errors.New(`neither "chain" nor "chainFile" is set; ` +
	`list the plugins in "chain": {"plugins": [...]}`)

func (c *Conf) LoadChain() (chain *Chain, err error) {
	switch {
	case c.Chain != nil && c.ChainFile != "":
		return nil, errors.New(`"chain" and "chainFile" are both set; keep one`)
	case c.Chain != nil:
		if chain, err = c.ParseChain(c.Chain, c.CNIVersion); err != nil {
			err = fmt.Errorf(`key "chain": %w`, err)
		}
	case c.ChainFile != "":
		if chain, err = c.readChainFile(); err != nil {
			err = fmt.Errorf("chainFile %s: %w", c.ChainFile, err)
		}
	default:
		err = ErrNoChain
	}
	return chain, err
}

// ParseChain reads a conflist, or the configuration of a single plugin. If the conflist is in a
// chainFile, and loadOnlyInlinedPlugins is not true, ParseChain adds the plugins in the directory
// with the network's name next to that file, as libcni does. defaultVersion is used if cniVersion
// is absent.
func (c *Conf) ParseChain(data []byte, defaultVersion string) (*Chain, error) {
	list, err := parseList(data)
	if err != nil {
		return nil, err
	}
	if list.Name != "" && list.Name != c.Name {
		remedy := ""
		if c.ChainFile != "" {
			remedy = "; if the network was renamed, run unwindctl install"
		}
		return nil, fmt.Errorf(`key "name" is %q, but the network is %q; `+
			"they must be the same, because plugins keep addresses and rules under that name%s",
			list.Name, c.Name, remedy)
	}
	if c.ChainFile != "" && !bool(list.OnlyInlined) {
		more, err := InlineDirectory(filepath.Join(filepath.Dir(c.ChainFile), c.Name))
		if err != nil {
			return nil, err
		}
		list.Plugins = append(list.Plugins, more...)
	}
	switch n := len(list.Plugins); {
	case n == 0:
		return nil, errors.New(`key "plugins" is missing or empty; list the plugins in it`)
	case n > maxDelegates:
		return nil, fmt.Errorf(`key "plugins" has %d plugins, but a chain may have at most %d`, n,
			maxDelegates)
	}
	chain := &Chain{DisableCheck: bool(list.DisableCheck), DisableGC: bool(list.DisableGC)}
	chain.CNIVersion, err = highest(list.CNIVersion, list.CNIVersions, defaultVersion)
	if err != nil {
		return nil, err
	}
	for i, raw := range list.Plugins {
		d, err := parseDelegate(raw)
		if err != nil {
			return nil, fmt.Errorf("plugins[%d]: %w", i, err)
		}
		chain.Delegates = append(chain.Delegates, d)
	}
	return chain, nil
}

// highest returns the version that libcni would choose: the highest one that libcni supports.
func highest(one string, listed []string, absent string) (string, error) {
	candidates := listed
	if one != "" {
		candidates = append([]string{one}, listed...)
	}
	if len(candidates) == 0 {
		candidates = []string{absent}
	}
	best, known := one, false
	for _, v := range candidates {
		tooNew, err := version.GreaterThan(v, version.Current())
		if err != nil {
			return "", fmt.Errorf("cniVersion %q: %w", v, err)
		}
		if higher, _ := version.GreaterThan(v, best); !tooNew && (higher || !known) {
			best, known = v, true
		}
	}
	if best != "" && !slices.Contains(version.All.SupportedVersions(), best) {
		return "", fmt.Errorf("cniVersion %q is not supported (supported: %s)", best,
			strings.Join(version.All.SupportedVersions(), ", "))
	}
	return best, nil
}

func parseDelegate(raw json.RawMessage) (Delegate, error) {
	var d Delegate
	var conf struct {
		Type         string          `json:"type"`
		Capabilities map[string]bool `json:"capabilities"`
		IPAM         struct {
			Type string `json:"type"`
		} `json:"ipam"`
	}
	if err := cmp.Or(json.Unmarshal(raw, &d.object), json.Unmarshal(raw, &conf)); err != nil {
		return d, jsonError(err)
	}
	d.Type, d.Capabilities = conf.Type, conf.Capabilities
	d.IPAM = known.IPAM(conf.Type, conf.IPAM.Type).Name
	maps.DeleteFunc(d.Capabilities, func(_ string, enabled bool) bool { return !enabled })
	if d.Type == "" {
		return d, errors.New(`key "type" is missing`)
	}
	for _, t := range []struct{ key, plugin string }{{"type", d.Type}, {"ipam.type", d.IPAM}} {
		if strings.ContainsAny(t.plugin, "/\x00\n") || t.plugin == "." || t.plugin == ".." {
			return d, fmt.Errorf("key %q: %q is not a valid plugin name", t.key, t.plugin)
		}
		if t.plugin == Name {
			return d, fmt.Errorf("key %q: %s cannot run inside itself; list the plugins of its chain here",
				t.key, Name)
		}
	}
	return d, nil
}

// Config returns the stdin of the delegate at index i, without prevResult: its own object, the keys
// that libcni would inject, and those that a runtime injected into unwind's entry.
func (ch *Chain) Config(i int, c *Conf) json.RawMessage {
	d := ch.Delegates[i]
	object := maps.Clone(d.object)
	for key, value := range c.Injected {
		if key == "args" {
			value = mergeArgs(object[key], value)
		}
		object[key] = value
	}
	object["name"] = Marshal(c.Name)
	object["cniVersion"] = Marshal(ch.CNIVersion)
	runtimeConfig := maps.Clone(c.RuntimeConfig)
	maps.DeleteFunc(runtimeConfig,
		func(capability string, _ json.RawMessage) bool { return !d.Capabilities[capability] })
	if len(runtimeConfig) > 0 {
		object["runtimeConfig"] = Marshal(runtimeConfig)
	}
	delete(object, "prevResult")
	return Marshal(object)
}

// Steps returns the chain's delegates as steps. MayAllocate is true in two cases: the delegate has
// an IPAM plugin other than host-local; or package known has no row for it, and no earlier delegate
// names an IPAM plugin.
func (ch *Chain) Steps(c *Conf) []journal.Step {
	var steps []journal.Step
	named := false // a delegate before this one names its IPAM plugin
	for i, d := range ch.Delegates {
		foreign := d.IPAM != "" && d.IPAM != "host-local"
		steps = append(steps, journal.Step{Index: i, Type: d.Type, Config: ch.Config(i, c),
			MayAllocate: foreign || !named && known.ByType(d.Type).Source == ""})
		named = named || d.IPAM != ""
	}
	return steps
}

// Only returns the index of the only delegate of a type, or -1 if there is none, or several.
func (ch *Chain) Only(plugin string) int {
	is := func(d Delegate) bool { return d.Type == plugin }
	first := slices.IndexFunc(ch.Delegates, is)
	if slices.ContainsFunc(ch.Delegates[first+1:], is) {
		return -1
	}
	return first
}

// mergeArgs adds injected args to a delegate's own args, as multus does. In args and in args.cni,
// an injected key replaces the delegate's key of the same name.
func mergeArgs(own, injected json.RawMessage) json.RawMessage {
	merged := ObjectOf(own)
	for key, value := range ObjectOf(injected) {
		if key == "cni" {
			cni := ObjectOf(merged[key])
			maps.Copy(cni, ObjectOf(value))
			value = Marshal(cni)
		}
		merged[key] = value
	}
	return Marshal(merged)
}

// ObjectOf decodes a JSON object; for anything else it returns an empty one.
func ObjectOf(raw json.RawMessage) map[string]json.RawMessage {
	var object map[string]json.RawMessage
	if json.Unmarshal(raw, &object) != nil || object == nil {
		return map[string]json.RawMessage{}
	}
	return object
}

// Marshal encodes a value whose encoding cannot fail, such as decoded JSON.
func Marshal(v any) json.RawMessage {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return data
}

// WithPrevResult returns a delegate's configuration with prevResult set. The configuration must
// come from Marshal.
func WithPrevResult(config, prevResult json.RawMessage) json.RawMessage {
	if len(prevResult) == 0 || len(config) < 2 {
		return config
	}
	key := `,"prevResult":`
	if len(config) == 2 {
		key = key[1:]
	}
	return slices.Concat(config[:len(config)-1], []byte(key), prevResult, []byte("}"))
}

// ExecutesIPAM reports whether the delegate is known to execute its IPAM plugin's binary.
func (d Delegate) ExecutesIPAM() bool {
	executes := known.ByType(d.Type).ExecutesIPAM
	return d.IPAM != "" && executes != nil && executes(d.IPAM, d.object)
}

// Missing returns the plugins that every ADD of the chain needs but no directory of the path list
// contains: delegates, and the IPAM plugins that delegates execute.
func (ch *Chain) Missing(path string) []string {
	var missing []string
	for _, d := range ch.Delegates {
		needed := []string{d.Type}
		if d.ExecutesIPAM() {
			needed = append(needed, d.IPAM)
		}
		for _, plugin := range needed {
			if _, err := FindPlugin(plugin, path); err != nil && !slices.Contains(missing, plugin) {
				missing = append(missing, plugin)
			}
		}
	}
	return missing
}

const ips = "ips" // the capability for static addresses

func (ch *Chain) capabilities() map[string]bool {
	all := map[string]bool{}
	for _, d := range ch.Delegates {
		maps.Copy(all, d.Capabilities)
	}
	return all
}

// AdoptIPs gives the first delegate the capability "ips", if unwind's entry declares it and no
// delegate does. For a container with static addresses, podman adds this capability to the list's
// first plugin (containers/common 0.50, libnetwork/cni/run.go, setup). With unwind, that plugin is
// unwind; without unwind, it would be the first delegate.
func (ch *Chain) AdoptIPs(c *Conf) {
	if c.Capabilities[ips] && !ch.capabilities()[ips] {
		first := map[string]bool{ips: true}
		maps.Copy(first, ch.Delegates[0].Capabilities)
		ch.Delegates[0].Capabilities = first
	}
}

// EntryCapabilities returns the capabilities that unwind's entry should declare: those of all
// delegates and, if there are any, also "ips", because podman overwrites the capabilities of an
// entry without "ips".
func (ch *Chain) EntryCapabilities() []string {
	all := ch.capabilities()
	if len(all) > 0 {
		all[ips] = true
	}
	return slices.Sorted(maps.Keys(all))
}

// LostCapabilities returns the capabilities that delegates declare but unwind's own entry does not.
// libcni drops the arguments of such capabilities.
func (ch *Chain) LostCapabilities(c *Conf) []string {
	lost := ch.capabilities()
	maps.DeleteFunc(lost, func(name string, _ bool) bool { return c.Capabilities[name] })
	return slices.Sorted(maps.Keys(lost))
}
