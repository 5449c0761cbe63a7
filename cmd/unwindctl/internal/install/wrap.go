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
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/plugin/netconf"
)

// Inline returns a list whose only plugin is unwind, with the source's bytes as unwind's chain. If
// the source already contains unwind, Inline moves the list's other plugins into the chain, or
// returns nil if there are none. It refuses a source that runtimes or unwind reject or misread.
func Inline(src *netconf.Conflist, bad error) (out []byte, err error) {
	if bad != nil {
		return nil, bad
	}
	keys, single := netconf.ObjectOf(src.Data), isSingle(src.Data)
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		for _, want := range listKeys {
			if key != want && strings.EqualFold(key, want) {
				return nil, fmt.Errorf("key %q: spell it %q; runtimes accept only this spelling", key, want)
			}
		}
	}
	switch wrapped := slices.Contains(src.Types, netconf.Name); {
	case managed(src.Data) != nil:
		return nil, managed(src.Data)
	case src.Name == "":
		return nil, errors.New(`key "name" is missing`)
	case single && filepath.Ext(src.Path) == ".conflist":
		return nil, errors.New(
			`key "plugins" is missing: a .conflist file contains a list of plugins`)
	case wrapped && len(src.Types) > 1 && src.Unwind.Chain != nil:
		return absorb(src)
	case wrapped:
		err = checkWrapped(src)
	default:
		out, err = inline(src, keys, single)
	}
	// like libcni's readBool, accept true and "true", in upper or lower case
	inlined := strings.Trim(string(keys["loadOnlyInlinedPlugins"]), `"`)
	if err != nil || src.Path == "" || single || strings.EqualFold(inlined, "true") {
		return out, err
	}
	directory := filepath.Join(filepath.Dir(src.Path), src.Name)
	if more, err := netconf.InlineDirectory(directory); err != nil || len(more) > 0 {
		return nil, cmp.Or(err, fmt.Errorf("the runtime would also run the plugins in %s, outside "+
			`unwind's chain; move them to the end of key "plugins"`, directory))
	}
	return out, nil
}

// managed returns an error if nerdctl or podman manages a conflist's network. They read the subnet
// and the bridge from the first plugin (nerdctl pkg/netutil/netutil.go, containers/common
// libnetwork/cni/cni_conversion.go). nerdctl marks its files with keys. podman names its bridges
// cni-podman1, cni-podman2 and so on. The bridge of podman's default network is cni-podman0: podman
// gives the subnet of that network to no other one.
func managed(conflist []byte) error {
	keys := netconf.ObjectOf(conflist)
	var plugins []struct{ Bridge string }
	_ = json.Unmarshal(keys["plugins"], &plugins)
	var program string
	switch {
	case keys["nerdctlID"] != nil || keys["nerdctlLabels"] != nil:
		program = "nerdctl"
	case len(plugins) > 0 && plugins[0].Bridge != "cni-podman0" &&
		strings.HasPrefix(plugins[0].Bridge, "cni-podman"):
		program = "podman"
	default:
		return nil
	}
	return fmt.Errorf("this network belongs to %[1]s, which reads the file's first plugin: with "+
		"unwind there, %[1]s gives its next network the same subnet, and %[1]s network rm does not "+
		"remove the bridge; use a conflist of your own instead", program)
}

// listKeys are a list's top-level keys, in the only spelling that libcni reads. unwind's decoder
// accepts "Plugins", too, so without a check, unwind could run a chain that libcni does not run.
var listKeys = []string{"cniVersion", "cniVersions", "name", "disableCheck", "disableGC",
	"loadOnlyInlinedPlugins", "plugins", "type"}

// inline wraps a configuration. It checks the result by reading it as a runtime and unwind do.
func inline(src *netconf.Conflist, keys map[string]json.RawMessage, single bool) ([]byte, error) {
	if single { // all other keys belong to the plugin
		keys = map[string]json.RawMessage{"cniVersion": keys["cniVersion"]}
	}
	chain, err := readBack(layOut(src, keys, nil))
	if err != nil {
		return nil, err
	}
	for _, key := range []string{"cniVersion", "cniVersions"} {
		if v := string(keys[key]); v != "" && v != `""` && v != "[]" && v != "null" {
			out := layOut(src, keys, chain.EntryCapabilities())
			_, err = readBack(out)
			return out, err
		}
	}
	return nil, errors.New(`key "cniVersion" is missing; set it to a CNI version that the plugins ` +
		`support: without the key, a runtime uses 0.1.0, but unwind uses another version`)
}

// before and after are the white space that layOut adds around the chain. Restore removes it.
const before, after = " ", "    "

// layOut writes the list with unwind's entry, whose last key is "chain". keys are the keys of the
// original list; layOut copies those that it doesn't set itself.
func layOut(src *netconf.Conflist, keys map[string]json.RawMessage, capabilities []string) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, `{
  "cniVersion": "1.0.0",
  "cniVersions": ["1.0.0", "1.1.0"],
  "name": %s,
  "loadOnlyInlinedPlugins": true,
`, netconf.Marshal(src.Name))
	own := []string{"cniVersion", "cniVersions", "name", "plugins", "loadOnlyInlinedPlugins"}
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		if !slices.Contains(own, key) {
			fmt.Fprintf(&b, "  %s: %s,\n", netconf.Marshal(key), keys[key])
		}
	}
	fmt.Fprintf(&b, "  \"plugins\": [\n    {\n      \"type\": %q,\n", netconf.Name)
	var declared []string
	for _, c := range capabilities {
		declared = append(declared, string(netconf.Marshal(c))+": true")
	}
	if declared != nil {
		fmt.Fprintf(&b, "      \"capabilities\": { %s },\n", strings.Join(declared, ", "))
	}
	fmt.Fprintf(&b, "      \"chain\":"+before+"%s"+after+"}\n  ]\n}\n", src.Data)
	return b.Bytes()
}

// readBack reads a wrapped list as a runtime does, and the chain in unwind's entry as unwind does.
func readBack(wrapped []byte) (*netconf.Chain, error) {
	if _, err := netconf.ParseConflist(wrapped); err != nil {
		return nil, fmt.Errorf("the wrapped configuration: %w", err)
	}
	list, err := libcni.NetworkConfFromBytes(wrapped)
	if err != nil {
		return nil, err
	}
	entry, err := libcni.InjectConf(list.Plugins[0], map[string]any{"name": list.Name,
		"cniVersion": list.CNIVersion})
	var conf *netconf.Conf
	if err == nil {
		conf, err = netconf.ParseConf(entry.Bytes)
	}
	if err != nil {
		return nil, err
	}
	return conf.LoadChain()
}

// absorb moves the plugins that an installer has added next to unwind into unwind's chain, and
// returns the resulting list.
func absorb(c *netconf.Conflist) ([]byte, error) {
	list, conf := netconf.ObjectOf(c.Data), netconf.Conf{Name: c.Name}
	var plugins []json.RawMessage
	_, err := c.Unwind.LoadChain()
	if err = cmp.Or(err, json.Unmarshal(list["plugins"], &plugins)); err != nil {
		return nil, err
	}
	entry := netconf.ObjectOf(plugins[slices.Index(c.Types, netconf.Name)])
	inner, err := netconf.ParseConflist(entry["chain"])
	if err != nil {
		return nil, err
	}
	entry["chain"] = c.ReplaceUnwind(inner).Data
	chain, err := conf.ParseChain(entry["chain"], "")
	if err != nil {
		return nil, err
	}
	setCapabilities(entry, chain.EntryCapabilities())
	list["plugins"] = netconf.Marshal([]any{entry})
	out, err := json.MarshalIndent(list, "", "  ")
	return append(out, '\n'), err
}

// checkWrapped returns an error if a list that already contains unwind has a problem.
func checkWrapped(list *netconf.Conflist) error {
	if len(list.Types) > 1 {
		return errNotAlone
	}
	if unknown := list.Unwind.Warnings; len(unknown) > 0 {
		return errors.New(strings.Join(unknown, "\n"))
	}
	if list.Unwind.Chain == nil && list.Unwind.ChainFile != "" {
		return nil // the chain's file belongs to the provider
	}
	_, err := list.Unwind.LoadChain()
	return err
}

// errNotAlone is the error for a list with plugins next to unwind: unwind cannot undo them.
var errNotAlone = fmt.Errorf("%s must be the only plugin in the list; to move the others into its "+
	"chain, run unwindctl wrap --in-place or, if the entry has a chainFile, unwindctl install",
	netconf.Name)

// isSingle reports whether unwind reads x as the configuration of one plugin, not as a list.
func isSingle(x []byte) bool {
	var conf struct {
		Type    string            `json:"type"`
		Plugins []json.RawMessage `json:"plugins"`
	}
	return json.Unmarshal(x, &conf) == nil && conf.Type != "" && conf.Plugins == nil
}

// Restore returns the chain in unwind's entry, with the white space around it, or nil if the source
// has no such entry. It accepts errors in unwind's other keys, so that a broken file can be
// unwrapped.
func Restore(src *netconf.Conflist, _ error) ([]byte, error) {
	if !slices.Contains(src.Types, netconf.Name) {
		return nil, nil
	}
	if len(src.Types) > 1 {
		return nil, errNotAlone
	}
	var list struct {
		Plugins []json.RawMessage `json:"plugins"`
	}
	if err := json.Unmarshal(src.Data, &list); err != nil {
		return nil, err
	}
	entry := netconf.ObjectOf(src.Data)
	if list.Plugins != nil {
		entry = netconf.ObjectOf(list.Plugins[0])
	}
	chain := entry["chain"]
	missing := chain == nil || string(chain) == "null"
	switch {
	case missing && entry["chainFile"] != nil:
		return nil, errors.New(
			`the entry sets "chainFile" instead of "chain", so there is nothing to unwrap; ` +
				`to switch unwind off, run unwindctl off`)
	case missing:
		return nil, errors.New(`key "chain" is missing`)
	case chain[0] != '{':
		return nil, errors.New(`key "chain" must be an object`)
	}
	// Search from the end, because wrap writes the chain last. If somebody has added the same text
	// after the chain, the result does not change.
	const space = " \t\r\n"
	start := bytes.LastIndex(src.Data, chain)
	end := len(src.Data) - len(bytes.TrimLeft(src.Data[start+len(chain):], space))
	if head := bytes.TrimRight(src.Data[:start], space); bytes.HasSuffix(head, []byte(":")) {
		start = len(head)
	}
	restored := bytes.TrimPrefix(src.Data[start:end], []byte(before))
	return bytes.TrimSuffix(restored, []byte(after)), nil
}

// Rewrite changes a configuration. It prints the result or, with InPlace, writes it to the file.
type Rewrite struct {
	// Change returns nil if there is nothing to change. The list's Path is "" for the standard input.
	// bad is the problem with unwind's own entry, or nil.
	Change    func(list *netconf.Conflist, bad error) ([]byte, error)
	Unchanged string                  // the reason why there is nothing to change
	Changed   string                  // what happened to a file that was replaced
	Refuse    func(path string) error // with InPlace: why not to replace a file; may be nil
	InPlace   bool                    // replace a changed file or, if it is a link, the link's target
	Streams   term.Streams
}

// Run rewrites a file, or the standard input if path is "-".
func (r Rewrite) Run(path string) error {
	shown, read := path, func() ([]byte, error) {
		target, err := followLinks(path)
		if err != nil {
			return nil, err
		}
		return netconf.ReadFile(target)
	}
	if path == "-" {
		path, shown, read = "", "stdin", func() ([]byte, error) { return netconf.ReadAll(r.Streams.In) }
	}
	data, err := read()
	if err == nil {
		err = r.rewrite(path, shown, data)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", shown, err)
	}
	return nil
}

func (r Rewrite) rewrite(path, shown string, data []byte) error {
	list, bad := netconf.ParseConflist(data)
	if list == nil {
		return bad
	}
	list.Path = path
	result, err := r.Change(list, bad)
	if err != nil {
		return err
	}
	if result == nil {
		fmt.Fprintf(r.Streams.Err, "%s: %s; nothing to change\n", shown, r.Unchanged)
		result = data
	} else if r.InPlace {
		if r.Refuse != nil {
			if err := r.Refuse(path); err != nil {
				return err
			}
		}
		if err = replace(path, result); err == nil {
			_, err = fmt.Fprintf(r.Streams.Out, "%s: %s\n", shown, r.Changed)
		}
	}
	if !r.InPlace {
		_, err = r.Streams.Out.Write(result)
	}
	return err
}

// NotUsable returns an error if no pod could start once a file is wrapped in place:
//
//  1. A conflist in use runs unwind with this file as its chain.
//  2. The runtimes that use the file's directory have no plugin unwind. NotUsable queries no
//     runtime, so it checks their usual directories, and nothing if it knows no runtime.
func NotUsable(path string) error {
	path, err := filepath.Abs(path)
	if err != nil {
		return err
	}
	installed, _ := node.Installed(filepath.Dir(path))
	for _, c := range installed {
		if !isKept(c) && same(c.Unwind.ChainFile, path) {
			return term.WithHint("leave the file as it is; to wrap it instead of using "+
				filepath.Base(c.Path)+", first run unwindctl off", "%s runs unwind with this file as its "+
				"chain, and unwind cannot run inside itself: no pod could start", c.Path)
		}
	}
	runtimes, _ := node.Read("/")
	dirs := node.BinDirs(slices.DeleteFunc(runtimes, func(r node.Runtime) bool {
		return !same(r.ConfDir, filepath.Dir(path))
	}))
	if len(dirs) == 0 || slices.ContainsFunc(dirs, func(dir string) bool {
		return !Setup{BinDir: dir}.PluginMissing()
	}) {
		return nil
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	return term.WithHint(fmt.Sprintf("first run cp %s %s/; if the runtime uses other plugin "+
		"directories, omit --in-place, and replace the file with the output",
		filepath.Join(filepath.Dir(self), netconf.Name), dirs[0]), "no plugin directory of the runtime "+
		"(%s) contains the plugin unwind: no pod could start", term.Join(dirs))
}

// followLinks returns the path of a file after following symbolic links. Like the plugin, it
// doesn't follow links in a directory that other users can write to: they could choose which file
// is replaced.
func followLinks(path string) (string, error) {
	for range 40 { // the kernel's limit, path_resolution(7)
		target, err := os.Readlink(path)
		if err != nil {
			return path, nil //nolint:nilerr // not a link, or missing: reading it reports that
		}
		dir, err := filepath.EvalSymlinks(filepath.Dir(path))
		if err != nil {
			return "", err
		}
		if info, err := os.Stat(dir); err != nil || info.Mode().Perm()&0o022 != 0 {
			return "", errors.Join(err,
				errors.New("symbolic link in a directory that other users can write to; "+
					"pass the link's target"))
		}
		path = target
		if !filepath.IsAbs(target) {
			path = filepath.Join(dir, target)
		}
	}
	return "", errors.New("too many symbolic links; pass the file itself")
}

// replace replaces a file or, if it is a symbolic link, the link's target.
func replace(path string, text []byte) error {
	err := fits(path, text)
	if err == nil {
		path, err = followLinks(path)
	}
	if err != nil {
		return err
	}
	like, err := os.Stat(path)
	if err != nil {
		return err
	}
	return durable.ReplaceLike(path, bytes.NewReader(text), like)
}

// fits returns an error if no runtime could use the text in this file, because "name" is missing or
// the extension is wrong: libcni reads a list only from a .conflist file (LoadNetworkConf).
func fits(path string, text []byte) error {
	var named struct {
		Name string `json:"name"`
	}
	if json.Unmarshal(text, &named) == nil && named.Name == "" {
		return errors.New(`the conflist would have no "name", so no runtime could use it; ` +
			`add the network's name to "chain" as "name"`)
	}
	ext, is, want := filepath.Ext(path), "a list of plugins", ".conflist"
	if isSingle(text) {
		is, want = "the configuration of one plugin", ".conf"
	}
	if (ext == ".conflist") == (want == ".conflist") {
		return nil
	}
	return term.WithHint("omit --in-place, write the output to NAME"+want+", and remove this file",
		"cannot replace this file: the output is %s, which a runtime does not read from a file with "+
			"the extension %q", is, ext)
}
