package node

import (
	"cmp"
	"errors"
	"io/fs"
	"path/filepath"
	"reflect"
	"strings"
	"time"
)

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
	r := &Runtime{Name: crio, MaxConfs: 1}
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
	if r.BinDirs = network.PluginDirs; len(r.BinDirs) == 0 {
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
