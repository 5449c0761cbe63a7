package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	cniversion "github.com/containernetworking/cni/pkg/version"
	"github.com/vishvananda/netlink"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
)

// runtimeMachine is a node with the reference plugins. Its runtime is libcni with a cache of its
// own.
type runtimeMachine struct {
	*machine
	cacheDir string
	pods     int
	shared   string // the container whose network namespace all pods use; "" if each has its own
	cni      *libcni.CNIConfig
}

// quick runs plugins without the race detector's delay at their exit.
type quick struct {
	*invoke.RawExec
	cniversion.PluginDecoder
}

func (q quick) ExecPlugin(ctx context.Context, path string, stdin []byte, env []string) ([]byte, error) {
	return q.RawExec.ExecPlugin(ctx, path, stdin, append(env, "GORACE="+noExitDelay))
}

func newRuntimeMachine(t *testing.T) *runtimeMachine {
	t.Helper()
	n := &runtimeMachine{machine: newAgentMachine(t)}
	n.cacheDir = filepath.Join(n.dir, "cache")
	check(t, os.Mkdir(n.cacheDir, 0o700))
	n.Remove(n.InConf("10-bridge.conflist"))
	plugins, err := filepath.Glob(filepath.Join(n.tools, "[ct]*", "[a-z]*"))
	for _, path := range plugins {
		err = errors.Join(err, os.Symlink(path, filepath.Join(n.BinDir(), filepath.Base(path))))
	}
	check(t, err)
	n.cni = libcni.NewCNIConfigWithCacheDir([]string{n.BinDir()}, n.cacheDir, &quick{RawExec: &invoke.RawExec{Stderr: t.Output()}})
	return n
}

// provide replaces the provider's conflist atomically, and returns its path.
func (n *runtimeMachine) provide(content string) string {
	n.Helper()
	path := n.InConf("10-provider.conflist")
	n.Rename(path, content)
	return path
}

// ctl runs an unwindctl command, such as install, with the directories of this node.
func (n *runtimeMachine) ctl(command string, args ...string) outcome {
	n.Helper()
	args = append([]string{command, "--conf-dir", n.ConfDir(), "--cni-bin-dir", n.BinDir(), "--state-dir", n.state}, args...)
	switch command {
	case "install", "on":
		args = append(args, "--binary", filepath.Join(n.bin, "unwind"))
	case "uninstall":
		args = append(args, "--cache-dir", n.cacheDir)
	}
	return n.run(n.unwindctl(args...))
}

func (n *runtimeMachine) mustCtl(command string, args ...string) string {
	n.Helper()
	out := n.ctl(command, args...)
	if out.code != 0 {
		n.Fatalf("%s: exit code %d\n%s%s", command, out.code, out.stdout, out.stderr)
	}
	return out.stdout
}

// first loads the conflist that containerd would use (go-cni, opts.go, loadFromConfDir).
func (n *runtimeMachine) first() (*libcni.NetworkConfigList, error) {
	paths, err := netconf.Conflists(n.ConfDir())
	if err != nil || len(paths) == 0 {
		return nil, fmt.Errorf("no conflist (%w)", err)
	}
	if filepath.Ext(paths[0]) == ".conflist" {
		return libcni.NetworkConfFromFile(paths[0])
	}
	c, err := netconf.ReadConflist(paths[0])
	if err != nil {
		return nil, err
	}
	// libcni turns the configuration of one plugin into this list (conf.go, ConfListFromConf)
	return libcni.NetworkConfFromBytes(fmt.Appendf(nil, `{"name": %q, "cniVersion": %q, "plugins": [%s]}`, c.Name, c.CNIVersion, c.Data))
}

func (n *runtimeMachine) rt(id string) *libcni.RuntimeConf {
	return &libcni.RuntimeConf{ContainerID: id, NetNS: n.pin(cmp.Or(n.shared, id)), IfName: "eth0", Args: [][2]string{{"IgnoreUnknown", "1"},
		{"K8S_POD_NAMESPACE", "default"}, {"K8S_POD_NAME", id}}}
}

// attach adds a container to the network of the first conflist, as the runtime does.
func (n *runtimeMachine) attach(id string) (*libcni.NetworkConfigList, error) {
	list, err := n.first()
	if err == nil {
		_, err = n.cni.AddNetworkList(context.Background(), list, n.rt(id))
	}
	return list, err
}

// veths returns the number of interfaces on a bridge.
func (n *runtimeMachine) veths(bridge string) int {
	n.Helper()
	master, err := netlink.LinkByName(bridge)
	links, listErr := netlink.LinkList()
	if err != nil || listErr != nil {
		n.Fatal(err, listErr)
	}
	count := 0
	for _, l := range links {
		if l.Attrs().MasterIndex == master.Attrs().Index {
			count++
		}
	}
	return count
}

// TestUninstallReleases: after uninstall, the DEL of a pod that was added through unwind releases
// everything. With containerd, the DEL runs the provider's conflist, which needs no unwind binary.
// With CRI-O, it runs the ADD's conflist from libcni's cache, so uninstall keeps the binary.
func TestUninstallReleases(t *testing.T) {
	t.Parallel()
	for i, way := range []string{"containerd", "CRI-O"} {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			n := newRuntimeMachine(t)
			bridge := fmt.Sprintf("uninst%d", i)
			n.removeLink(bridge)
			pool := filepath.Join(n.dir, "ipam")
			n.provide(fmt.Sprintf(`{"cniVersion": "1.0.0", "name": %q, "plugins": [
				{"type": "bridge", "bridge": %q, "ipam": {"type": "host-local", "subnet": "10.99.%d.0/24", "dataDir": %q}},
				{"type": "portmap", "capabilities": {"portMappings": true}}]}`, network, bridge, 20+i, pool))
			n.mustCtl("install")
			n.netns("a")
			list, err := n.attach("a")
			address := filepath.Join(pool, network, fmt.Sprintf("10.99.%d.2", 20+i))
			if _, statErr := os.Stat(address); err != nil || statErr != nil || len(n.ids()) != 1 || n.veths(bridge) != 1 {
				t.Fatalf("ADD: %v, %v, journal %v, %d veths", err, statErr, n.ids(), n.veths(bridge))
			}

			if out := n.ctl("uninstall"); out.code != 6 || !out.says("1 attachment (0 dead)") {
				t.Errorf("uninstall: %+v", out)
			}
			rt := n.rt("a")
			if way == "CRI-O" {
				var config []byte
				if config, rt, err = n.cni.GetNetworkListCachedConfig(list, rt); err != nil {
					t.Fatal(err)
				}
				list, err = libcni.NetworkConfFromBytes(config)
			} else {
				check(t, os.Remove(filepath.Join(n.BinDir(), "unwind")))
				list, err = n.first()
			}
			check(t, err)
			if got := list.Plugins[0].Network.Type; (got == "unwind") != (way == "CRI-O") {
				t.Fatalf("the DEL is by %s", got)
			}
			if err := n.cni.DelNetworkList(context.Background(), list, rt); err != nil {
				t.Errorf("DEL: %v", err)
			}
			if _, err := os.Stat(address); !os.IsNotExist(err) || n.veths(bridge) != 0 {
				t.Errorf("reservation: %v, %d veths", err, n.veths(bridge))
			}
			n.drop("a")
			if out := n.sweep(home); out.code != 0 || len(n.ids()) != 0 {
				t.Errorf("sweep: exit code %d, journal %v\n%s%s", out.code, n.ids(), out.stdout, out.stderr)
			}
			n.mustCtl("uninstall")
			if _, err := os.Lstat(filepath.Join(n.BinDir(), "unwind")); !os.IsNotExist(err) {
				t.Errorf("the binary: %v", err)
			}
		})
	}
}

// TestUninstallDuringADD: uninstall keeps the plugin while an ADD runs, although libcni's cache
// does not contain the attachment before the ADD ends.
func TestUninstallDuringADD(t *testing.T) {
	t.Parallel()
	n := newRuntimeMachine(t)
	n.provide(fmt.Sprintf(`{"cniVersion": "1.0.0", "name": %q, "plugins": [{"type": "loopback"}]}`, network))
	n.mustCtl("install")
	key := journal.Key{Network: network, ContainerID: "a", IfName: "eth0"}
	lock, err := n.store.TryAcquire(key)
	check(t, err)
	check(t, n.store.Update(context.Background(), func(tx *journal.Tx) error {
		return tx.Put(&journal.Record{Key: key, State: journal.Adding})
	}))
	plugin := filepath.Join(n.BinDir(), "unwind")
	if out := n.ctl("uninstall"); !out.says("kept:      " + plugin + " (used by a running operation on 1 attachment)") {
		t.Errorf("uninstall during an ADD: %+v", out)
	}
	lock.Release()
	conf := filepath.Join(n.ConfDir(), "00-unwind.conflist.off")
	check(t, os.Rename(conf, conf+".away"))
	if out := n.ctl("uninstall"); !out.says("kept:      " + plugin + " (used by 1 attachment in the journal)") {
		t.Errorf("uninstall without the conflist of the ADD: %+v", out)
	}
	check(t, os.Rename(conf+".away", conf))
	n.ctl("uninstall")
	if _, err := os.Lstat(plugin); !os.IsNotExist(err) {
		t.Errorf("the plugin after the ADD: %v", err)
	}
}

// installed checks that a pod can be added and deleted, even if an install was killed before. It
// reports whether unwind is in use.
func (n *runtimeMachine) installed(id string) bool {
	n.Helper()
	list, err := n.first()
	check(n, err)
	n.netns(id)
	if _, err := n.attach(id); err != nil {
		n.Fatalf("ADD: %v", err)
	}
	if err := n.cni.DelNetworkList(context.Background(), list, n.rt(id)); err != nil {
		n.Errorf("DEL: %v", err)
	}
	return list.Plugins[0].Network.Type == "unwind"
}

// TestInstallKilled kills 16 installs, each at a different moment. The network works after each of
// these installs, and a last install succeeds. The test does not cover a power loss.
func TestInstallKilled(t *testing.T) {
	t.Parallel()
	n := newRuntimeMachine(t)
	n.provide(fmt.Sprintf(`{"cniVersion": "1.0.0", "name": %q, "plugins": [{"type": "faulty", "dir": %q}]}`, network, n.dir))
	begin := time.Now()
	n.mustCtl("install")
	whole := time.Since(begin)
	n.mustCtl("uninstall")
	const tries = 16
	inUse := 0
	for i := range tries {
		cmd := n.unwindctl("install", "--conf-dir", n.ConfDir(), "--cni-bin-dir", n.BinDir(),
			"--state-dir", n.state, "--binary", filepath.Join(n.bin, "unwind"))
		check(t, cmd.Start())
		time.Sleep(whole * time.Duration(i+1) / tries)
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if n.installed(fmt.Sprintf("k%d", i)) {
			inUse++
			if i < tries-1 {
				n.mustCtl("uninstall")
			}
		}
	}
	t.Logf("of %d installs in %v, %d had come to their end", tries, whole, inUse)
	n.mustCtl("install")
	if !n.installed("last") {
		t.Error("an install after those that were killed is not in use")
	}
}

// unitFiles returns the contents of the systemd unit files, by name.
func unitFiles(t *testing.T) map[string]string {
	t.Helper()
	paths, err := filepath.Glob("internal/install/systemd/unwind-*")
	units := map[string]string{}
	for _, path := range paths {
		data, readErr := os.ReadFile(path)
		if readErr != nil {
			t.Fatal(readErr)
		}
		units[filepath.Base(path)] = string(data)
	}
	if err != nil || len(units) != 4 {
		t.Fatalf("units: %v (%v)", paths, err)
	}
	return units
}

// TestUnitsAreValid checks the units with systemd-analyze.
func TestUnitsAreValid(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		t.Skip("no systemd-analyze")
	}
	dir := t.TempDir()
	args := []string{"verify", "--man=no"}
	for name, text := range unitFiles(t) {
		// systemd-analyze requires that the command exists, but unwindctl is not installed here.
		text = strings.ReplaceAll(text, "/usr/local/bin/unwindctl", "/bin/true")
		path := filepath.Join(dir, name)
		check(t, os.WriteFile(path, []byte(text), 0o644))
		args = append(args, path)
	}
	out, err := exec.Command("systemd-analyze", args...).CombinedOutput()
	if err != nil || bytes.Contains(out, []byte("unwind-")) { // ignores other units' warnings
		t.Errorf("%v\n%s", err, out)
	}
}

// TestUnitsStayOnTheHost: the units use only settings that create no mount, PID or network
// namespace, because unwindctl cannot judge attachments from a private namespace. Each oneshot
// service has a timeout, so that the service cannot delay the boot for long.
func TestUnitsStayOnTheHost(t *testing.T) {
	t.Parallel()
	harmless := []string{"Type", "ExecStart", "SuccessExitStatus", "TimeoutStartSec", "TimeoutStopSec", "KillMode", "Restart", "RestartSec",
		"OOMPolicy", "LockPersonality", "RestrictRealtime", "RestrictSUIDSGID", "CapabilityBoundingSet"}
	for name, text := range unitFiles(t) {
		section, bounded := "", false
		for _, line := range strings.Split(text, "\n") {
			key, _, isSetting := strings.Cut(line, "=")
			switch {
			case strings.HasPrefix(line, "#"):
			case strings.HasPrefix(line, "["):
				section = line
			case section == "[Service]" && isSetting && !slices.Contains(harmless, key):
				t.Errorf("%s: %s: is it sure that it makes no namespace?", name, line)
			}
			bounded = bounded || key == "TimeoutStartSec" || line == "Type=exec"
		}
		if strings.HasSuffix(name, ".service") && !bounded {
			t.Errorf("%s: a oneshot service has no TimeoutStartSec by default", name)
		}
	}
}
