package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// CrioSocket is the path of the socket on which CRI-O listens.
const CrioSocket = "/run/crio/crio.sock"

type Crio struct {
	*Daemon
	podman *Podman
}

// crioConf makes CRI-O run without systemd, also on cgroups v1. By default, pods have no infra
// container. With one, CRI-O would need CAP_SYS_RESOURCE, to set the container's oom_score_adj.
const crioConf = `[crio]
root = "/var/lib/containers/storage"
runroot = "/run/containers/storage"
storage_driver = "overlay"
log_dir = "/var/log/crio/pods"
version_file = "/run/crio/version"
version_file_persist = "/var/lib/crio/version"
clean_shutdown_file = "/var/lib/crio/clean.shutdown"
internal_wipe = true
[crio.api]
listen = "` + CrioSocket + `"
stream_address = "127.0.0.1"
stream_port = "0"
[crio.runtime]
default_runtime = "runc"
cgroup_manager = "cgroupfs"
conmon_cgroup = "pod"
seccomp_profile = ""
apparmor_profile = ""
selinux = false
pinns_path = %q
container_exits_dir = "/run/crio/exits"
container_attach_socket_dir = "/run/crio"
namespaces_dir = "/run"
hooks_dir = ["/etc/crio/hooks.d"]
[crio.runtime.runtimes.runc]
runtime_path = %q
runtime_type = "oci"
runtime_root = "/run/runc"
monitor_path = %q
monitor_cgroup = "pod"
[crio.image]
pause_image = "` + PauseImage + `"
pause_command = ""
signature_policy = "/etc/containers/policy.json"
[crio.metrics]
enable_metrics = false
`

// CrioNetwork is the network part of CRI-O's configuration.
type CrioNetwork struct {
	ConfDir, PluginDir string
	// StatusGrace, such as "1s", makes CRI-O send STATUS to the plugins not only at its start, but
	// also afterwards.
	StatusGrace string
}

func (c CrioNetwork) String() string {
	text := fmt.Sprintf("[crio.network]\nnetwork_dir = %q\nplugin_dirs = [%q]\n", c.ConfDir, c.PluginDir)
	if c.StatusGrace != "" {
		text += fmt.Sprintf("cni_status_grace_period = %q\n", c.StatusGrace)
	}
	return text
}

// StartCrio loads the pause image into CRI-O's storage, and starts CRI-O on the node.
func (n *Node) StartCrio(network CrioNetwork) *Crio {
	n.Helper()
	program := tool(n, "crio/crio")
	out, err := exec.Command(program, "--version").Output()
	if err != nil {
		n.Fatal(err)
	}
	first, _, _ := strings.Cut(string(out), "\n")
	version := strings.TrimPrefix(first, "crio version ")
	podman := n.NewPodman() // loads the pause image into the storage shared with CRI-O
	env := append(podman.env[:len(podman.env):len(podman.env)], "TMPDIR=/run")
	podman.env = append(env, "CONTAINERS_CONF="+filepath.Join(n.Dir, "containers.conf"))
	n.Run("mv", "/etc/containers/containers.conf", n.Dir) // because a CRI-O node has no podman
	n.Write("/etc/crio/crio.conf", fmt.Sprintf(crioConf, tool(n, "crio/pinns"), tool(n, "deb/usr/sbin/runc"), tool(n, "deb/usr/bin/conmon")))
	n.Write("/etc/crio/crio.conf.d/10-network.conf", network.String())
	for _, dir := range []string{"/etc/crio/hooks.d", "/var/lib/crio", "/var/log/crio"} {
		if err := os.MkdirAll(n.File(dir), 0o755); err != nil {
			n.Fatal(err)
		}
	}
	c := &Crio{n.newDaemon("CRI-O "+version, CrioSocket, []string{program, "--log-level=info"}, env...), podman}
	c.Start()
	return c
}

// Stop stops CRI-O with SIGTERM, as systemd does, and waits until it has ended. The pods keep
// running.
func (c *Crio) Stop() {
	c.node.Helper()
	if err := c.cmd.Process.Signal(unix.SIGTERM); err != nil {
		c.node.Fatal(err)
	}
	<-c.ended
}

// LoadPause loads the pause image into CRI-O's storage again.
func (c *Crio) LoadPause() {
	c.node.Helper()
	c.podman.load()
}
