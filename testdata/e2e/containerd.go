package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"time"

	"golang.org/x/sys/unix"
)

// Socket is where containerd listens on a node.
const Socket = "/run/containerd/containerd.sock"

// PauseImage is the image of the pods' first process. No registry has it.
const PauseImage = "e2e.local/pause:1"

// startTimeout bounds the time until a runtime that starts answers.
const startTimeout = 30 * time.Second

// Version is a release of containerd that make e2e provides.
type Version struct {
	Name string // as it says itself
	dir  string // its binaries, below .tools/e2e
	// Major is the major version. From 2 on containerd knows CNI 1.1 and calls STATUS.
	Major int
}

// newest is the directory of the newest release.
const newest = "containerd-v2.4.2"

// Newest returns the newest release.
func Newest(t testing.TB) Version {
	t.Helper()
	return versionOf(t, newest)
}

// Containerds returns the releases to test, newest first and Debian's last. A short run has
// only the newest.
func Containerds(t testing.TB) []Version {
	t.Helper()
	dirs := []string{newest, "containerd-v2.0.14", "containerd-v1.7.35", "deb/usr/bin"}
	if Short() {
		dirs = dirs[:1]
	}
	var all []Version
	for _, dir := range dirs {
		all = append(all, versionOf(t, dir))
	}
	return all
}

// EachContainerd runs a test with each release, in parallel.
func EachContainerd(t *testing.T, test func(t *testing.T, v Version)) {
	t.Helper()
	for _, v := range Containerds(t) {
		t.Run(v.Name, func(t *testing.T) {
			t.Parallel()
			test(t, v)
		})
	}
}

// versionOf asks a containerd for its version: "containerd github.com/containerd/containerd/v2
// v2.4.2 REVISION".
func versionOf(t testing.TB, dir string) Version {
	t.Helper()
	out, err := exec.Command(tool(t, filepath.Join(dir, "containerd")), "--version").Output()
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(out))
	if len(fields) < 3 {
		t.Fatalf("%s: which version is %q?", dir, out)
	}
	number := strings.TrimPrefix(fields[2], "v")
	first, _, _ := strings.Cut(number, ".")
	major, err := strconv.Atoi(first)
	if err != nil {
		t.Fatalf("%s: which version is %q?", dir, out)
	}
	return Version{"containerd " + number, dir, major}
}

// config returns the settings that containerd needs: the source of the pause image, and that a
// container may not be able to lower oom_score_adj.
func (v Version) config() string {
	if v.Major == 1 {
		return fmt.Sprintf("version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\n  sandbox_image = %q\n  restrict_oom_score_adj = true\n", PauseImage)
	}
	return fmt.Sprintf("version = 3\n[plugins.\"io.containerd.cri.v1.images\".pinned_images]\n  sandbox = %q\n"+
		"[plugins.\"io.containerd.cri.v1.runtime\"]\n  restrict_oom_score_adj = true\n", PauseImage)
}

// MovedCNI returns a file to import that has the directories of CNI elsewhere.
func (v Version) MovedCNI(confDir, binDir string) string {
	if v.Major == 1 {
		return fmt.Sprintf("version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".cni]\n  conf_dir = %q\n  bin_dir = %q\n", confDir, binDir)
	}
	bin := fmt.Sprintf("bin_dirs = [%q]", binDir)
	if strings.HasPrefix(v.Name, "containerd 2.0.") { // it ignores bin_dirs
		bin = fmt.Sprintf("bin_dir = %q", binDir)
	}
	return fmt.Sprintf("version = 3\n[plugins.\"io.containerd.cri.v1.runtime\".cni]\n  conf_dir = %q\n  %s\n", confDir, bin)
}

// Containerd is a containerd on a node.
type Containerd struct {
	*CRI
	Version Version
	node    *Node
	cmd     *exec.Cmd
	ended   chan struct{} // closed when the process has ended
}

// StartContainerd starts containerd on a node and imports the pause image.
func (n *Node) StartContainerd(v Version) *Containerd {
	n.Helper()
	c := &Containerd{Version: v, node: n}
	n.Write("/etc/containerd/config.toml", v.config())
	c.Start()
	c.ImportPause()
	return c
}

// ImportPause imports the pause image.
func (c *Containerd) ImportPause() {
	n := c.node
	n.Helper()
	archive := filepath.Join(n.Dir, "pause.tar")
	if err := writePause(archive, tool(n, "bin/pause")); err != nil {
		n.Fatal(err)
	}
	c.Import(archive)
}

// Import puts the images of an archive into the runtime, as from a registry. Flags are those of ctr
// images import.
func (c *Containerd) Import(archive string, flags ...string) {
	c.node.Helper()
	args := append([]string{"images", "import"}, flags...)
	c.Ctr("k8s.io", append(args, archive)...)
}

// Ctr runs containerd's own client in one of its namespaces: k8s.io is that of CRI.
func (c *Containerd) Ctr(namespace string, args ...string) string {
	c.node.Helper()
	return c.node.Run(tool(c.node, filepath.Join(c.Version.dir, "ctr")), append([]string{"-n", namespace}, args...)...)
}

// RunContainer starts a container of the pause image outside of CRI, as nerdctl does, in the namespace
// "default" and attached to the node's network. Its CNI container ID has that namespace before its own.
func (c *Containerd) RunContainer(id string) (cniID string) {
	c.node.Helper()
	c.Ctr("default", "images", "import", filepath.Join(c.node.Dir, "pause.tar"))
	c.Ctr("default", "run", "--detach", "--null-io", "--cni", "--cgroup", c.node.Cgroup()+"/"+id, PauseImage, id)
	return "default-" + id
}

// KillContainer kills the first process of such a container. Nobody sends a DEL.
func (c *Containerd) KillContainer(id string) {
	c.node.Helper()
	for line := range strings.Lines(c.Ctr("default", "tasks", "ls")) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[0] == id {
			c.node.Run("/bin/kill", "-KILL", fields[1])
			return
		}
	}
	c.node.Fatalf("no task of container %s", id)
}

// Forget has the runtime forget sandboxes that it has: their containers go from its store, and it is
// started again. It makes no DEL for them.
func (c *Containerd) Forget(ids ...string) {
	c.node.Helper()
	c.Ctr("k8s.io", append([]string{"containers", "rm"}, ids...)...)
	if c.Version.Major > 1 { // keeps a sandbox apart from its container
		c.Ctr("k8s.io", append([]string{"sandboxes", "rm", "--force"}, ids...)...)
	}
	c.Kill()
	c.Start()
	c.AwaitNetwork()
}

// Start starts the daemon, also again after Kill or a reboot, and waits until it answers.
func (c *Containerd) Start() {
	n := c.node
	n.Helper()
	logFile, err := os.OpenFile(filepath.Join(n.Dir, "containerd.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		n.Fatal(err)
	}
	defer logFile.Close()
	program := tool(n, filepath.Join(c.Version.dir, "containerd"))
	c.cmd = exec.Command(program)
	c.cmd.Stdout, c.cmd.Stderr = logFile, logFile
	c.cmd.Env = []string{"PATH=" + strings.Join([]string{filepath.Dir(program), tool(n, "deb/usr/sbin"), os.Getenv("PATH")}, ":")}
	if err := n.Start(c.cmd); err != nil {
		n.Fatal(err)
	}
	c.ended = make(chan struct{})
	go func(cmd *exec.Cmd, ended chan<- struct{}) {
		_ = cmd.Wait()
		close(ended)
	}(c.cmd, c.ended)
	if c.CRI != nil {
		_ = c.conn.Close() // gRPC would wait before it tries again
	}
	c.CRI = dialCRI(n, Socket)
	c.waitForAnswer()
}

func (c *Containerd) waitForAnswer() {
	c.node.Helper()
	for end := time.Now().Add(startTimeout); ; time.Sleep(50 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		err := c.ready(ctx)
		cancel()
		if err == nil {
			return
		}
		select {
		case <-c.ended:
			c.node.Fatalf("%s did not start:\n%s", c.Version.Name, c.Log())
		default:
		}
		if time.Now().After(end) {
			c.node.Fatalf("%s does not answer: %v\n%s", c.Version.Name, err, c.Log())
		}
	}
}

// Log returns the last lines of the daemon's log, without level=info.
func (c *Containerd) Log() string {
	data, err := os.ReadFile(filepath.Join(c.node.Dir, "containerd.log"))
	if err != nil {
		return err.Error()
	}
	lines := slices.DeleteFunc(strings.SplitAfter(string(data), "\n"), func(l string) bool { return strings.Contains(l, "level=info") })
	return strings.Join(lines[max(0, len(lines)-20):], "")
}

// Kill kills the daemon, as the kernel does when memory runs out. The pods go on.
func (c *Containerd) Kill() {
	c.node.Helper()
	if err := c.cmd.Process.Signal(unix.SIGKILL); err != nil {
		c.node.Fatal(err)
	}
	<-c.ended
}

// AwaitNetwork waits until the runtime has read the node's network and its plugins are ready.
func (c *Containerd) AwaitNetwork() {
	c.node.Helper()
	for end := time.Now().Add(startTimeout); ; time.Sleep(50 * time.Millisecond) {
		why := c.NetworkReady()
		if why == "" {
			return
		}
		if time.Now().After(end) {
			c.node.Fatalf("the network is not ready: %s\n%s", why, c.Log())
		}
	}
}
