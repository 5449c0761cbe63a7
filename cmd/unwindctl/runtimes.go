package main

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"

	"cni-unwind/plugin"
)

// The folders of a runtime that says nothing else: containerd internal/cri/config/config_unix.go, CRI-O
// pkg/config/config_unix.go, nerdctl pkg/defaults/defaults_linux.go.
const (
	defaultConfDir = "/etc/cni/net.d"
	defaultBinDir  = "/opt/cni/bin"
)

// runtimePaths says where a runtime keeps things, read from its configuration. Paths are the runtime's own: below the root
// that was looked at, and without it.
type runtimePaths struct {
	Name     string   // containerd, cri-o, k3s, ...
	Config   string   // the file that says so; "" if defaults are taken
	ConfDir  string   // of conflists
	BinDirs  []string // of plugins; unwind is installed into the first
	Socket   string   // CRI; "" if it is none
	MaxConfs int      // containerd's max_conf_num; 1 if it has no such thing
	Problems []string // what in that configuration is against an install

	DefaultNetwork string   // the only network that it takes; "" for that of the first conflist
	Notes          []string // what to know of it that is not against an install
	Major          int      // of its version, as far as the configuration tells; else 0
}

// findRuntimes returns those whose configuration, state folder or socket is on this machine below root ("/" but in tests). A
// configuration that cannot be read is an error that comes with the others.
func findRuntimes(root string) ([]runtimePaths, error) {
	var found []runtimePaths
	var errs []error
	for _, look := range []func(string) (*runtimePaths, error){
		findContainerd, findCRIO, findK3s, findRKE2, findMicroK8s, findNerdctl, findPodman, findNomad,
	} {
		r, err := look(root)
		if err != nil {
			errs = append(errs, err)
		}
		if r != nil {
			r.check(root)
			found = append(found, *r)
		}
	}
	return found, errors.Join(errs...)
}

// check looks for what is against an install in any runtime.
func (r *runtimePaths) check(root string) {
	if r.MaxConfs != 1 {
		r.Problems = append(r.Problems, fmt.Sprintf("max_conf_num is %d in %s: containerd attaches a pod by that many files of %s, "+
			"and so by the provider's, past unwind; set it to 1", r.MaxConfs, cmp.Or(r.Config, r.Name), r.ConfDir))
	}
	if r.DefaultNetwork == "" {
		return
	}
	paths, _ := plugin.Conflists(filepath.Join(root, r.ConfDir))
	for _, path := range paths {
		if c, err := plugin.ReadConflist(path); err == nil && c.Unwind == nil {
			if c.Name != r.DefaultNetwork {
				r.Problems = append(r.Problems, r.otherNetwork(c.Name, filepath.Base(path)))
			}
			return
		}
	}
}

// otherNetwork is the problem of a runtime that would not take the network that is wrapped.
func (r *runtimePaths) otherNetwork(name, file string) string {
	return fmt.Sprintf("cni_default_network is %q in %s, and %s is of network %q: %s would not take it; name the file of that "+
		"network with --conf", r.DefaultNetwork, r.Config, file, name, r.Name)
}

// chooseRuntime returns the one that is named, or the only one. Several that share their folders are one.
func chooseRuntime(found []runtimePaths, name string) (runtimePaths, error) {
	if name != "" {
		for _, r := range found {
			if r.Name == name {
				return r, nil
			}
		}
		return runtimePaths{}, usageError{fmt.Errorf("runtime %q is not on this machine; found: %s", name, orNone(namesOf(found)))}
	}
	if len(found) == 0 {
		return runtimePaths{ConfDir: defaultConfDir, BinDirs: []string{defaultBinDir}, MaxConfs: 1}, nil
	}
	for _, r := range found[1:] {
		if r.ConfDir != found[0].ConfDir || r.BinDirs[0] != found[0].BinDirs[0] {
			return runtimePaths{}, &severalError{found}
		}
	}
	one := found[0]
	for _, r := range found[1:] {
		one.Problems = append(slices.Clone(one.Problems), r.Problems...)
		one.Notes = append(slices.Clone(one.Notes), r.Notes...)
	}
	return one, nil
}

func namesOf(found []runtimePaths) string {
	var names []string
	for _, r := range found {
		names = append(names, r.Name)
	}
	return strings.Join(names, ", ")
}

// severalError is that of runtimes between which somebody has to choose.
type severalError struct{ found []runtimePaths }

func (e *severalError) Error() string {
	var text strings.Builder
	fmt.Fprintf(&text, "several runtimes are on this machine, with different folders:")
	for _, r := range e.found {
		fmt.Fprintf(&text, "\n  %s: conflists in %s, plugins in %s", r.Name, r.ConfDir, strings.Join(r.BinDirs, ", "))
	}
	return text.String()
}

func (e *severalError) Hint() string {
	return fmt.Sprintf("name one: --runtime %s", e.found[0].Name)
}

// findCRIO reads crio.conf and then every file below crio.conf.d in lexical order, whatever its extension; a later value
// takes the place of an earlier one, and plugin_dir, if it is still there, comes after plugin_dirs (cri-o pkg/config/config.go
// UpdateFromPath, NetworkConfig.Validate; docs/crio.conf.5.md). OpenShift's drop-in says /etc/kubernetes/cni/net.d and
// /var/lib/cni/bin (machine-config-operator templates/worker/01-worker-container-runtime/_base/files/crio.yaml).
func findCRIO(root string) (*runtimePaths, error) {
	const config, dropIns, socket = "/etc/crio/crio.conf", "/etc/crio/crio.conf.d", "/var/run/crio/crio.sock"
	if !anyExists(root, config, dropIns, socket, "/run/crio/crio.sock") {
		return nil, nil
	}
	r := &runtimePaths{Name: "cri-o", ConfDir: defaultConfDir, Socket: socket, MaxConfs: 1}
	files := []string{config}
	err := filepath.WalkDir(filepath.Join(root, dropIns), func(path string, f fs.DirEntry, err error) error {
		if err == nil && !f.IsDir() {
			files = append(files, strings.TrimPrefix(path, strings.TrimSuffix(root, "/")))
		}
		return ignoreMissing(err)
	})
	dir := ""
	for _, file := range files {
		table, readErr := readTOML(root, file)
		err = errors.Join(err, readErr)
		network := tableAt(table, "crio", "network")
		if len(network) > 0 {
			r.Config = file
		}
		setString(&r.ConfDir, network["network_dir"])
		setString(&r.DefaultNetwork, network["cni_default_network"])
		setString(&dir, network["plugin_dir"])
		if dirs := stringsOf(network["plugin_dirs"]); dirs != nil {
			r.BinDirs = dirs
		}
		setString(&r.Socket, tableAt(table, "crio", "api")["listen"])
	}
	if r.BinDirs == nil {
		r.BinDirs = []string{defaultBinDir}
	}
	if dir != "" {
		r.BinDirs = append(r.BinDirs, dir)
	}
	r.clean()
	return r, err
}

// findNerdctl reads nerdctl.toml (nerdctl docs/config.md); without one, the first folder of plugins that is there is taken
// (nerdctl pkg/defaults/defaults_linux.go CNIPath).
func findNerdctl(root string) (*runtimePaths, error) {
	const config = "/etc/nerdctl/nerdctl.toml"
	if !anyExists(root, config, "/var/lib/nerdctl") {
		return nil, nil
	}
	r := &runtimePaths{Name: "nerdctl", ConfDir: defaultConfDir, BinDirs: firstThere(root, defaultBinDir, "/usr/local/libexec/cni",
		"/usr/local/lib/cni", "/usr/libexec/cni", "/usr/lib/cni")[:1], MaxConfs: 1, Notes: byName("nerdctl")}
	table, err := readTOML(root, config)
	if len(table) > 0 {
		r.Config = config
	}
	setString(&r.ConfDir, table["cni_netconfpath"])
	setString(&r.BinDirs[0], table["cni_path"])
	r.clean()
	return r, err
}

// findPodman finds one that is told to use CNI: podman 4 and earlier can, and take netavark if nothing says so
// (containers.conf(5) network_backend, network_config_dir, cni_plugin_dirs).
func findPodman(root string) (*runtimePaths, error) {
	r := &runtimePaths{Name: "podman", ConfDir: defaultConfDir, MaxConfs: 1, Notes: byName("podman"), BinDirs: []string{
		"/usr/local/libexec/cni", "/usr/libexec/cni", "/usr/local/lib/cni", "/usr/lib/cni", "/opt/cni/bin"}}
	backend := ""
	var errs []error
	for _, file := range []string{"/usr/share/containers/containers.conf", "/etc/containers/containers.conf"} {
		table, err := readTOML(root, file)
		errs = append(errs, err)
		network := tableAt(table, "network")
		if len(network) > 0 {
			r.Config = file
		}
		setString(&backend, network["network_backend"])
		setString(&r.ConfDir, network["network_config_dir"])
		if dirs := stringsOf(network["cni_plugin_dirs"]); dirs != nil {
			r.BinDirs = dirs
		}
	}
	if backend != "cni" {
		return nil, nil
	}
	r.BinDirs = firstThere(root, r.BinDirs...)
	r.clean()
	return r, errors.Join(errs...)
}

// findNomad takes Nomad's defaults (Nomad's client block: cni_path, cni_config_dir); its configuration, in HCL, is not read.
func findNomad(root string) (*runtimePaths, error) {
	const confDir = "/opt/cni/config"
	if !anyExists(root, confDir) {
		return nil, nil
	}
	return &runtimePaths{Name: "nomad", ConfDir: confDir, BinDirs: []string{defaultBinDir}, MaxConfs: 1, Notes: byName("nomad")}, nil
}

// byName is the note of a runtime that has a network, and so a conflist, for each name.
func byName(runtime string) []string {
	return []string{runtime + " takes a network by its name, each from its own file: --conf says which one is wrapped"}
}

// firstThere returns the folders from the first on that is there, or all.
func firstThere(root string, dirs ...string) []string {
	for i, dir := range dirs {
		if anyExists(root, dir) {
			return slices.Clone(dirs[i:])
		}
	}
	return slices.Clone(dirs)
}

func (r *runtimePaths) clean() {
	r.ConfDir = filepath.Clean(r.ConfDir)
	for i := range r.BinDirs {
		r.BinDirs[i] = filepath.Clean(r.BinDirs[i])
	}
	r.Socket = strings.TrimPrefix(r.Socket, "unix://")
}

func anyExists(root string, paths ...string) bool {
	return slices.ContainsFunc(paths, func(path string) bool {
		_, err := os.Stat(filepath.Join(root, path))
		return err == nil
	})
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// readTOML reads a file below root. One that is not there has nothing in it. An error shows none of it: it may hold secrets.
func readTOML(root, path string) (map[string]any, error) {
	data, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		return nil, ignoreMissing(err)
	}
	table := map[string]any{}
	if err := toml.Unmarshal(data, &table); err != nil {
		var where *toml.DecodeError
		if errors.As(err, &where) {
			row, column := where.Position()
			return nil, fmt.Errorf("%s: not valid TOML in line %d, column %d", path, row, column)
		}
		return nil, fmt.Errorf("%s: not valid TOML", path)
	}
	return table, nil
}

// tableAt returns the table at a path of keys, nil if there is none.
func tableAt(table map[string]any, keys ...string) map[string]any {
	for _, key := range keys {
		table, _ = table[key].(map[string]any)
	}
	return table
}

// setString sets *to if the value is a string that says something.
func setString(to *string, value any) {
	if s, ok := value.(string); ok && s != "" {
		*to = s
	}
}

// stringsOf returns a list's strings, nil if it has none.
func stringsOf(value any) []string {
	var all []string
	list, _ := value.([]any)
	for _, one := range list {
		if s, ok := one.(string); ok && s != "" {
			all = append(all, s)
		}
	}
	return all
}
