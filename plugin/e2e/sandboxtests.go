package e2e

import (
	"context"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// SandboxTests returns the tests in containerd's integration directory that run sandboxes on a
// network and need no image from a registry. In a short run, it returns only the first two.
func SandboxTests() []string {
	tests := []string{
		"TestRunPodSandboxWithSetupCNIFailure",
		"TestSandboxStopWithNilCNIResult",
		"TestContainerdRestartSandboxRecover",
		"TestCreateContainerWithoutMetadata",
		"TestPodSandboxController_ShouldBackoffExitEventWhenFail",
		"TestRunPodSandboxAndTeardownCNISlow",
		"TestRunPodSandboxWithShimDeleteFailure",
		"TestRunPodSandboxWithShimStartAndTeardownCNIFailure",
		"TestRunPodSandboxWithShimStartFailure",
		"TestRunPodSandboxWithoutMetadata",
		"TestRuntimeHandler",
		"TestSandboxRemoveWithoutIPLeakage",
	}
	if Short() {
		return tests[:2]
	}
	return tests
}

// TestResult is the result of one of containerd's tests.
type TestResult struct {
	State string // PASS, FAIL, SKIP
	Took  time.Duration
}

// failNet is the network of the runtime class failClass. The network's first plugin and the class's
// shim fail on demand (as in containerd's script/test/utils.sh).
const (
	failNetDir  = "/etc/cni/failpoint.d"
	failNetName = "containerd-net-failpoint"
	failNet     = `{
  "cniVersion": "1.0.0", "name": "` + failNetName + `", "plugins": [
    {
      "type": "cni-bridge-fp", "bridge": "cni-fp", "isGateway": true, "ipMasq": true, "promiscMode": true,
      "ipam": {
        "type": "host-local", "ranges": [[{"subnet": "10.88.0.0/16"}], [{"subnet": "2001:4860:4860::/64"}]],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]
      },
      "capabilities": {"io.kubernetes.cri.pod-annotations": true}
    },
    ` + Portmap + `
  ]
}
`
	failClass = `
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc-fp]
  cni_conf_dir = "` + failNetDir + `"
  cni_max_conf_num = 1
  pod_annotations = ["io.containerd.runtime.v2.shim.failpoint.*"]
  runtime_type = "runc-fp.v1"
`
)

// restartDelay is the number of seconds between containerd's end and its next start. It must be
// longer than a second, because the tests check once a second whether containerd has ended.
const restartDelay = "4"

// grace is the grace period in failNet. A sweep keeps attachments that are younger.
const grace = 5 * time.Second

// sandboxTestsTime bounds the run of all tests. One DEL may take two minutes.
const sandboxTestsTime = 20 * time.Minute

// StartForSandboxTests prepares a node for RunSandboxTests. It configures the tests' networks, with
// or without unwind, and starts containerd in a loop that restarts it each time a test kills it.
func (n *Node) StartForSandboxTests(v Version, unwind bool) *Containerd {
	n.Helper()
	built := n.builtSandboxTests()
	n.Run("ln", "-s", filepath.Join(built, "cni-bridge-fp"), PluginDir)
	n.Configure(Network{Subnet: "10.22.0.0/24", Plugins: []string{Portmap}, Unwind: unwind})
	list := failNet
	if unwind {
		list = withKeys(n, n.wrap(list), map[string]any{"gracePeriod": grace.String()})
	}
	n.Write(failNetDir+"/10-containerd-net.conflist", list)
	n.Write("/etc/containerd/config.toml", v.config()+failClass)
	program := tool(n, filepath.Join(v.dir, "containerd"))
	loop := exec.Command("sh", "-c", `while :; do "$0" >>"$1" 2>&1; sleep "$2"; done`,
		program, filepath.Join(n.Dir, "containerd.log"), restartDelay)
	loop.Env = []string{"PATH=" + strings.Join([]string{filepath.Dir(program), built, tool(n, "deb/usr/sbin"),
		"/usr/sbin:/usr/bin:/sbin:/bin"}, ":")}
	if err := n.Start(loop); err != nil {
		n.Fatal(err)
	}
	go func() { _ = loop.Wait() }()
	c := &Containerd{n.newDaemon(v.Name, Socket, []string{program}), v}
	c.cmd, c.ended, c.CRI = loop, make(chan struct{}), dialCRI(n, Socket)
	c.waitForAnswer()
	c.ImportPause()
	c.AwaitNetwork()
	return c
}

// builtSandboxTests returns the directory with the built tests, shim and plugin.
func (n *Node) builtSandboxTests() string {
	n.Helper()
	built, err := filepath.Glob(filepath.Join(root, ".tools/e2e/sandbox-tests-*/.built"))
	if err != nil || len(built) != 1 {
		n.Fatalf("make e2e-tools builds containerd's tests: %q, %v", built, err)
	}
	dir, err := filepath.Abs(filepath.Dir(built[0]))
	if err != nil {
		n.Fatal(err)
	}
	return dir
}

var testEnded = regexp.MustCompile(`(?m)^--- (PASS|FAIL|SKIP): (\S+) \(([0-9.]+s)\)$`)

// RunSandboxTests runs the tests, and returns the result of each test and the output of all. After
// the tests, it replaces the plugin cni-bridge-fp with bridge. Otherwise, later DELs would fail:
// cni-bridge-fp reads a pod's settings from a file, which the pod's test has removed.
func (c *Containerd) RunSandboxTests(tests []string) (results map[string]TestResult, out string) {
	n := c.node
	n.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), sandboxTestsTime)
	defer cancel()
	var text strings.Builder
	cmd := exec.CommandContext(ctx, filepath.Join(n.builtSandboxTests(), "integration.test"), "-test.v",
		"-test.run", "^("+strings.Join(tests, "|")+")$", "--cri-endpoint", "unix://"+Socket)
	cmd.Dir, cmd.Stdout, cmd.Stderr = n.Dir, &text, &text
	if err := n.Start(cmd); err != nil {
		n.Fatal(err)
	}
	_ = cmd.Wait() // the output contains the result of each test
	n.Run("ln", "-sf", PluginDir+"/bridge", PluginDir+"/cni-bridge-fp")
	results = map[string]TestResult{}
	for _, m := range testEnded.FindAllStringSubmatch(text.String(), -1) {
		took, err := time.ParseDuration(m[3])
		if err != nil {
			n.Fatal(err)
		}
		results[m[2]] = TestResult{m[1], took}
	}
	return results, text.String()
}

// ReservedByFailing returns the reservations in failNet.
func (n *Node) ReservedByFailing() map[string]string {
	n.Helper()
	return n.reserved("/var/lib/cni/networks/" + failNetName)
}
