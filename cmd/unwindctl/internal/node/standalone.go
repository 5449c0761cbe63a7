package node

import (
	"errors"
	"reflect"
)

// findNerdctl reads nerdctl.toml (nerdctl docs/config.md). The default plugin directory is the
// first one that exists (nerdctl pkg/defaults/defaults_linux.go CNIPath).
func findNerdctl(root string) (*Runtime, error) {
	const config = "/etc/nerdctl/nerdctl.toml"
	if !anyExists(root, config, "/var/lib/nerdctl") {
		return nil, nil
	}
	r := &Runtime{Name: "nerdctl", ConfDir: DefaultConfDir,
		BinDirs: firstThere(root, DefaultBinDir, "/usr/local/libexec/cni",
			"/usr/local/lib/cni", "/usr/libexec/cni", "/usr/lib/cni")[:1], MaxConfs: 1}
	conf := struct {
		ConfDir string `toml:"cni_netconfpath"`
		BinDir  string `toml:"cni_path"`
	}{r.ConfDir, r.BinDirs[0]}
	err := readTOML(root, config, &conf)
	if anyExists(root, config) {
		r.Config = config
	}
	r.ConfDir, r.BinDirs[0] = conf.ConfDir, conf.BinDir
	r.clean()
	return r, err
}

// findPodman finds a podman that is configured to use CNI. podman 4 and earlier can use it, but
// their default is netavark (containers.conf(5) network_backend, network_config_dir,
// cni_plugin_dirs).
func findPodman(root string) (*Runtime, error) {
	r := &Runtime{Name: "podman", MaxConfs: 1}
	var conf podmanConfig
	conf.Network.ConfDir = DefaultConfDir
	conf.Network.BinDirs = []string{"/usr/local/libexec/cni", "/usr/libexec/cni",
		"/usr/local/lib/cni", "/usr/lib/cni", "/opt/cni/bin"}
	var err error
	for _, file := range []string{"/usr/share/containers/containers.conf",
		"/etc/containers/containers.conf"} {
		before := conf
		err = errors.Join(err, readTOML(root, file, &conf))
		if !reflect.DeepEqual(before, conf) {
			r.Config = file
		}
	}
	if conf.Network.Backend != "cni" {
		return nil, nil
	}
	r.ConfDir, r.BinDirs = conf.Network.ConfDir, firstThere(root, conf.Network.BinDirs...)
	r.clean()
	return r, err
}

type podmanConfig struct {
	Network struct {
		Backend string   `toml:"network_backend"`
		ConfDir string   `toml:"network_config_dir"`
		BinDirs []string `toml:"cni_plugin_dirs"`
	} `toml:"network"`
}

// findNomad uses Nomad's default directories (cni_path and cni_config_dir in Nomad's client block).
// It does not read Nomad's configuration, which is in HCL.
func findNomad(root string) (*Runtime, error) {
	const confDir = "/opt/cni/config"
	if !anyExists(root, confDir) {
		return nil, nil
	}
	return &Runtime{Name: "nomad", ConfDir: confDir, BinDirs: []string{DefaultBinDir},
		MaxConfs: 1}, nil
}
