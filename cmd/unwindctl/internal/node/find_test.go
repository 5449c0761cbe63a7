package node

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/grpc"

	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/nodetest"
	"cni-unwind/plugin/plugintest/sandbox"
)

// untold is the beginning of the problem that Find adds if a containerd reports no directories.
const untold = "cannot confirm the runtime's CNI directories, because containerd at /run/containerd/containerd.sock did not report them: "

// TestFindRuntimes: Find recognizes the known runtimes by their files and sockets. No containerd is
// running, so none reports its directories.
func TestFindRuntimes(t *testing.T) {
	t.Parallel()
	standard := func(change func(*Runtime)) []Runtime {
		r := Runtime{Name: "containerd", ConfDir: "/etc/cni/net.d", BinDirs: []string{"/opt/cni/bin"}, Socket: nodetest.ContainerdSocket, MaxConfs: 1}
		change(&r)
		if r.Name != crio {
			r.Problems = append([]string{strings.Replace(strings.Replace(untold, "containerd", r.Name, 1), nodetest.ContainerdSocket, r.Socket, 1)}, r.Problems...)
		}
		return []Runtime{r}
	}
	kubelet := func(r *Runtime) { r.Kubelet = true }
	crio := func(change func(*Runtime)) []Runtime {
		return standard(func(r *Runtime) {
			r.Name, r.Config, r.Socket = crio, "/etc/crio/crio.conf", nodetest.CrioSocket
			change(r)
		})
	}
	for _, c := range []struct {
		name  string
		files map[string]string
		want  []Runtime
	}{
		{"nothing", nil, nil},
		{"containerd without a configuration", map[string]string{nodetest.ContainerdSocket[1:]: ""}, standard(func(*Runtime) {})},
		{"containerd with a kubelet", map[string]string{nodetest.ContainerdSocket[1:]: "", "var/lib/kubelet/": ""}, standard(kubelet)},
		{"containerd, stopped", map[string]string{nodetest.ContainerdConfig: ""}, standard(func(*Runtime) {})},
		{"shims of another containerd", map[string]string{"run/containerd/s/": ""}, nil},
		{"k3s", map[string]string{nodetest.K3sConfig: ""}, standard(func(r *Runtime) {
			r.Name, r.Socket, r.Kubelet = "k3s", nodetest.K3sSocket, true
			r.ConfDir, r.BinDirs = "/var/lib/rancher/k3s/agent/etc/cni/net.d", []string{"/var/lib/rancher/k3s/data/cni"}
		})},
		{"RKE2", map[string]string{"var/lib/rancher/rke2/agent/etc/containerd/config.toml": ""},
			standard(func(r *Runtime) { r.Name, r.Socket, r.Kubelet = "rke2", nodetest.K3sSocket, true })},
		{"MicroK8s", map[string]string{"var/snap/microk8s/current": "-> 7731", "var/snap/microk8s/7731/args/containerd.toml": ""}, standard(func(r *Runtime) {
			r.Name, r.Socket, r.Kubelet = "microk8s", "/var/snap/microk8s/common/run/containerd.sock", true
			r.ConfDir, r.BinDirs = "/var/snap/microk8s/current/args/cni-network", []string{"/var/snap/microk8s/current/opt/cni/bin"}
		})},
		{"k0s", map[string]string{nodetest.K0sConfig: ""}, standard(func(r *Runtime) { r.Name, r.Socket, r.Kubelet = "k0s", "/run/k0s/containerd.sock", true })},
		{"Talos", map[string]string{"etc/cri/containerd.toml": "", nodetest.ContainerdSocket[1:]: "", nodetest.ContainerdConfig: "", "var/lib/kubelet/": ""}, standard(kubelet)},
		{"Bottlerocket", map[string]string{nodetest.ContainerdConfig: "", "var/lib/kubelet/": "", "etc/host-containerd/config.toml": ""}, standard(kubelet)},
		{"Flatcar", map[string]string{"usr/share/containerd/config.toml": "", nodetest.ContainerdSocket[1:]: "", "var/lib/kubelet/": ""}, standard(kubelet)},
		{"CRI-O without a configuration", map[string]string{"run/crio/crio.sock": ""}, crio(func(r *Runtime) { r.Config = "" })},
		{"CRI-O", map[string]string{
			"etc/crio/crio.conf":           "[crio.network]\nnetwork_dir = \"/main/\"\nplugin_dirs = [\"/m1\", \"/m2\"]\n[crio.api]\nlisten = \"unix:///s\"\n",
			"etc/crio/crio.conf.d/10-a":    "[crio.network]\nnetwork_dir = \"/ten\"\nplugin_dir = \"/old\"\n",
			"etc/crio/crio.conf.d/20-b":    "[crio.network]\nplugin_dirs = [\"/twenty\"]\n",
			"etc/crio/crio.conf.d/30-c/x":  "[crio.runtime]\nconmon = \"/x\"\n",
			"etc/crio/crio.conf.d/15.conf": "",
		}, crio(func(r *Runtime) {
			r.Config, r.Socket = "/etc/crio/crio.conf.d/20-b", "/s"
			r.ConfDir, r.BinDirs = "/ten", []string{"/twenty", "/old"}
		})},
		{"CRI-O that looks for STATUS", map[string]string{"etc/crio/crio.conf": "[crio.network]\ncni_status_grace_period = \"30s\"\n"}, crio(func(r *Runtime) { r.StatusGrace = true })},
		{"CRI-O that does not", map[string]string{"etc/crio/crio.conf": "[crio.network]\ncni_status_grace_period = \"0s\"\n"}, crio(func(*Runtime) {})},
		{"OpenShift", map[string]string{"var/lib/kubelet/": "", "etc/crio/crio.conf.d/00-default": "[crio.network]\nnetwork_dir = \"/etc/kubernetes/cni/net.d/\"\nplugin_dirs = [\n  \"/var/lib/cni/bin\",\n]\n"},
			crio(func(r *Runtime) {
				r.Config = "/etc/crio/crio.conf.d/00-default"
				r.ConfDir, r.BinDirs, r.Kubelet = "/etc/kubernetes/cni/net.d", []string{"/var/lib/cni/bin"}, true
			})},
		{"CRI-O, another network by default", map[string]string{
			"etc/crio/crio.conf":              "[crio.network]\ncni_default_network = \"other\"\n",
			"etc/cni/net.d/00-own.conflist":   `{"name": "podnet", "plugins": [{"type": "unwind", "chainFile": "/c"}]}`,
			"etc/cni/net.d/10-first.conflist": `{"name": "podnet", "plugins": [{"type": "bridge"}]}`,
			"etc/cni/net.d/20-other.conflist": `{"name": "other", "plugins": [{"type": "bridge"}]}`,
		}, crio(func(r *Runtime) { r.DefaultNetwork = "other" })},
		{"CRI-O, the network by default", map[string]string{
			"etc/crio/crio.conf":              "[crio.network]\ncni_default_network = \"podnet\"\n",
			"etc/cni/net.d/10-first.conflist": `{"name": "podnet", "plugins": [{"type": "bridge"}]}`,
		}, crio(func(r *Runtime) { r.DefaultNetwork = "podnet" })},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			finds(t, c.files, c.want)
		})
	}
}

// TestCRISockets: install and --cri auto know the same runtimes. Only --cri auto also knows
// cri-dockerd, which has no directories of its own.
func TestCRISockets(t *testing.T) {
	t.Parallel()
	found, err := Find(t.Context(), nodetest.Root(t, map[string]string{nodetest.ContainerdConfig: "", "etc/crio/crio.conf": "", nodetest.K3sConfig: "", nodetest.K0sConfig: "",
		"var/lib/rancher/rke2/agent/etc/containerd/config.toml": "", "var/snap/microk8s/current/args/containerd.toml": ""}))
	if err != nil {
		t.Fatal(err)
	}
	install := []string{"/run/cri-dockerd.sock"}
	for _, r := range found {
		install = append(install, strings.Replace(r.Socket, "/var/run/", "/run/", 1)) // CRI-O's socket
	}
	slices.Sort(install)
	if diff := cmp.Diff(slices.Compact(install), slices.Sorted(slices.Values(CRISockets))); diff != "" {
		t.Errorf("-of the runtimes that install knows +of --cri auto:\n%s", diff)
	}
}

// finds checks which runtimes Find returns for a machine with these files. For problems and notes,
// want contains only the beginnings.
func finds(t *testing.T, files map[string]string, want []Runtime) {
	t.Helper()
	got, err := Find(t.Context(), nodetest.Root(t, files))
	for i := range min(len(got), len(want)) {
		shorten(got[i].Problems, want[i].Problems)
		shorten(got[i].Notes, want[i].Notes)
	}
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty(), cmpopts.IgnoreUnexported(Runtime{})); diff != "" || err != nil {
		t.Errorf("%v, -want +got:\n%s", err, diff)
	}
}

// shorten replaces texts[i] with beginnings[i] if texts[i] begins with it.
func shorten(texts, beginnings []string) {
	for i := range min(len(texts), len(beginnings)) {
		if strings.HasPrefix(texts[i], beginnings[i]) {
			texts[i] = beginnings[i]
		}
	}
}

// TestFindAsks: Find asks containerd for its directories. If an upgrade would move them, Find
// reports a problem (k3s) or returns paths that stay valid (MicroK8s).
func TestFindAsks(t *testing.T) {
	t.Parallel()
	const cniconfig = `{"PluginDirs": ["/told/", "/x"], "PluginConfDir": "/c/", "PluginMaxConfNum": 1, "Prefix": "eth", "Networks": []}`
	told := func(change func(*Runtime)) []Runtime {
		r := Runtime{Name: "containerd", ConfDir: "/c", BinDirs: []string{"/told", "/x"}, Socket: nodetest.ContainerdSocket, MaxConfs: 1}
		change(&r)
		r.Config = r.Socket
		return []Runtime{r}
	}
	silent := []Runtime{{Name: "containerd", ConfDir: DefaultConfDir, BinDirs: []string{DefaultBinDir}, Socket: nodetest.ContainerdSocket, MaxConfs: 1, Problems: []string{untold}}}
	for _, c := range []struct {
		name, file, config string
		info               map[string]string // nil for no answer
		want               []Runtime
	}{
		{"containerd", nodetest.ContainerdConfig, "", map[string]string{"cniconfig": cniconfig, "config": `{"containerd": {"runtimes": {"runc": {}, "own": {"cniConfDir": "/c"}}}}`},
			told(func(*Runtime) {})},
		{"handlers with conflists of their own", nodetest.ContainerdConfig, "", map[string]string{"cniconfig": cniconfig, "config": `{"containerd": {"runtimes": {"kata": {"cniConfDir": "/kata"}}}}`},
			told(func(r *Runtime) {
				r.Notes = []string{`pods with the runtime handler "kata" use the conflists in /kata`}
			})},
		{"every conflist", nodetest.ContainerdConfig, "", map[string]string{"cniconfig": strings.Replace(cniconfig, "1,", "0,", 1)},
			told(func(r *Runtime) {
				r.MaxConfs, r.Problems = 0, []string{"max_conf_num is 0 according to /run/containerd/containerd.sock: "}
			})},
		{"no answer", nodetest.ContainerdConfig, "", nil, silent},
		{"an answer without directories", nodetest.ContainerdConfig, "", map[string]string{"config": "{}"}, silent},
		{"an answer without directories of plugins", nodetest.ContainerdConfig, "", map[string]string{"cniconfig": `{"PluginConfDir": "/c"}`}, silent},
		{"CRI-O", "etc/crio/crio.conf", "[crio.api]\nlisten = \"unix:///s\"\n", map[string]string{"config": `{"crio": {}, "sandboxImage": "pause"}`},
			[]Runtime{{Name: crio, ConfDir: DefaultConfDir, BinDirs: []string{DefaultBinDir}, Socket: "/s", MaxConfs: 1}}},
		{"k3s before October 2024", nodetest.K3sConfig, "", map[string]string{"cniconfig": strings.Replace(cniconfig, "/told", "/var/lib/rancher/k3s/data/8e61/bin", 1)},
			told(func(r *Runtime) {
				r.Name, r.Socket, r.Kubelet = "k3s", nodetest.K3sSocket, true
				r.BinDirs = []string{"/var/lib/rancher/k3s/data/8e61/bin", "/x"}
				r.Problems = []string{"the next upgrade of this k3s moves the plugin directory"}
			})},
		{"MicroK8s", "var/snap/microk8s/7731/args/containerd.toml", "", map[string]string{"cniconfig": `{"PluginDirs": ["/var/snap/microk8s/7731/opt/cni/bin"], "PluginConfDir": "/var/snap/microk8s/7731/args/cni-network", "PluginMaxConfNum": 1}`},
			told(func(r *Runtime) {
				r.Name, r.Socket, r.Kubelet = "microk8s", "/var/snap/microk8s/common/run/containerd.sock", true
				r.ConfDir, r.BinDirs = "/var/snap/microk8s/current/args/cni-network", []string{"/var/snap/microk8s/current/opt/cni/bin"}
			})},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			files := map[string]string{c.file: c.config}
			if c.name == "MicroK8s" {
				files["var/snap/microk8s/current"] = "-> 7731"
			}
			if c.info != nil {
				files[strings.TrimPrefix(c.want[0].Socket, "/")] = "-> " + (&nodetest.FakeCRI{Info: c.info}).Serve(t)
			}
			finds(t, files, c.want)
		})
	}
}

// TestKubeletOfPod: a pod's node has a kubelet, even if Find sees neither the kubelet's directory nor
// a runtime with CRI, as with cri-dockerd. So no container selects its network by name.
func TestKubeletOfPod(t *testing.T) {
	t.Setenv(podEnv, "10.96.0.1")
	found, err := Read(nodetest.Root(t, map[string]string{nodetest.ContainerdConfig: ""}))
	none, chooseErr := Choose(nil, "")
	if err != nil || chooseErr != nil || len(found) != 1 || found[0].ByName() || none.ByName() {
		t.Errorf("%+v, %v; none: %+v, %v", found, err, none, chooseErr)
	}
}

// TestFindDocker: Find ignores a containerd without CRI, because it runs no pods.
func TestFindDocker(t *testing.T) {
	t.Parallel()
	socket, l := nodetest.Listen(t)
	server := grpc.NewServer()
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)
	finds(t, map[string]string{nodetest.ContainerdConfig: "", nodetest.ContainerdSocket[1:]: "-> " + socket}, nil)
}

// TestResolve: a read-only command asks runtimes for their directories only if none of the usual
// directories contains unwind's conflist.
func TestResolve(t *testing.T) {
	t.Parallel()
	own := func(stateDir string) string {
		return fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "n", "type": "unwind", "chainFile": "/c", "stateDir": %q}`, stateDir)
	}
	const k3s = "var/lib/rancher/k3s/agent/etc/cni/net.d"
	for _, c := range []struct {
		name  string
		files map[string]string
		given Directories
		want  Directories
		asked int64
	}{
		{"in the usual directory", map[string]string{k3s + "/0.json": own("/s"), "told/0.json": own("/t")}, Directories{}, Directories{"/" + k3s, "/s"}, 0},
		{"in the default directory", map[string]string{"etc/cni/net.d/0.json": own("/s"), "told/0.json": own("/t")}, Directories{}, Directories{DefaultConfDir, "/s"}, 0},
		{"where the runtime tells", map[string]string{"told/0.json": own("/t")}, Directories{}, Directories{"/told", "/t"}, 1},
		{"nowhere", map[string]string{"told/0.json": `{"cniVersion": "1.0.0", "name": "n", "type": "bridge"}`}, Directories{}, Directories{"/told", netconf.DefaultStateDir}, 1},
		{"given", map[string]string{k3s + "/0.json": own("/s")}, Directories{ConfDir: "/told"}, Directories{"/told", netconf.DefaultStateDir}, 0},
		{"a state directory given", map[string]string{k3s + "/0.json": own("/s")}, Directories{StateDir: "/x"}, Directories{"/" + k3s, "/x"}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			fake := &nodetest.FakeCRI{Info: map[string]string{"cniconfig": `{"PluginDirs": ["/b"], "PluginConfDir": "/told"}`}}
			c.files[nodetest.K3sConfig] = ""
			c.files[nodetest.ContainerdSocket[1:]] = "-> " + fake.Serve(t)
			if err := c.given.resolve(t.Context(), nodetest.Root(t, c.files)); err != nil || c.given != c.want || fake.Asked.Load() != c.asked {
				t.Errorf("%+v, %v, asked %d times; want %+v, %d", c.given, err, fake.Asked.Load(), c.want, c.asked)
			}
		})
	}
}

// TestFindRuntimesBroken: if CRI-O's configuration cannot be read, Find returns an error that names
// the file and quotes nothing from it. Find still returns the other runtimes.
func TestFindRuntimesBroken(t *testing.T) {
	t.Parallel()
	const secret = "hunter2"
	for _, c := range []struct{ name, file, content, want string }{
		{"no TOML", "etc/crio/crio.conf", "[crio]\npassword = " + secret, "/etc/crio/crio.conf: not valid TOML at line 2"},
		{"a drop-in", "etc/crio/crio.conf.d/x", "[" + secret, "/etc/crio/crio.conf.d/x: not valid TOML"},
		{"a directory", "etc/crio/crio.conf/", "", "not a regular file"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			found, err := Find(t.Context(), nodetest.Root(t, map[string]string{c.file: c.content, nodetest.K3sConfig: ""}))
			if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), secret) {
				t.Errorf("%v, want %q", err, c.want)
			}
			if !slices.ContainsFunc(found, func(r Runtime) bool { return r.Name == "k3s" }) {
				t.Errorf("found: %v", found)
			}
		})
	}
}

// TestAsksTogether: Find asks all runtimes at the same time, so several hung runtimes delay it no
// longer than one. Here, each of two queries waits until the other has begun.
func TestAsksTogether(t *testing.T) {
	t.Parallel()
	var both sync.WaitGroup
	both.Add(2)
	found, err := find(nodetest.Root(t, map[string]string{nodetest.ContainerdConfig: "", nodetest.K3sConfig: ""}),
		func(*Runtime) bool {
			both.Done()
			both.Wait()
			return true
		})
	if len(found) != 2 || err != nil {
		t.Errorf("%v, %v", found, err)
	}
}

// TestUntold: if a runtime does not report its directories, the problem names the cause and a
// remedy. It suggests starting the runtime only if the runtime is not running.
func TestUntold(t *testing.T) {
	t.Parallel()
	deaf, _ := nodetest.Listen(t)
	for _, c := range []struct{ name, socket, want, not string }{
		{"hangs", "-> " + deaf, "no answer within 2s; find out why", "start"},
		{"an old one", "-> " + (&nodetest.FakeCRI{}).Serve(t), "its response does not contain them", "start"},
		{"does not run", "-> /none.sock", "it is not running (no such file or directory); start it", "restart"},
		{"a file", "", "it is not running (connection refused); start it", "restart"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			root := nodetest.Root(t, map[string]string{nodetest.ContainerdConfig: "", nodetest.ContainerdSocket[1:]: c.socket})
			found, err := Find(Waiting(t.Context(), io.Discard, LookTimeout, ""), root)
			if err != nil || len(found) != 1 || len(found[0].Problems) != 1 || !strings.Contains(found[0].Problems[0], c.want) || strings.Contains(found[0].Problems[0], c.not) {
				t.Errorf("%v, %+v, want %q", err, found, c.want)
			}
		})
	}
}

// TestOnlyNamed: a command with --cri SOCKET queries no other runtime.
func TestOnlyNamed(t *testing.T) {
	t.Parallel()
	fake := &nodetest.FakeCRI{Info: map[string]string{"cniconfig": `{"PluginDirs": ["/b"], "PluginConfDir": "/told"}`}}
	socket := fake.Serve(t)
	root := nodetest.Root(t, map[string]string{nodetest.ContainerdConfig: "", nodetest.ContainerdSocket[1:]: "-> " + socket})
	for only, asked := range map[string]int64{"unix:///run/other.sock": 0, "unix://" + socket: 1} {
		found, err := Find(Waiting(t.Context(), io.Discard, sandbox.Patience, only), root)
		if err != nil || len(found) != 1 || fake.Asked.Load() != asked || (found[0].ConfDir == "/told") != (asked > 0) {
			t.Errorf("%s: %v, %+v, asked %d times", only, err, found, fake.Asked.Load())
		}
		fake.Asked.Store(0)
	}
}
