package node

import (
	"errors"
	"io/fs"
	"path/filepath"
	"strings"
	"time"
)

// findCRIO reads crio.conf and then every file below crio.conf.d in lexical order, whatever its
// extension; a later value takes the place of an earlier one, and plugin_dir, if it is still there,
// comes after plugin_dirs (cri-o pkg/config/config.go UpdateFromPath, NetworkConfig.Validate;
// docs/crio.conf.5.md). OpenShift's drop-in says /etc/kubernetes/cni/net.d and /var/lib/cni/bin
// (machine-config-operator templates/worker/01-worker-container-runtime/_base/files/crio.yaml).
func findCRIO(root string) (*Runtime, error) {
	const config, dropIns, socket = "/etc/crio/crio.conf", "/etc/crio/crio.conf.d",
		"/var/run/crio/crio.sock"
	if !anyExists(root, config, dropIns, socket, "/run/crio/crio.sock") {
		return nil, nil
	}
	r := &Runtime{Name: "cri-o", ConfDir: DefaultConfDir, Socket: socket, MaxConfs: 1}
	files := []string{config}
	err := filepath.WalkDir(filepath.Join(root, dropIns),
		func(path string, f fs.DirEntry, err error) error {
			if err == nil && !f.IsDir() {
				files = append(files, strings.TrimPrefix(path, strings.TrimSuffix(root, "/")))
			}
			return ignoreMissing(err)
		})
	dir, grace := "", ""
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
		setString(&grace, network["cni_status_grace_period"])
		if dirs := stringsOf(network["plugin_dirs"]); dirs != nil {
			r.BinDirs = dirs
		}
		setString(&r.Socket, tableAt(table, "crio", "api")["listen"])
	}
	if r.BinDirs == nil {
		r.BinDirs = []string{DefaultBinDir}
	}
	if dir != "" {
		r.BinDirs = append(r.BinDirs, dir)
	}
	period, _ := time.ParseDuration(grace)
	r.StatusGrace = period > 0
	r.clean()
	return r, err
}
