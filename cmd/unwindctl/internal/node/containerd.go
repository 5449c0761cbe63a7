package node

import (
	"fmt"
	"path/filepath"
	"strings"
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

// distribution is a containerd with its usual directories. A running containerd reports the actual
// ones: see ask.
type distribution struct {
	name                    string
	evidence                []string // one of these exists
	confDir, binDir, socket string
}

var distributions = []distribution{
	// Also on GKE, Talos, Bottlerocket and Flatcar. The CRI plugin creates the last path.
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
		MaxConfs: 1, Kubelet: d.name != containerd ||
			anyExists(root, "/var/lib/kubelet", "/var/lib/k0s/kubelet")}
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
