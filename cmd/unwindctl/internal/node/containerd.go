package node

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
)

// The tables of containerd's CRI plugin that have a table "cni": that of version 3 and later of the
// file, of version 2, and the short name of version 1 (containerd docs/cri/config.md;
// cmd/containerd/server/config/config.go v1MigratePluginName; plugins/cri/runtime/plugin.go
// configMigration). One of another version than its file's is not read.
const (
	criV3 = "io.containerd.cri.v1.runtime"
	criV2 = "io.containerd.grpc.v1.cri"
	criV1 = "cri"
)

// findContainerd reads /etc/containerd/config.toml. GKE's names /home/kubernetes/bin there. A
// containerd whose CRI plugin is off (as in Docker's package) does not count: no pod comes to it.
func findContainerd(root string) (*Runtime, error) {
	const config, socket = "/etc/containerd/config.toml", "/run/containerd/containerd.sock"
	// the last is the directory that its CRI plugin makes
	if !anyExists(root, config, socket, "/var/lib/containerd/"+criV2) {
		return nil, nil
	}
	return readContainerd(root, "containerd", config, socket)
}

// findK3s reads the file that K3s writes for its containerd at each start. Releases since October
// 2024 keep their plugins in data/cni, earlier ones in data/HASH/bin, another directory with each
// release (k3s#10868, https://docs.k3s.io/networking/multus-ipams); with --flannel-backend=none no
// directory is named, which leaves containerd's own (k3s pkg/agent/templates).
func findK3s(root string) (*Runtime, error) {
	const dir = "/var/lib/rancher/k3s"
	r, err := findRancher(root, "k3s", dir)
	if r != nil {
		if hash, ok := strings.CutPrefix(r.BinDirs[0], dir+"/data/"); ok &&
			strings.HasSuffix(hash, "/bin") {
			r.Problems = append(r.Problems, fmt.Sprintf("this k3s has another directory of plugins "+
				"than %s after its next upgrade, and no pod could start then: upgrade it first "+
				"(releases since October 2024 keep the directory), or give --conf-dir and "+
				"--bin-dir, and install again with the upgrade", r.BinDirs[0]))
		}
	}
	return r, err
}

// findRKE2 reads the same of RKE2, which has K3s's socket (rke2 pkg/executor/staticpod/spw.go) and
// containerd's directories.
func findRKE2(root string) (*Runtime, error) {
	return findRancher(root, "rke2", "/var/lib/rancher/rke2")
}

func findRancher(root, name, dir string) (*Runtime, error) {
	config := dir + "/agent/etc/containerd/config.toml"
	if !anyExists(root, config) {
		return nil, nil
	}
	return readContainerd(root, name, config, "/run/k3s/containerd/containerd.sock")
}

// findMicroK8s reads the file that MicroK8s makes of its template
// (microk8s-resources/default-args/containerd-template.toml, default-args/containerd for the
// socket). The directories in it are those of the snap's revision, which is another one after a
// refresh; the same below current stay.
func findMicroK8s(root string) (*Runtime, error) {
	const current = "/var/snap/microk8s/current"
	config := current + "/args/containerd.toml"
	if !anyExists(root, config) {
		return nil, nil
	}
	r, err := readContainerd(root, "microk8s", config,
		"/var/snap/microk8s/common/run/containerd.sock")
	if revision, evalErr := filepath.EvalSymlinks(filepath.Join(root, current)); r != nil &&
		evalErr == nil {
		revision = filepath.Join("/var/snap/microk8s", filepath.Base(revision))
		stay := func(path string) string {
			if rest, ok := strings.CutPrefix(path, revision+"/"); ok {
				return filepath.Join(current, rest)
			}
			return path
		}
		r.ConfDir = stay(r.ConfDir)
		for i := range r.BinDirs {
			r.BinDirs[i] = stay(r.BinDirs[i])
		}
	}
	return r, err
}

// containerdFile is one file of containerd's configuration.
type containerdFile struct {
	version  int
	cri      map[string]any // nil if it has none
	socket   string
	disabled []string
	imports  []string
}

// readContainerd reads containerd's configuration, with what it imports. It returns nil if the CRI
// plugin is off.
func readContainerd(root, name, config, socket string) (*Runtime, error) {
	r := &Runtime{Name: name, Socket: socket, MaxConfs: 1,
		Kubelet: name != "containerd" || anyExists(root, "/var/lib/kubelet", "/var/lib/k0s/kubelet")}
	if anyExists(root, config) {
		r.Config = config
	}
	files, err := containerdFiles(root, config)
	merged, replaced, version := map[string]any{}, map[string]any{}, 0
	for _, f := range files {
		version = max(version, f.version)
		mergeTables(merged, f.cri)
		if f.cri != nil {
			replaced = f.cri
		}
		setString(&r.Socket, f.socket)
		if slices.ContainsFunc(f.disabled, func(id string) bool {
			return id == criV1 || id == criV2 || id == criV3
		}) {
			return nil, err
		}
	}
	switch { // an older version than 3 is read by containerd 2 too
	case version >= 3:
		r.Major = 2
	case !reflect.DeepEqual(tableAt(merged, "cni"), tableAt(replaced, "cni")):
		r.Problems = append(r.Problems, fmt.Sprintf("the CRI plugin is configured both in %s and "+
			"in a file that it imports: containerd 1 "+
			"takes the last of them whole, containerd 2 merges them, and they do not say the same "+
			"of cni; give --conf-dir and --bin-dir", config))
	}
	r.readCNI(tableAt(merged, "cni"))
	for _, handler := range slices.Sorted(maps.Keys(tableAt(merged, "containerd", "runtimes"))) {
		dir, _ := tableAt(merged, "containerd", "runtimes", handler)["cni_conf_dir"].(string)
		if dir != "" && filepath.Clean(dir) != r.ConfDir {
			r.Notes = append(r.Notes, fmt.Sprintf("pods of the runtime class handler %q have "+
				"their conflists in %s, and pass unwind", handler, dir))
		}
	}
	return r, err
}

// containerdFiles reads a file and what it imports, in the order in which containerd does: breadth
// first, each file once, globs in lexical order, relative paths from the importing file (containerd
// cmd/containerd/server/config/config.go LoadConfigWithPlugins, resolveImports).
func containerdFiles(root, config string) ([]containerdFile, error) {
	var files []containerdFile
	var errs []error
	seen := map[string]bool{}
	for pending := []string{config}; len(pending) > 0; pending = pending[1:] {
		path := pending[0]
		if seen[path] {
			continue
		}
		seen[path] = true
		table, err := readTOML(root, path)
		errs = append(errs, err)
		main := 0
		if len(files) > 0 {
			main = files[0].version
		}
		f := containerdTable(table, main)
		files = append(files, f)
		for _, pattern := range f.imports {
			if !filepath.IsAbs(pattern) {
				pattern = filepath.Join(filepath.Dir(path), pattern)
			}
			matches, err := filepath.Glob(filepath.Join(root, pattern))
			errs = append(errs, err)
			for _, match := range matches {
				pending = append(pending, filepath.Join("/",
					strings.TrimPrefix(match, filepath.Clean(root))))
			}
		}
	}
	return files, errors.Join(errs...)
}

// containerdTable reads one file. An import without a version may use the names of the main file's
// version.
func containerdTable(table map[string]any, main int) containerdFile {
	f := containerdFile{disabled: stringsOf(table["disabled_plugins"]),
		imports: stringsOf(table["imports"])}
	if n, ok := table["version"].(int64); ok {
		f.version = int(n)
	}
	names := []string{criV3}
	switch {
	case f.version == 2:
		names = []string{criV2}
	case f.version < 2 && main >= 3:
		names = []string{criV1, criV2, criV3}
	case f.version < 2:
		names = []string{criV1, criV2}
	}
	for _, name := range names {
		if cri := tableAt(table, "plugins", name); cri != nil {
			if f.cri == nil {
				f.cri = map[string]any{}
			}
			mergeTables(f.cri, cri)
		}
	}
	setString(&f.socket, tableAt(table, "grpc")["address"])
	// version 4
	setString(&f.socket, tableAt(table, "plugins", "io.containerd.server.v1.grpc")["address"])
	return f
}

// mergeTables lays a table over another one, tables within them too; other values, lists among
// them, take the place of those that are there (containerd
// cmd/containerd/server/config/config_test.go TestMergingPluginsWithTwoCri…).
func mergeTables(to, from map[string]any) {
	for key, value := range from {
		table, isTable := value.(map[string]any)
		there, wasTable := to[key].(map[string]any)
		switch {
		case isTable && wasTable:
			mergeTables(there, table)
		case isTable:
			own := map[string]any{}
			mergeTables(own, table)
			to[key] = own
		default:
			to[key] = value
		}
	}
}

// readCNI takes the table "cni" of the CRI plugin. bin_dirs is there since containerd 2.1, which
// refuses to have bin_dir beside it (containerd internal/cri/config/config.go).
func (r *Runtime) readCNI(cni map[string]any) {
	r.ConfDir, r.BinDirs = DefaultConfDir, []string{DefaultBinDir}
	setString(&r.ConfDir, cni["conf_dir"])
	setString(&r.BinDirs[0], cni["bin_dir"])
	if dirs := stringsOf(cni["bin_dirs"]); dirs != nil {
		if one, _ := cni["bin_dir"].(string); one != "" {
			r.Problems = append(r.Problems, fmt.Sprintf("bin_dir and bin_dirs are both set in %s: "+
				"containerd 2.1 and later do not start so", r.Config))
		}
		r.BinDirs = dirs
	}
	if n, ok := cni["max_conf_num"].(int64); ok {
		r.MaxConfs = int(n)
	}
	r.clean()
}
