package node

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
)

// criPlugins are the names of containerd's CRI plugin in its configuration: in file version 3 and
// later, in version 2, and the short name in version 1 (containerd docs/cri/config.md;
// cmd/containerd/server/config/config.go v1MigratePluginName; plugins/cri/runtime/plugin.go
// configMigration).
var criPlugins = []string{"io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri", "cri"}

// findContainerd finds a containerd that no Kubernetes distribution bundles. On GKE its plugins are
// in /home/kubernetes/bin. It ignores a containerd whose CRI plugin is off, as in Docker's package,
// because such a containerd runs no pods.
func findContainerd(root string) (*Runtime, error) {
	const config, socket = "/etc/containerd/config.toml", containerdSocket
	// the last one is the directory that the CRI plugin creates
	if !anyExists(root, config, socket, "/var/lib/containerd/io.containerd.grpc.v1.cri") {
		return nil, nil
	}
	r, err := readContainerd(root, "containerd", config, socket)
	if r != nil {
		r.Kubelet = anyExists(root, "/var/lib/kubelet", "/var/lib/k0s/kubelet")
	}
	return r, err
}

const (
	containerdSocket = "/run/containerd/containerd.sock"
	k0sSocket        = "/run/k0s/containerd.sock"
	k3sDir           = "/var/lib/rancher/k3s"
	k3sSocket        = "/run/k3s/containerd/containerd.sock"
	microK8sDir      = "/var/snap/microk8s"
	microK8sSocket   = microK8sDir + "/common/run/containerd.sock"
)

// bundled is a containerd that is part of a Kubernetes distribution.
type bundled struct{ name, config, socket string }

var bundles = []bundled{
	// K3s writes the configuration at each start. With --flannel-backend=none it names no directories,
	// so containerd's defaults apply (k3s pkg/agent/templates).
	{"k3s", k3sDir + "/agent/etc/containerd/config.toml", k3sSocket},
	// RKE2 uses K3s's socket (rke2 pkg/executor/staticpod/spw.go) and containerd's directories.
	{"rke2", "/var/lib/rancher/rke2/agent/etc/containerd/config.toml", k3sSocket},
	// MicroK8s generates the configuration from a template (microk8s-resources/default-args/
	// containerd-template.toml, default-args/containerd for the socket).
	{"microk8s", microK8sDir + "/current/args/containerd.toml", microK8sSocket},
	// k0s writes the configuration at each start. It names no CNI directories; up to 1.35 it imports a
	// file that does (k0s pkg/component/worker/containerd, pkg/config/cfgvars.go for the socket).
	{"k0s", "/etc/k0s/containerd.toml", k0sSocket},
	// The containerd that runs Talos's pods. /etc/containerd belongs to another one, without CRI, for
	// Talos's own services (talos hack/containerd.toml, hack/cri-containerd.toml,
	// pkg/machinery/constants).
	{"talos", "/etc/cri/containerd.toml", containerdSocket},
}

func (b bundled) find(root string) (*Runtime, error) {
	if !anyExists(root, b.config) {
		return nil, nil
	}
	r, err := readContainerd(root, b.name, b.config, b.socket)
	if r != nil {
		r.Kubelet = true
	}
	return r, err
}

// settle handles directories that change with an upgrade. K3s before October 2024 keeps its plugins
// in data/HASH/bin, later releases in data/cni (k3s#10868,
// https://docs.k3s.io/networking/multus-ipams). MicroK8s names directories in the snap's revision;
// settle replaces these with the same directories below current, which stay.
func (r *Runtime) settle(root string) {
	switch r.Name {
	case "k3s":
		if hash, ok := strings.CutPrefix(r.BinDirs[0], k3sDir+"/data/"); ok &&
			strings.HasSuffix(hash, "/bin") {
			r.Problems = append(r.Problems,
				fmt.Sprintf("the next upgrade of this k3s moves the plugin directory %s, after which no pod "+
					"could start; upgrade k3s first (releases since October 2024 keep the directory), or set "+
					"--conf-dir and --cni-bin-dir and install again after the upgrade", r.BinDirs[0]))
		}
	case "microk8s":
		current := microK8sDir + "/current"
		revision, err := filepath.EvalSymlinks(filepath.Join(root, current))
		if err != nil {
			return
		}
		revision = filepath.Join(microK8sDir, filepath.Base(revision))
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
}

// readContainerd reads containerd's configuration. It returns nil if the CRI plugin is off.
func readContainerd(root, name, config, socket string) (*Runtime, error) {
	var file containerdFile
	err := readTOML(root, config, &file)
	if slices.ContainsFunc(criPlugins, func(id string) bool {
		return slices.Contains(file.Disabled, id)
	}) {
		return nil, err
	}
	cni := file.cni()
	r := &Runtime{Name: name, ConfDir: cmp.Or(cni.ConfDir, DefaultConfDir), BinDirs: cni.BinDirs,
		Socket: cmp.Or(file.GRPC.Address, file.Plugins[grpcV4].Address, socket), MaxConfs: 1}
	if anyExists(root, config) {
		r.Config = config
	}
	if len(r.BinDirs) == 0 {
		r.BinDirs = []string{cmp.Or(cni.BinDir, DefaultBinDir)}
	}
	if cni.MaxConfs != nil {
		r.MaxConfs = *cni.MaxConfs
	}
	if file.Version >= 3 { // containerd 2 also reads older file versions
		r.Major = 2
	}
	r.clean()
	if file.Version >= 3 && cni.BinDir != "" {
		r.needsAnswer("containerd up to 2.3 uses bin_dir in %s, but later releases do not", config)
	}
	return r, errors.Join(err, r.checkImports(root, file.Imports))
}

// grpcV4 is the plugin that configures the socket, from file version 4 on.
const grpcV4 = "io.containerd.server.v1.grpc"

type containerdFile struct {
	Version  int      `toml:"version"`
	Imports  []string `toml:"imports"`
	Disabled []string `toml:"disabled_plugins"`
	GRPC     struct {
		Address string `toml:"address"`
	} `toml:"grpc"`
	Plugins map[string]struct {
		Address string        `toml:"address"`
		CNI     containerdCNI `toml:"cni"`
	} `toml:"plugins"`
}

// needsAnswer adds a problem that exists only while containerd does not respond.
func (r *Runtime) needsAnswer(format, path string) {
	r.Problems = append(r.Problems, fmt.Sprintf("%s does not respond at %s, and "+format+"; start "+
		"%[1]s, or set --conf-dir and --cni-bin-dir", r.Name, r.Socket, path))
}

// containerdCNI is the CRI plugin's table "cni". bin_dirs exists since containerd 2.1; 2.4 reads
// bin_dir only in file versions 1 and 2 (containerd internal/cri/config/config.go,
// plugins/cri/runtime/plugin.go, RELEASES.md).
type containerdCNI struct {
	ConfDir  string   `toml:"conf_dir"`
	BinDir   string   `toml:"bin_dir"`
	BinDirs  []string `toml:"bin_dirs"`
	MaxConfs *int     `toml:"max_conf_num"`
}

// cni returns the table "cni" of the plugin whose name belongs to the file's version. containerd
// ignores the names of other versions.
func (f *containerdFile) cni() containerdCNI {
	names := criPlugins[:1]
	switch {
	case f.Version < 2:
		names = criPlugins[1:]
	case f.Version == 2:
		names = criPlugins[1:2]
	}
	for _, name := range names {
		if plugin, ok := f.Plugins[name]; ok {
			return plugin.CNI
		}
	}
	return containerdCNI{}
}

// checkImports adds a problem for each imported file that can change the table "cni". containerd 1
// uses only the last such file and containerd 2 merges them, so only a running containerd knows the
// result.
func (r *Runtime) checkImports(root string, patterns []string) error {
	var errs []error
	for _, pattern := range patterns {
		if !filepath.IsAbs(pattern) {
			pattern = filepath.Join(filepath.Dir(r.Config), pattern)
		}
		paths, err := filepath.Glob(filepath.Join(root, pattern))
		errs = append(errs, err)
		for _, path := range paths {
			path = filepath.Join("/", strings.TrimPrefix(path, filepath.Clean(root)))
			var file containerdFile
			errs = append(errs, readTOML(root, path, &file))
			if len(file.Imports) > 0 || slices.ContainsFunc(criPlugins, func(name string) bool {
				_, there := file.Plugins[name]
				return there
			}) {
				r.needsAnswer("%s may change its CNI directories", path)
			}
		}
	}
	return errors.Join(errs...)
}
