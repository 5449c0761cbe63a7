package e2e

import (
	"fmt"
	"path/filepath"
	"strings"
)

// Nerdctl runs nerdctl on a node with containerd. nerdctl has no daemon: runc calls it as a hook,
// and the hook attaches a container to its network.
type Nerdctl struct {
	node *Node
	rt   *Containerd
}

// NewNerdctl returns nerdctl on a node with containerd, and imports the image for its containers.
func (c *Containerd) NewNerdctl() *Nerdctl {
	c.node.Helper()
	n := &Nerdctl{c.node, c}
	c.Ctr("default", "images", "import", filepath.Join(c.node.Dir, "pause.tar"))
	return n
}

// Try runs nerdctl and returns its standard output.
func (n *Nerdctl) Try(args ...string) (stdout string, err error) {
	n.node.Helper()
	path := strings.Join([]string{filepath.Dir(tool(n.node, "nerdctl/nerdctl")), tool(n.node, "deb/usr/sbin"), tool(n.node, n.rt.Version.dir),
		"/usr/sbin:/usr/bin:/sbin:/bin"}, ":")
	command := []string{"PATH=" + path, tool(n.node, "nerdctl/nerdctl"), "--cgroup-manager=cgroupfs", "--cni-path=" + PluginDir,
		"--cni-netconfpath=" + ConfDir, "--data-root=/var/lib/containers/nerdctl"}
	stdout, stderr, err := n.node.Try("env", append(command, args...)...)
	if err != nil {
		err = fmt.Errorf("nerdctl %s: %w\n%s", strings.Join(args, " "), err, stderr)
	}
	return strings.TrimSpace(stdout), err
}

func (n *Nerdctl) Run(args ...string) string {
	n.node.Helper()
	stdout, err := n.Try(args...)
	if err != nil {
		n.node.Fatal(err)
	}
	return stdout
}

// Start starts a container in a network, and returns the container's ID.
func (n *Nerdctl) Start(name, network string) (id string, err error) {
	n.node.Helper()
	return n.Try("run", "--detach", "--pull=never", "--name="+name, "--network="+network, "--cgroup-parent="+n.node.Cgroup(),
		"--security-opt=apparmor=unconfined", PauseImage)
}

// Remove removes a container, even if it never started.
func (n *Nerdctl) Remove(name string) error {
	n.node.Helper()
	_, err := n.Try("rm", "--force", name)
	return err
}
