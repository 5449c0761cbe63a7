package e2e

import (
	"fmt"
	"path/filepath"
	"strings"
)

// podmanConf makes Debian's podman use CNI and run without systemd.
const podmanConf = `[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[network]
network_backend = "cni"
cni_plugin_dirs = ["` + PluginDir + `"]
network_config_dir = "` + ConfDir + `"
[containers]
log_driver = "k8s-file"
`

// Podman runs Debian's podman on a node. podman has no daemon.
type Podman struct {
	node *Node
	env  []string
}

// NewPodman loads PauseImage into a node's podman. It skips the test unless podman's version is 4,
// because podman 5 and later don't support CNI.
func (n *Node) NewPodman() *Podman {
	n.Helper()
	libraries, _ := filepath.Glob(tool(n, "deb") + "/usr/lib/*-linux-gnu")
	more, _ := filepath.Glob(tool(n, "deb") + "/lib/*-linux-gnu")
	p := &Podman{node: n, env: []string{
		"LD_LIBRARY_PATH=" + strings.Join(append(libraries, more...), ":"),
		"PATH=" + tool(n, "deb/usr/bin") + ":" + tool(n, "deb/usr/sbin") + ":/usr/sbin:/usr/bin:/sbin:/bin",
	}}
	if version := p.Run("--version"); !strings.HasPrefix(version, "podman version 4.") {
		n.Skipf("%s has no CNI backend", version)
	}
	n.Write("/etc/containers/containers.conf", podmanConf+"conmon_path = [\""+tool(n, "deb/usr/bin/conmon")+"\"]\n")
	n.Write("/etc/containers/policy.json", `{"default": [{"type": "insecureAcceptAnything"}]}`)
	p.load()
	return p
}

// load loads PauseImage into the storage that podman shares with CRI-O.
func (p *Podman) load() {
	n := p.node
	n.Helper()
	archive := filepath.Join(n.Dir, "pause.tar")
	if err := writePause(archive, tool(n, "bin/pause")); err != nil {
		n.Fatal(err)
	}
	p.Run("load", "-i", archive)
}

// Try runs podman and returns its output.
func (p *Podman) Try(args ...string) (stdout, stderr string, err error) {
	p.node.Helper()
	return p.node.Try("env", append(append(p.env[:len(p.env):len(p.env)], tool(p.node, "deb/usr/bin/podman")), args...)...)
}

// Run runs podman, and fails the test if podman fails.
func (p *Podman) Run(args ...string) string {
	p.node.Helper()
	stdout, stderr, err := p.Try(args...)
	if err != nil {
		p.node.Fatalf("podman %s: %v\n%s%s", strings.Join(args, " "), err, stdout, stderr)
	}
	return strings.TrimSpace(stdout)
}

// Start starts a container in a network, and returns the container's ID.
func (p *Podman) Start(name, network string) (id string, err error) {
	p.node.Helper()
	id, stderr, err := p.Try("run", "--detach", "--name="+name, "--network="+network, "--cgroup-parent="+p.node.Cgroup(), PauseImage)
	if err != nil {
		err = fmt.Errorf("podman run: %w\n%s", err, stderr)
	}
	return strings.TrimSpace(id), err
}

// Remove removes a container, even if it never started.
func (p *Podman) Remove(name string) error {
	p.node.Helper()
	_, _, err := p.Try("rm", "--force", "--time=1", name)
	return err
}
