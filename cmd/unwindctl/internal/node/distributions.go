package node

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"time"
)

const (
	containerd       = "containerd"
	containerdSocket = "/run/containerd/containerd.sock"
	k0sSocket        = "/run/k0s/containerd.sock"
	k3sDir           = "/var/lib/rancher/k3s"
	k3sSocket        = "/run/k3s/containerd/containerd.sock"
	microK8sDir      = "/var/snap/microk8s"
	microK8sSocket   = microK8sDir + "/common/run/containerd.sock"
)

// distribution is a containerd with its usual directories. A running containerd reports its actual
// directories (see ask).
type distribution struct {
	name                    string
	evidence                []string // at least one of these paths exists
	confDir, binDir, socket string
}

var distributions = []distribution{
	// This also matches GKE, Talos, Bottlerocket and Flatcar. The CRI plugin creates the last path.
	{containerd, []string{"/etc/containerd/config.toml", containerdSocket,
		"/var/lib/containerd/io.containerd.grpc.v1.cri"},
		DefaultConfDir, DefaultBinDir, containerdSocket},
	// k3s pkg/agent/templates
	{"k3s", []string{k3sDir + "/agent/etc/containerd/config.toml"},
		k3sDir + "/agent/etc/cni/net.d", k3sDir + "/data/cni", k3sSocket},
	// RKE2 uses K3s's socket (rke2 pkg/executor/staticpod/spw.go) and containerd's directories.
	{"rke2", []string{"/var/lib/rancher/rke2/agent/etc/containerd/config.toml"},
		DefaultConfDir, DefaultBinDir, k3sSocket},
	// microk8s-resources/default-args/containerd-template.toml, default-args/containerd
	{"microk8s", []string{microK8sDir + "/current/args/containerd.toml"},
		microK8sDir + "/current/args/cni-network", microK8sDir + "/current/opt/cni/bin", microK8sSocket},
	// k0s pkg/component/worker/containerd, pkg/config/cfgvars.go
	{"k0s", []string{"/etc/k0s/containerd.toml"}, DefaultConfDir, DefaultBinDir, k0sSocket},
}

// RuntimeNames returns the names of all runtimes that Find can find.
func RuntimeNames() []string {
	names := []string{crio}
	for _, d := range distributions {
		names = append(names, d.name)
	}
	return names
}

func (d distribution) find(root string) *Runtime {
	if !anyExists(root, d.evidence...) {
		return nil
	}
	return &Runtime{Name: d.name, ConfDir: d.confDir, BinDirs: []string{d.binDir}, Socket: d.socket,
		MaxConfs: 1, Kubelet: d.name != containerd || hasKubelet(root)}
}

// podEnv is an environment variable that the kubelet sets in each container.
const podEnv = "KUBERNETES_SERVICE_HOST"

// InPod reports whether a pod started this program, so the node has a kubelet. --host keeps that.
func InPod() bool { return os.Getenv(podEnv) != "" }

// hasKubelet reports whether a machine has a kubelet. Outside pods, it does not notice a kubelet
// with its own --root-dir.
func hasKubelet(root string) bool {
	return InPod() || anyExists(root, "/var/lib/kubelet", "/var/lib/k0s/kubelet")
}

// settle handles directories that an upgrade moves. k3s before October 2024 keeps its plugins in
// data/HASH/bin, so settle adds a problem; later releases keep them in data/cni (k3s#10868,
// https://docs.k3s.io/networking/multus-ipams). MicroK8s reports directories of the snap's
// revision, so settle replaces them with the same directories below current, which stay valid.
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

const crio = "cri-o"

// findCRIO reads crio.conf and then every file below crio.conf.d in lexical order, whatever its
// extension. A later value replaces an earlier one. plugin_dir, if set, comes after plugin_dirs
// (cri-o pkg/config/config.go UpdateFromPath, NetworkConfig.Validate; docs/crio.conf.5.md).
// OpenShift's drop-in sets /etc/kubernetes/cni/net.d and /var/lib/cni/bin (machine-config-operator
// templates/worker/01-worker-container-runtime/_base/files/crio.yaml).
func findCRIO(root string) (*Runtime, error) {
	const config, dropIns, socket = "/etc/crio/crio.conf", "/etc/crio/crio.conf.d",
		"/var/run/crio/crio.sock"
	if !anyExists(root, config, dropIns, socket, "/run/crio/crio.sock") {
		return nil, nil
	}
	files := []string{config}
	err := filepath.WalkDir(filepath.Join(root, dropIns),
		func(path string, f fs.DirEntry, err error) error {
			if err == nil && !f.IsDir() {
				files = append(files, strings.TrimPrefix(path, strings.TrimSuffix(root, "/")))
			}
			return ignoreMissing(err)
		})
	r := &Runtime{Name: crio, MaxConfs: 1, Kubelet: hasKubelet(root)}
	var conf crioConfig
	for _, file := range files {
		before := conf.Network
		err = errors.Join(err, readTOML(root, file, &struct {
			CRIO *crioConfig `toml:"crio"`
		}{&conf}))
		if !reflect.DeepEqual(before, conf.Network) {
			r.Config = file
		}
	}
	network := &conf.Network
	r.ConfDir, r.DefaultNetwork = cmp.Or(network.Dir, DefaultConfDir), network.DefaultNetwork
	r.BinDirs = network.PluginDirs
	if len(r.BinDirs) == 0 {
		r.BinDirs = []string{DefaultBinDir}
	}
	if network.PluginDir != "" {
		r.BinDirs = append(r.BinDirs, network.PluginDir)
	}
	r.Socket = cmp.Or(conf.API.Listen, socket)
	period, _ := time.ParseDuration(network.StatusGrace)
	r.StatusGrace = period > 0
	r.clean()
	return r, err
}

type crioConfig struct {
	Network struct {
		Dir            string   `toml:"network_dir"`
		DefaultNetwork string   `toml:"cni_default_network"`
		PluginDir      string   `toml:"plugin_dir"`
		PluginDirs     []string `toml:"plugin_dirs"`
		StatusGrace    string   `toml:"cni_status_grace_period"`
	} `toml:"network"`
	API struct {
		Listen string `toml:"listen"`
	} `toml:"api"`
}
