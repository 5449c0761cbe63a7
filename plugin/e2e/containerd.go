package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Socket is the path of the socket on which containerd listens.
const Socket = "/run/containerd/containerd.sock"

// PauseImage is the image of all pods and containers. writePause creates it, and no registry has
// it.
const PauseImage = "e2e.local/pause:1"

// Version is a release of containerd that `make e2e` provides.
type Version struct {
	Name string // as containerd reports it
	dir  string // its binaries, below .tools/e2e
	// Major is the major version. containerd supports CNI 1.1, and calls STATUS, since version 2.
	Major int
}

// newest is the directory of the newest release.
const newest = "containerd-v2.4.2"

// Newest returns the newest release.
func Newest(t testing.TB) Version {
	t.Helper()
	return versionOf(t, newest)
}

// Containerds returns the releases to test, newest first and Debian's last. In a short run, it
// returns only the newest.
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

// versionOf returns the version that a containerd binary reports, in the form "containerd
// github.com/containerd/containerd/v2 v2.4.2 REVISION".
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

// config returns containerd's configuration. It names the pause image, and keeps containerd from
// lowering a container's oom_score_adj, which the machine may not allow.
func (v Version) config() string {
	if v.Major == 1 {
		return fmt.Sprintf("version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\n  sandbox_image = %q\n  restrict_oom_score_adj = true\n", PauseImage)
	}
	return fmt.Sprintf("version = 3\n[plugins.\"io.containerd.cri.v1.images\".pinned_images]\n  sandbox = %q\n"+
		"[plugins.\"io.containerd.cri.v1.runtime\"]\n  restrict_oom_score_adj = true\n", PauseImage)
}

// MovedCNI returns the text of a file that sets containerd's two CNI directories. containerd's
// configuration can import the file.
func (v Version) MovedCNI(confDir, binDir string) string {
	if v.Major == 1 {
		return fmt.Sprintf("version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".cni]\n  conf_dir = %q\n  bin_dir = %q\n", confDir, binDir)
	}
	bin := fmt.Sprintf("bin_dirs = [%q]", binDir)
	if strings.HasPrefix(v.Name, "containerd 2.0.") { // containerd 2.0 ignores bin_dirs
		bin = fmt.Sprintf("bin_dir = %q", binDir)
	}
	return fmt.Sprintf("version = 3\n[plugins.\"io.containerd.cri.v1.runtime\".cni]\n  conf_dir = %q\n  %s\n", confDir, bin)
}

type Containerd struct {
	*Daemon
	Version Version
}

// StartContainerd starts containerd on a node and imports the pause image.
func (n *Node) StartContainerd(v Version) *Containerd {
	n.Helper()
	program := tool(n, filepath.Join(v.dir, "containerd"))
	path := strings.Join([]string{filepath.Dir(program), tool(n, "deb/usr/sbin"), os.Getenv("PATH")}, ":")
	c := &Containerd{n.newDaemon(v.Name, Socket, []string{program}, "PATH="+path, "TMPDIR=/run"), v}
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

// Import imports the images of an archive into the runtime. flags are flags of `ctr images import`.
func (c *Containerd) Import(archive string, flags ...string) {
	c.node.Helper()
	args := append([]string{"images", "import"}, flags...)
	c.Ctr("k8s.io", append(args, archive)...)
}

// Ctr runs ctr, containerd's own client, in one of containerd's namespaces. CRI uses k8s.io.
func (c *Containerd) Ctr(namespace string, args ...string) string {
	c.node.Helper()
	return c.node.Run(tool(c.node, filepath.Join(c.Version.dir, "ctr")), append([]string{"-n", namespace}, args...)...)
}

// RunContainer starts a container of PauseImage outside of CRI, as nerdctl does: in the namespace
// "default", and attached to the node's network. It returns the container's CNI container ID, which
// is id with the prefix "default-".
func (c *Containerd) RunContainer(id string) (cniID string) {
	c.node.Helper()
	c.Ctr("default", "images", "import", filepath.Join(c.node.Dir, "pause.tar"))
	c.Ctr("default", "run", "--detach", "--null-io", "--cni", "--cgroup", c.node.Cgroup()+"/"+id, PauseImage, id)
	return "default-" + id
}

// KillContainer kills the first process of a container that RunContainer started. No DEL follows.
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

// Forget makes the runtime forget sandboxes. It removes their containers from the runtime's store,
// and kills and restarts the runtime. The runtime sends no DEL for these sandboxes.
func (c *Containerd) Forget(ids ...string) {
	c.node.Helper()
	c.Ctr("k8s.io", append([]string{"containers", "rm"}, ids...)...)
	if c.Version.Major > 1 { // containerd 2 stores a sandbox separately from its container
		c.Ctr("k8s.io", append([]string{"sandboxes", "rm", "--force"}, ids...)...)
	}
	c.Kill()
	c.Start()
	c.AwaitNetwork()
}

// Blocked describes what containerd's CRI calls wait for: for each different stack, the number of
// calls and the functions. It also lists the machine's processes that wait in the kernel and cannot
// be killed.
func (c *Containerd) Blocked() string {
	n := c.node
	n.Helper()
	check(n, c.cmd.Process.Signal(unix.SIGUSR1)) // containerd then writes its stacks to a file
	var dumps []string
	Eventually(n, time.Minute, "containerd has written its stacks", func() bool {
		dumps, _ = filepath.Glob(n.File("/run/containerd.*.stacks.log"))
		return len(dumps) > 0
	})
	stacks, err := os.ReadFile(dumps[0])
	check(n, err)
	calls := map[string]int{}
	for stack := range strings.SplitSeq(string(stacks), "\n\n") {
		if strings.Contains(stack, "_RuntimeService_") {
			calls[strings.Join(function.FindAllString(stack, -1), ")\n")]++
		}
	}
	var blocked strings.Builder
	for stack, count := range calls {
		fmt.Fprintf(&blocked, "%d calls:\n%s)\n", count, stack)
	}
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		if stat, _ := os.ReadFile(path); strings.Contains(string(stat), ") D ") {
			stack, _ := os.ReadFile(filepath.Join(filepath.Dir(path), "stack"))
			fmt.Fprintf(&blocked, "process %s\n%s", stat, stack)
		}
	}
	return blocked.String()
}

// function matches the name of a function in the stack of a goroutine, up to its arguments.
var function = regexp.MustCompile(`(?m)^[\w./*()\[\]-]+\(`)
