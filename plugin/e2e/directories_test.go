//go:build e2e

package e2e_test

import (
	"os"
	"strings"
	"testing"
	"time"

	"cni-unwind/plugin/e2e"
)

// TestE2EDirectories: "unwindctl install" uses the CNI directories that containerd itself reports,
// even if they are set in a file that containerd's configuration imports. While containerd is down,
// "unwindctl install" refuses to guess.
func TestE2EDirectories(t *testing.T) {
	e2e.EachContainerd(t, func(t *testing.T, v e2e.Version) {
		n := e2e.NewNode(t)
		n.Configure(e2e.Network{Subnet: "10.22.0.0/24", Plugins: []string{e2e.Firewall}})
		rt := n.StartContainerd(v)
		plan := func() string {
			t.Helper()
			return n.Unwindctl("install", "--dry-run")
		}
		if out := plan(); !strings.Contains(out, "The runtime is containerd, according to "+e2e.Socket+".") ||
			!strings.Contains(out, "unchanged: /opt/cni/bin/unwind\n") || !strings.Contains(out, "would write /etc/cni/net.d/00-unwind.json (") {
			t.Errorf("containerd's defaults:\n%s", out)
		}
		rt.Kill()
		n.Run("cp", "-r", "/opt/cni/bin", "/opt/cni/moved")
		n.Run("cp", "-r", "/etc/cni/net.d", "/etc/cni/moved")
		config, err := os.ReadFile(n.File("/etc/containerd/config.toml"))
		check(t, err)
		n.Write("/etc/containerd/config.toml", "imports = [\"/etc/containerd/own/*.toml\"]\n"+string(config))
		n.Write("/etc/containerd/own/moved.toml", v.MovedCNI("/etc/cni/moved", "/opt/cni/moved"))
		if _, stderr, err := n.Try(e2e.Path(t, "bin/unwindctl"), "install", "--dry-run"); err == nil ||
			!strings.Contains(stderr, "cannot confirm the runtime's CNI directories, because containerd at "+e2e.Socket+" did not report them") {
			t.Errorf("while containerd is down: %v, %s", err, stderr)
		}
		rt.Start()
		if out := plan(); !strings.Contains(out, "unchanged: /opt/cni/moved/unwind\n") || !strings.Contains(out, "would write /etc/cni/moved/00-unwind.json (") {
			t.Errorf("after an imported file changed the directories:\n%s", out)
		}
	})
}

// TestE2ERenamed: the provider renames its conflist while no agent runs. With and without unwind,
// containerd can start pods after that, and can stop earlier pods. With unwind, the new pods start
// through unwind.
func TestE2ERenamed(t *testing.T) {
	e2e.EachContainerd(t, func(t *testing.T, v e2e.Version) {
		for _, unwind := range []bool{false, true} {
			n := e2e.NewNode(t)
			n.Configure(e2e.Network{Subnet: "10.22.0.0/24", Plugins: []string{e2e.Firewall}})
			rt := n.StartContainerd(v)
			if unwind {
				n.Unwindctl("install", "--install-dir", "")
			}
			rt.AwaitNetwork()
			if unwind {
				t.Log(n.Unwindctl("check"))
			}
			t.Log(n.Unwindctl("check", "--plain"))
			rt.MustRunPod(e2e.Pod{Name: "before"})
			n.Run("mv", e2e.ConfDir+"/10-podnet.conflist", e2e.ConfDir+"/20-podnet.conflist")
			e2e.Eventually(t, time.Minute, "the network is ready", func() bool { return rt.NetworkReady() == "" })
			n.CheckPod(rt.CRI, rt.MustRunPod(e2e.Pod{Name: "after"}))
			if pods := len(n.Journal()); unwind != (pods == 2) {
				t.Errorf("unwind %t: the journal contains %d pods", unwind, pods)
			}
			if errs := rt.RemovePods(); len(errs) > 0 {
				t.Errorf("unwind %t: %v", unwind, errs)
			}
			if left := n.Settled(); left != (e2e.Left{}) {
				t.Errorf("unwind %t: left %s", unwind, left)
			}
		}
	})
}
