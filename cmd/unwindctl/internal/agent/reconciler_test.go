package agent

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/cmd/unwindctl/internal/metrics"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/cmd/unwindctl/internal/nodetest"
	"cni-unwind/plugin/netconf"
)

// reconciling is a reconciler on a node, and what it logs.
type reconciling struct {
	*nodetest.Dirs
	*reconciler
	log *bytes.Buffer
}

func newReconciling(t *testing.T, change func(*reconciler)) *reconciling {
	k := &reconciling{Dirs: nodetest.NewDirs(t, t.TempDir()), log: &bytes.Buffer{}}
	k.again(change)
	return k
}

// again starts the reconciler anew, as after the end of the agent.
func (k *reconciling) again(change func(*reconciler)) {
	if k.reconciler != nil {
		k.unlock()
	}
	paths := node.Runtime{ConfDir: k.Dirs.ConfDir(), BinDirs: []string{k.Dirs.BinDir()}, MaxConfs: 1}
	state := filepath.Join(k.Dir, "state")
	k.reconciler = &reconciler{
		Setup: install.Setup{
			ConfDir: k.Dirs.ConfDir(), BinDir: k.Dirs.BinDir(), Binary: filepath.Join(k.Dir, "unwind"), StateDir: state,
		},
		paths: paths, interval: time.Hour, log: newDedupLogger(slog.New(slog.NewTextHandler(k.log, nil))), heartbeat: &heartbeat{},
		stateDir: func() string { return state },
		find:     func() (node.Runtime, error) { return paths, nil }, verified: true,
	}
	if change != nil {
		change(k.reconciler)
	}
}

// reconciles has it look, and sees what is installed then.
func (k *reconciling) reconciles(want string) {
	k.Helper()
	for range 3 { // what it finds again does not change what it does
		k.reconcile(context.Background())
	}
	if got := k.Installed(); got != want {
		k.Errorf("got %q, want %q\n%s", got, want, k.log)
	}
}

// is checks what unwind_in_use says.
func (k *reconciling) is(want metrics.InUse) {
	k.Helper()
	if got := k.inUse(); got != want {
		k.Errorf("in use: %q, want %q", got, want)
	}
}

func (k *reconciling) later() { k.gone = k.gone.Add(-goneAfter) }

func (k *reconciling) says(text string) int { return strings.Count(k.log.String(), text) }

// TestReconcileGone: a provider's file that is gone is waited for, and then ours goes too. The next
// one is taken up.
func TestReconcileGone(t *testing.T) {
	t.Parallel()
	k := newReconciling(t, nil)
	k.is(metrics.Starting)
	k.reconciles(nodetest.First)
	k.is(metrics.On)
	k.Remove(k.InConf("10-bridge.conflist"))
	k.reconciles(nodetest.First)
	k.is(metrics.On)
	k.Write(k.InConf("10-bridge.conflist"), nodetest.Conflist("podnet", "portMappings"))
	k.reconciles(nodetest.First)
	k.Remove(k.InConf("10-bridge.conflist"))
	if again := k.reconcile(context.Background()); again > goneAfter {
		t.Errorf("looked at again after %s", again)
	}
	k.reconciles(nodetest.First)
	k.later()
	k.reconciles("")
	k.is(metrics.NoProvider)
	if k.says("the provider's file is gone") != 1 || k.says("level=WARN") != 1 {
		t.Errorf("not said once:\n%s", k.log)
	}
	k.Write(k.InConf("20-other.conflist"), nodetest.Conflist("other"))
	k.reconciles("other of 20-other.conflist with null")
}

// TestReconcileNext: where another conflist is in the directory, it takes the place of one that is
// gone, without a moment without ours.
func TestReconcileNext(t *testing.T) {
	t.Parallel()
	k := newReconciling(t, nil)
	k.Write(k.InConf("87-podman.conflist"), nodetest.Conflist("podman"))
	k.reconciles(nodetest.First)
	stop := k.AlwaysThere()
	k.Remove(k.InConf("10-bridge.conflist"))
	k.reconciles(nodetest.First)
	k.later()
	k.reconciles("podman of 87-podman.conflist with null")
	stop()
}

// TestReconcileFirst: what the runtime would take without us is what ours is of.
func TestReconcileFirst(t *testing.T) {
	t.Parallel()
	const pinned, before = "20-pinned.conflist", "05-before.conflist"
	for _, c := range []struct {
		name   string
		change func(*reconciling) func(*reconciler)
		want   string // once there is one that sorts before
	}{
		{"a new one", func(*reconciling) func(*reconciler) { return nil }, "before of 05-before.conflist with null"},
		{"--conf", func(k *reconciling) func(*reconciler) {
			return func(r *reconciler) { r.conf = k.InConf("10-bridge.conflist") }
		}, nodetest.First},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			k := newReconciling(t, nil)
			k.again(c.change(k))
			k.reconciles(nodetest.First)
			k.Write(k.InConf(before), `{"name": "before", "plugins": [`)
			k.reconciles(nodetest.First)
			k.Write(k.InConf(before), nodetest.Conflist("before"))
			k.reconciles(c.want)
		})
	}
	t.Run("install --conf of another directory", func(t *testing.T) {
		t.Parallel()
		k := newReconciling(t, nil)
		k.Source = filepath.Join(k.Dir, "zone.conflist")
		k.Write(k.Source, nodetest.Conflist("zone"))
		if _, err := k.WriteConflist(); err != nil {
			t.Fatal(err)
		}
		k.reconciles("zone of zone.conflist with null")
		k.Write(k.InConf(before), nodetest.Conflist("before"))
		k.reconciles("zone of zone.conflist with null")
	})
	t.Run("install --conf", func(t *testing.T) {
		t.Parallel()
		k := newReconciling(t, nil)
		k.Write(k.InConf(pinned), nodetest.Conflist("pinned"))
		k.Source = k.InConf(pinned)
		if _, err := k.WriteConflist(); err != nil {
			t.Fatal(err)
		}
		k.reconciles("pinned of 20-pinned.conflist with null")
		k.Write(k.InConf(before), nodetest.Conflist("before"))
		k.reconciles("before of 05-before.conflist with null")
	})
}

// TestReconcileConf: a file that --conf names is the only one, also while it is not there.
func TestReconcileConf(t *testing.T) {
	t.Parallel()
	k := newReconciling(t, nil)
	path := filepath.Join(k.Dir, "mine.conflist")
	k.again(func(r *reconciler) { r.conf = path })
	k.reconciles("")
	k.later()
	k.reconciles("")
	if k.says("level=WARN") != 1 || k.says("mine.conflist") != 1 {
		t.Errorf("that it is not there is not said once:\n%s", k.log)
	}
	k.Write(path, nodetest.Conflist("mine"))
	k.reconciles("mine of mine.conflist with null")
	k.Remove(path)
	k.reconciles("mine of mine.conflist with null")
	k.later()
	k.reconciles("")
}

// TestReconcileSwitchedOff: what somebody else has removed is not written again, until ours is
// there again, or the agent is started anew. The binary is not either.
func TestReconcileSwitchedOff(t *testing.T) {
	t.Parallel()
	k := newReconciling(t, nil)
	binary := filepath.Join(k.BinDir(), netconf.Name)
	off := func() {
		t.Helper()
		k.reconciles(nodetest.First)
		k.Remove(k.Own())
		k.Remove(binary)
		k.reconciles("")
		k.Rename(k.InConf("10-bridge.conflist"), nodetest.Conflist("podnet", "bandwidth"))
		k.reconciles("")
		k.Remove(k.InConf("10-bridge.conflist"))
		k.reconciles("")
		k.Write(k.InConf("10-bridge.conflist"), nodetest.Conflist("podnet", "portMappings"))
		k.reconciles("")
		if durable.Exists(binary) {
			t.Error("the plugin was put back")
		}
	}
	off()
	k.is(metrics.RemovedByHand)
	if k.says("somebody has removed unwind's conflist") != 1 {
		t.Errorf("not said once:\n%s", k.log)
	}
	if _, err := k.WriteConflist(); err != nil { // as unwindctl install does
		t.Fatal(err)
	}
	k.reconciles(nodetest.First)
	if !durable.Exists(binary) {
		t.Error("the plugin was not put back")
	}
	off()
	k.again(nil)
	k.reconciles(nodetest.First)
}

// TestReconcileDirectoryCleared: a provider that removes all that is in the directory, and then
// writes its own, has switched nothing off.
func TestReconcileDirectoryCleared(t *testing.T) {
	t.Parallel()
	for _, seen := range []bool{true, false} {
		k := newReconciling(t, nil)
		k.reconciles(nodetest.First)
		k.Remove(k.Own())
		k.Remove(k.InConf("10-bridge.conflist"))
		if seen {
			k.reconciles("")
		}
		k.Rename(k.InConf("10-bridge.conflist"), nodetest.Conflist("podnet", "portMappings"))
		k.reconciles(nodetest.First)
	}
}

// TestReconcileBinary: a plugin that is gone, another one or not to be executed is put back.
func TestReconcileBinary(t *testing.T) {
	t.Parallel()
	k := newReconciling(t, nil)
	binary := filepath.Join(k.BinDir(), netconf.Name)
	for name, change := range map[string]func() error{
		"removed":            func() error { return os.Remove(binary) },
		"another":            func() error { return os.WriteFile(binary, []byte("x"), 0o755) },
		"not to be executed": func() error { return os.Chmod(binary, 0o600) },
	} {
		k.reconciles(nodetest.First)
		if err := change(); err != nil {
			t.Fatal(err)
		}
		k.reconciles(nodetest.First)
		info, err := os.Stat(binary)
		content, _ := os.ReadFile(binary)
		if err != nil || info.Mode().Perm() != 0o755 || string(content) != nodetest.FakePlugin {
			t.Errorf("%s: it was not put back (%v)", name, err)
		}
	}
}

// TestReconcileTemporary: what the agent writes itself must not have it look again before it is in
// place, or on a full disk it would look without end.
func TestReconcileTemporary(t *testing.T) {
	t.Parallel()
	k := newReconciling(t, nil)
	for path, want := range map[string]bool{k.InConf("." + nodetest.OwnFile + ".123.tmp"): true, k.Own(): false, k.InConf("10-bridge.conflist"): false} {
		if k.isTemporary(path) != want {
			t.Errorf("%s: %t", path, !want)
		}
	}
}

// TestReconcileOther: what is not the plugin is not installed.
func TestReconcileOther(t *testing.T) {
	t.Parallel()
	k := newReconciling(t, func(r *reconciler) { r.verified = false })
	k.Write(filepath.Join(k.Dir, "unwind"), strings.ReplaceAll(nodetest.FakePlugin, "unwind", "other"))
	k.reconciles("")
	if durable.Exists(filepath.Join(k.BinDir(), netconf.Name)) || k.says("it is not unwind") != 1 {
		t.Errorf("it is installed, or that it is not is not said once:\n%s", k.log)
	}
}

// TestReconcileRefused: what is in the runtime's configuration against an install is said once, and
// counts no more once it is mended.
func TestReconcileRefused(t *testing.T) {
	t.Parallel()
	k := newReconciling(t, nil)
	paths := k.paths
	problem := []string{"max_conf_num is 2"}
	k.find = func() (node.Runtime, error) { p := paths; p.Problems = problem; return p, nil }
	k.reconciles("")
	k.is(metrics.Refused)
	if k.says("max_conf_num") != 1 {
		t.Errorf("not said once:\n%s", k.log)
	}
	problem = nil
	k.reconciles(nodetest.First)
}

// TestReconcileBehind: a plugin that a mesh puts behind unwind is returned to the provider's file.
// If the mesh puts it there again at once, the two do not write without end.
func TestReconcileBehind(t *testing.T) {
	t.Parallel()
	k := newReconciling(t, nil)
	k.reconciles(nodetest.First)
	patch := func() {
		t.Helper()
		data, err := os.ReadFile(k.Own())
		if err != nil {
			t.Fatal(err)
		}
		k.Rename(k.Own(), strings.Replace(string(data), "\n  ]\n}", `, {"type": "linkerd-cni"}]}`, 1))
	}
	types := func(path string) string {
		c, err := netconf.ReadConflist(path)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(c.Types, " ")
	}
	provider := k.InConf("10-bridge.conflist")
	patch()
	k.reconciles(nodetest.First)
	if got := types(provider); got != "bridge portmap linkerd-cni" || k.says("it is now at the end of") != 1 {
		t.Errorf("the provider has %s\n%s", got, k.log)
	}
	patch()
	for range 3 {
		k.reconcile(context.Background())
	}
	if got := types(k.Own()); got != "unwind linkerd-cni" || k.says("goes on to put its plugin behind unwind") != 1 {
		t.Errorf("ours has %s\n%s", got, k.log)
	}
	k.is(metrics.MeshInTheWay)
	k.repaired = time.Now().Add(-time.Hour)
	k.reconciles(nodetest.First)
	if got := types(provider); got != "bridge portmap linkerd-cni" {
		t.Errorf("the provider has %s\n%s", got, k.log)
	}
}

// TestReconcileOlder: an agent replaces an older plugin, and leaves a newer one, or one that cannot
// be compared, as it is.
func TestReconcileOlder(t *testing.T) {
	t.Parallel()
	plugin := func(version string) string {
		return strings.ReplaceAll(nodetest.FakePlugin, "unwind under test", "CNI plugin unwind "+version+": under test")
	}
	for _, c := range []struct {
		there, own string
		replaced   bool
	}{
		{"v1.2.0", "v1.3.0", true},
		{"v1.3.0", "v1.2.0", false},
		{"v1.2.1-0.20261123003115-93d26977894e", "v1.2.0", false},
		{"v0.0.0-20261123003115-93d26977894e", "v0.0.0-20261123003116-03d26977894e", true},
		{"v0.0.0-20261123003116-03d26977894e", "v0.0.0-20261123003115-93d26977894e", false},
		{"dev", "v1.3.0", false},
		{"v1.2.0", "dev", false},
	} {
		t.Run(c.own+" beside "+c.there, func(t *testing.T) {
			t.Parallel()
			k := newReconciling(t, nil)
			binary := filepath.Join(k.BinDir(), netconf.Name)
			k.Write(filepath.Join(k.Dir, "unwind"), plugin(c.own))
			k.Write(binary, plugin(c.there))
			k.reconciles(nodetest.First)
			got, err := os.ReadFile(binary)
			if err != nil || (string(got) == plugin(c.own)) != c.replaced || !c.replaced && string(got) != plugin(c.there) ||
				k.says("the plugin is left as it is") != map[bool]int{true: 0, false: 1}[c.replaced] {
				t.Errorf("%v\n%s\n%s", err, got, k.log)
			}
		})
	}
}

// TestReconcileCilium: where cilium has copied our file into its own, no pod could start. Ours goes,
// and cilium's is what it would be without us. It is not written again.
func TestReconcileCilium(t *testing.T) {
	t.Parallel()
	for _, chainFile := range []string{"10-bridge.conflist", "05-cilium.conflist"} {
		t.Run(chainFile, func(t *testing.T) {
			t.Parallel()
			k := newReconciling(t, nil)
			k.reconciles(nodetest.First)
			copied := k.InConf("05-cilium.conflist")
			k.Rename(copied, `{"cniVersion": "1.1.0", "name": "podnet", "plugins": [{"type": "unwind", "chainFile": "`+
				k.InConf(chainFile)+`"}, {"type": "cilium-cni", "log-file": "/l"}]}`)
			k.reconciles("")
			k.is(metrics.CiliumChaining)
			c, err := netconf.ReadConflist(copied)
			if err != nil || strings.Join(c.Types, " ") != "bridge portmap cilium-cni" || c.CNIVersion != "1.0.0" || c.Name != "podnet" {
				t.Errorf("%+v, %v", c, err)
			}
			if k.says("unwind is switched off, so that pods can start") != 1 || k.says("level=WARN") != 0 {
				t.Errorf("it is not said once:\n%s", k.log)
			}
		})
	}
}
