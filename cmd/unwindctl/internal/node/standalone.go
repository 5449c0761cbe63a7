package node

import "errors"

// findNerdctl reads nerdctl.toml (nerdctl docs/config.md); without one, the first directory of
// plugins that is there is taken (nerdctl pkg/defaults/defaults_linux.go CNIPath).
func findNerdctl(root string) (*Runtime, error) {
	const config = "/etc/nerdctl/nerdctl.toml"
	if !anyExists(root, config, "/var/lib/nerdctl") {
		return nil, nil
	}
	r := &Runtime{Name: "nerdctl", ConfDir: DefaultConfDir,
		BinDirs: firstThere(root, DefaultBinDir, "/usr/local/libexec/cni",
			"/usr/local/lib/cni", "/usr/libexec/cni", "/usr/lib/cni")[:1], MaxConfs: 1,
		Notes: byName("nerdctl")}
	table, err := readTOML(root, config)
	if len(table) > 0 {
		r.Config = config
	}
	setString(&r.ConfDir, table["cni_netconfpath"])
	setString(&r.BinDirs[0], table["cni_path"])
	r.clean()
	return r, err
}

// findPodman finds one that is told to use CNI: podman 4 and earlier can, and take netavark if
// nothing says so (containers.conf(5) network_backend, network_config_dir, cni_plugin_dirs).
func findPodman(root string) (*Runtime, error) {
	r := &Runtime{Name: "podman", ConfDir: DefaultConfDir, MaxConfs: 1, Notes: byName("podman"),
		BinDirs: []string{
			"/usr/local/libexec/cni", "/usr/libexec/cni", "/usr/local/lib/cni", "/usr/lib/cni",
			"/opt/cni/bin"}}
	backend := ""
	var errs []error
	for _, file := range []string{"/usr/share/containers/containers.conf",
		"/etc/containers/containers.conf"} {
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

// findNomad takes Nomad's defaults (Nomad's client block: cni_path, cni_config_dir); its
// configuration, in HCL, is not read.
func findNomad(root string) (*Runtime, error) {
	const confDir = "/opt/cni/config"
	if !anyExists(root, confDir) {
		return nil, nil
	}
	return &Runtime{Name: "nomad", ConfDir: confDir, BinDirs: []string{DefaultBinDir}, MaxConfs: 1,
		Notes: byName("nomad")}, nil
}

// byName returns the note about a runtime that takes networks, and so conflists, by name.
func byName(runtime string) []string {
	return []string{runtime + " takes a network by its name, each from its own file: --conf says " +
		"which one is wrapped"}
}
