package node

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"cni-unwind/plugin/netconf"
	"cni-unwind/testdata/nodetest"
)

// TestFindRuntimes has the configurations of the field, in the forms in which their makers ship
// them.
func TestFindRuntimes(t *testing.T) {
	t.Parallel()
	standard := func(change func(*Runtime)) []Runtime {
		r := Runtime{Name: "containerd", Config: "/" + nodetest.ContainerdConfig, ConfDir: "/etc/cni/net.d", BinDirs: []string{"/opt/cni/bin"},
			Socket: nodetest.ContainerdSocket, MaxConfs: 1}
		change(&r)
		return []Runtime{r}
	}
	crio := func(change func(*Runtime)) []Runtime {
		return standard(func(r *Runtime) {
			r.Name, r.Config, r.Socket = "cri-o", "/etc/crio/crio.conf", nodetest.CrioSocket
			change(r)
		})
	}
	for _, c := range []struct {
		name  string
		files map[string]string
		want  []Runtime
	}{
		{"nothing", nil, nil},
		{"containerd without a configuration", map[string]string{"run/containerd/containerd.sock": ""},
			standard(func(r *Runtime) { r.Config = "" })},
		{"containerd with a kubelet", map[string]string{"run/containerd/containerd.sock": "", "var/lib/kubelet/": ""},
			standard(func(r *Runtime) { r.Config, r.Kubelet = "", true })},
		{"shims of another containerd", map[string]string{"run/containerd/s/": ""}, nil},
		{"version 1", map[string]string{nodetest.ContainerdConfig: "[plugins.cri.cni]\nbin_dir = \"/b\"\nconf_dir = \"/c/\"\n"},
			standard(func(r *Runtime) { r.ConfDir, r.BinDirs = "/c", []string{"/b"} })},
		{"version 2, GKE", map[string]string{nodetest.ContainerdConfig: "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".cni]\nbin_dir = \"/home/kubernetes/bin\"\n"},
			standard(func(r *Runtime) { r.BinDirs = []string{"/home/kubernetes/bin"} })},
		{"version 2 with the table of version 3", map[string]string{nodetest.ContainerdConfig: "version = 2\n[plugins.\"io.containerd.cri.v1.runtime\".cni]\nbin_dir = \"/b\"\n"},
			standard(func(*Runtime) {})},
		{"version 3", map[string]string{nodetest.ContainerdConfig: "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.cni]\nbin_dirs = ['/a', '/b']\nbin_dir = ''\n[grpc]\naddress = '/s'\n"},
			standard(func(r *Runtime) { r.BinDirs, r.Major, r.Socket = []string{"/a", "/b"}, 2, "/s" })},
		{"version 3 with the table of version 2", map[string]string{nodetest.ContainerdConfig: "version = 3\n[plugins.'io.containerd.grpc.v1.cri'.cni]\nbin_dir = '/b'\n"},
			standard(func(r *Runtime) { r.Major = 2 })},
		{"version 4", map[string]string{nodetest.ContainerdConfig: "version = 4\n[plugins.'io.containerd.server.v1.grpc']\naddress = '/s'\n"},
			standard(func(r *Runtime) { r.Major, r.Socket = 2, "/s" })},
		{"every conflist", map[string]string{nodetest.ContainerdConfig: "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.cni]\nmax_conf_num = 0\n"},
			standard(func(r *Runtime) {
				r.Major, r.MaxConfs = 2, 0
				r.Problems = []string{"max_conf_num is 0 according to /etc/containerd/config.toml"}
			})},
		{"version 3 with the key of the plugins that containerd 2.4 does not read", map[string]string{nodetest.ContainerdConfig: "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.cni]\nbin_dir = '/b'\n"},
			standard(func(r *Runtime) {
				r.Major, r.BinDirs = 2, []string{"/b"}
				r.Problems = []string{"containerd does not respond at /run/containerd/containerd.sock, and containerd up to 2.3 uses bin_dir in /etc/containerd/config.toml, but later releases do not; "}
			})},
		{"imports", map[string]string{
			nodetest.ContainerdConfig:       "version = 3\nimports = ['conf.d/*.toml', '/other/one.toml', '/none/*.toml']\n[plugins.'io.containerd.cri.v1.runtime'.cni]\nbin_dirs = ['/main']\nconf_dir = '/main'\n",
			"etc/containerd/conf.d/10":      "no import",
			"etc/containerd/conf.d/10.toml": "version = 2\n[plugins.'io.containerd.grpc.v1.cri'.cni]\nbin_dir = '/ten'\n",
			"etc/containerd/conf.d/20.toml": "[debug]\nlevel = 'info'\n",
			"other/one.toml":                "imports = ['two.toml']\n",
		}, standard(func(r *Runtime) {
			r.ConfDir, r.BinDirs, r.Major = "/main", []string{"/main"}, 2
			r.Problems = []string{
				"containerd does not respond at /run/containerd/containerd.sock, and /etc/containerd/conf.d/10.toml may change its CNI directories; start containerd, or set --conf-dir and --cni-bin-dir",
				"containerd does not respond at /run/containerd/containerd.sock, and /other/one.toml may change its CNI directories; ",
			}
		})},
		{"imports of version 1", map[string]string{
			nodetest.ContainerdConfig:       "imports = ['conf.d/10.toml']\n[plugins.cri.cni]\nbin_dir = '/main'\n",
			"etc/containerd/conf.d/10.toml": "[plugins.cri.registry]\nconfig_path = '/r'\n",
		}, standard(func(r *Runtime) {
			r.BinDirs = []string{"/main"} // containerd 1 would not have it
			r.Problems = []string{"containerd does not respond at /run/containerd/containerd.sock, and /etc/containerd/conf.d/10.toml may change its CNI directories; "}
		})},
		{"Docker's containerd", map[string]string{nodetest.ContainerdConfig: "disabled_plugins = [\"cri\"]\n"}, nil},
		{"k3s", map[string]string{nodetest.K3sConfig: "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".cni]\n" +
			"  bin_dir = \"/var/lib/rancher/k3s/data/cni\"\n  conf_dir = \"/var/lib/rancher/k3s/agent/etc/cni/net.d\"\n"},
			standard(func(r *Runtime) {
				r.Name, r.Config, r.Socket, r.Kubelet = "k3s", "/"+nodetest.K3sConfig, nodetest.K3sSocket, true
				r.ConfDir, r.BinDirs = "/var/lib/rancher/k3s/agent/etc/cni/net.d", []string{"/var/lib/rancher/k3s/data/cni"}
			})},
		{"k3s before October 2024", map[string]string{nodetest.K3sConfig: "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".cni]\n  bin_dir = \"/var/lib/rancher/k3s/data/8e61/bin\"\n"},
			standard(func(r *Runtime) {
				r.Name, r.Config, r.Socket, r.BinDirs = "k3s", "/"+nodetest.K3sConfig, nodetest.K3sSocket, []string{"/var/lib/rancher/k3s/data/8e61/bin"}
				r.Kubelet = true
				r.Problems = []string{"the next upgrade of this k3s moves the plugin directory"}
			})},
		{"RKE2", map[string]string{"var/lib/rancher/rke2/agent/etc/containerd/config.toml": "version = 3\n"},
			standard(func(r *Runtime) {
				r.Name, r.Config, r.Socket, r.Major = "rke2", "/var/lib/rancher/rke2/agent/etc/containerd/config.toml", nodetest.K3sSocket, 2
				r.Kubelet = true
			})},
		{"MicroK8s", map[string]string{"var/snap/microk8s/current": "-> 7731",
			"var/snap/microk8s/7731/args/containerd.toml": "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".cni]\n" +
				"bin_dir = \"/var/snap/microk8s/7731/opt/cni/bin\"\nconf_dir = \"/var/snap/microk8s/7731/args/cni-network\"\n"},
			standard(func(r *Runtime) {
				r.Name, r.Config, r.Socket = "microk8s", "/var/snap/microk8s/current/args/containerd.toml", "/var/snap/microk8s/common/run/containerd.sock"
				r.Kubelet = true
				r.ConfDir, r.BinDirs = "/var/snap/microk8s/current/args/cni-network", []string{"/var/snap/microk8s/current/opt/cni/bin"}
			})},
		{"k0s", map[string]string{nodetest.K0sConfig: "# k0s_managed=true\nversion = 3\nimports = ['/etc/k0s/containerd.d/*.toml']\n" +
			"[plugins.'io.containerd.cri.v1.images'.pinned_images]\nsandbox = 'registry.k8s.io/pause:3.10'\n[plugins.'io.containerd.cri.v1.runtime']\n", "etc/k0s/containerd.d/": ""},
			standard(func(r *Runtime) {
				r.Name, r.Config, r.Socket, r.Kubelet, r.Major = "k0s", "/"+nodetest.K0sConfig, "/run/k0s/containerd.sock", true, 2
			})},
		{"k0s 1.35", map[string]string{nodetest.K0sConfig: "# k0s_managed=true\nversion = 2\nimports = ['/run/k0s/containerd-cri.toml']\n",
			"run/k0s/containerd-cri.toml": "version = 2\n[plugins.'io.containerd.grpc.v1.cri'.cni]\nbin_dir = '/opt/cni/bin'\nconf_dir = '/etc/cni/net.d'\n"},
			standard(func(r *Runtime) {
				r.Name, r.Config, r.Socket, r.Kubelet = "k0s", "/"+nodetest.K0sConfig, "/run/k0s/containerd.sock", true
				r.Problems = []string{"k0s does not respond at /run/k0s/containerd.sock, and /run/k0s/containerd-cri.toml may change its CNI directories; "}
			})},
		{"Talos", map[string]string{nodetest.TalosConfig: "version = 3\nimports = ['/etc/cri/conf.d/cri.toml']\n", nodetest.ContainerdSocket[1:]: "",
			"etc/cri/conf.d/cri.toml": "version = 3\n[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = true\n",
			nodetest.ContainerdConfig: "version = 3\ndisabled_plugins = ['io.containerd.cri.v1.images', 'io.containerd.cri.v1.runtime', 'io.containerd.grpc.v1.cri']\n"},
			standard(func(r *Runtime) {
				r.Name, r.Config, r.Kubelet, r.Major = "talos", "/"+nodetest.TalosConfig, true, 2
				r.Problems = []string{"talos does not respond at /run/containerd/containerd.sock, and /etc/cri/conf.d/cri.toml may change its CNI directories; "}
			})},
		{"Bottlerocket", map[string]string{nodetest.ContainerdConfig: "version = 3\nimports = ['/etc/containerd/config.d/*.toml']\n[grpc]\naddress = '/run/containerd/containerd.sock'\n" +
			"[plugins.'io.containerd.cri.v1.runtime'.cni]\nbin_dirs = [ '/opt/cni/bin' ]\nconf_dir = '/etc/cni/net.d'\n", "var/lib/kubelet/": "",
			"etc/host-containerd/config.toml": "version = 2\ndisabled_plugins = ['io.containerd.grpc.v1.cri']\n"},
			standard(func(r *Runtime) { r.Kubelet, r.Major = true, 2 })},
		{"Flatcar", map[string]string{"usr/share/containerd/config.toml": "version = 2\n", nodetest.ContainerdSocket[1:]: "", "var/lib/kubelet/": ""},
			standard(func(r *Runtime) { r.Config, r.Kubelet = "", true })},
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
		{"OpenShift", map[string]string{"etc/crio/crio.conf.d/00-default": "[crio.network]\nnetwork_dir = \"/etc/kubernetes/cni/net.d/\"\nplugin_dirs = [\n  \"/var/lib/cni/bin\",\n]\n"},
			crio(func(r *Runtime) {
				r.Config = "/etc/crio/crio.conf.d/00-default"
				r.ConfDir, r.BinDirs = "/etc/kubernetes/cni/net.d", []string{"/var/lib/cni/bin"}
			})},
		{"CRI-O, another network by default", map[string]string{
			"etc/crio/crio.conf":              "[crio.network]\ncni_default_network = \"other\"\n",
			"etc/cni/net.d/00-own.conflist":   `{"name": "podnet", "plugins": [{"type": "unwind", "chainFile": "/c"}]}`,
			"etc/cni/net.d/10-first.conflist": `{"name": "podnet", "plugins": [{"type": "bridge"}]}`,
			"etc/cni/net.d/20-other.conflist": `{"name": "other", "plugins": [{"type": "bridge"}]}`,
		}, crio(func(r *Runtime) {
			r.DefaultNetwork = "other"
			r.Problems = []string{`cni_default_network is "other" in /etc/crio/crio.conf, but 10-first.conflist is for network "podnet"`}
		})},
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

// TestCRISockets: install knows each runtime whose socket --cri auto knows, and the other way round.
// cri-dockerd has no directories of its own.
func TestCRISockets(t *testing.T) {
	t.Parallel()
	found, err := Find(t.Context(), nodetest.Root(t, map[string]string{nodetest.ContainerdConfig: "", "etc/crio/crio.conf": "", nodetest.K3sConfig: "", nodetest.K0sConfig: "",
		nodetest.TalosConfig: "", "var/lib/rancher/rke2/agent/etc/containerd/config.toml": "", "var/snap/microk8s/current/args/containerd.toml": ""}))
	if err != nil {
		t.Fatal(err)
	}
	install := []string{"/run/cri-dockerd.sock"}
	for _, r := range found {
		install = append(install, strings.Replace(r.Socket, "/var/run/", "/run/", 1)) // CRI-O's default
	}
	slices.Sort(install)
	if diff := cmp.Diff(slices.Compact(install), slices.Sorted(slices.Values(CRISockets))); diff != "" {
		t.Errorf("-of the runtimes that install knows +of --cri auto:\n%s", diff)
	}
}

// finds sees which runtimes are on a machine with these files. The problems and notes that are
// wanted are beginnings.
func finds(t *testing.T, files map[string]string, want []Runtime) {
	t.Helper()
	got, err := Find(t.Context(), nodetest.Root(t, files))
	for i := range min(len(got), len(want)) {
		shorten(got[i].Problems, want[i].Problems)
		shorten(got[i].Notes, want[i].Notes)
	}
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" || err != nil {
		t.Errorf("%v, -want +got:\n%s", err, diff)
	}
}

// shorten cuts texts to those with which they begin.
func shorten(texts, beginnings []string) {
	for i := range min(len(texts), len(beginnings)) {
		if strings.HasPrefix(texts[i], beginnings[i]) {
			texts[i] = beginnings[i]
		}
	}
}

// TestFindAsks: directories that a runtime tells are right whatever its files say; where it tells
// none, those of the files count. What K3s and MicroK8s change with a release is judged all the same.
func TestFindAsks(t *testing.T) {
	t.Parallel()
	const config = "version = 3\nimports = ['x.toml']\n[plugins.'io.containerd.cri.v1.runtime'.cni]\nbin_dir = '/file'\n[grpc]\naddress = '/s'\n"
	const cniconfig = `{"PluginDirs": ["/told/", "/x"], "PluginConfDir": "/c/", "PluginMaxConfNum": 1, "Prefix": "eth", "Networks": []}`
	told := func(change func(*Runtime)) []Runtime {
		r := Runtime{Name: "containerd", Config: "/s", ConfDir: "/c", BinDirs: []string{"/told", "/x"}, Socket: "/s", MaxConfs: 1, Major: 2}
		change(&r)
		return []Runtime{r}
	}
	fromFile := told(func(r *Runtime) {
		r.Config, r.ConfDir, r.BinDirs = "/"+nodetest.ContainerdConfig, "/etc/cni/net.d", []string{"/file"}
		r.Problems = []string{"containerd does not respond at /s, and containerd up to 2.3 uses bin_dir", "containerd does not respond at /s, and /etc/containerd/x.toml may change"}
	})
	for _, c := range []struct {
		name, file, config string
		info               map[string]string // nil for no answer
		want               []Runtime
	}{
		{"containerd", nodetest.ContainerdConfig, config, map[string]string{"cniconfig": cniconfig, "config": `{"containerd": {"runtimes": {"runc": {}, "own": {"cniConfDir": "/c"}}}}`},
			told(func(*Runtime) {})},
		{"containerd, a broken file", nodetest.ContainerdConfig, "[grpc]\naddress = '/s'\n[broken", map[string]string{"cniconfig": cniconfig},
			told(func(r *Runtime) { r.Major = 0 })},
		{"handlers with conflists of their own", nodetest.ContainerdConfig, config, map[string]string{"cniconfig": cniconfig, "config": `{"containerd": {"runtimes": {"kata": {"cniConfDir": "/kata"}}}}`},
			told(func(r *Runtime) {
				r.Notes = []string{`pods of the runtime class handler "kata" have their conflists in /kata`}
			})},
		{"every conflist", nodetest.ContainerdConfig, config, map[string]string{"cniconfig": strings.Replace(cniconfig, "1,", "0,", 1)},
			told(func(r *Runtime) {
				r.MaxConfs, r.Problems = 0, []string{"max_conf_num is 0 according to /s: "}
			})},
		{"no answer", nodetest.ContainerdConfig, config, nil, fromFile},
		{"an answer without directories", nodetest.ContainerdConfig, config, map[string]string{"config": "{}"}, fromFile},
		{"an answer without directories of plugins", nodetest.ContainerdConfig, config, map[string]string{"cniconfig": `{"PluginConfDir": "/c"}`}, fromFile},
		{"CRI-O", "etc/crio/crio.conf", "[crio.api]\nlisten = \"unix:///s\"\n", map[string]string{"config": `{"crio": {}, "sandboxImage": "pause"}`},
			told(func(r *Runtime) {
				r.Name, r.Config, r.ConfDir, r.BinDirs, r.Major = "cri-o", "", DefaultConfDir, []string{DefaultBinDir}, 0
			})},
		{"k3s before October 2024", nodetest.K3sConfig, config, map[string]string{"cniconfig": strings.Replace(cniconfig, "/told", "/var/lib/rancher/k3s/data/8e61/bin", 1)},
			told(func(r *Runtime) {
				r.Name, r.BinDirs, r.Kubelet = "k3s", []string{"/var/lib/rancher/k3s/data/8e61/bin", "/x"}, true
				r.Problems = []string{"the next upgrade of this k3s moves the plugin directory"}
			})},
		{"MicroK8s", "var/snap/microk8s/7731/args/containerd.toml", config, map[string]string{"cniconfig": `{"PluginDirs": ["/var/snap/microk8s/7731/opt/cni/bin"], "PluginConfDir": "/var/snap/microk8s/7731/args/cni-network", "PluginMaxConfNum": 1}`},
			told(func(r *Runtime) {
				r.Name, r.Kubelet = "microk8s", true
				r.ConfDir, r.BinDirs = "/var/snap/microk8s/current/args/cni-network", []string{"/var/snap/microk8s/current/opt/cni/bin"}
			})},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			files := map[string]string{c.file: c.config}
			if c.file == nodetest.ContainerdConfig {
				files["etc/containerd/x.toml"] = "imports = ['y.toml']\n"
			}
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

// TestResolve: a command that only looks asks the runtimes only if unwind is in none of the
// directories of their files.
func TestResolve(t *testing.T) {
	t.Parallel()
	own := func(stateDir string) string {
		return fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "n", "type": "unwind", "chainFile": "/c", "stateDir": %q}`, stateDir)
	}
	const config = "version = 2\n[plugins.'io.containerd.grpc.v1.cri'.cni]\nconf_dir = '/file'\n"
	for _, c := range []struct {
		name  string
		files map[string]string
		given Directories
		want  Directories
		asked int64
	}{
		{"in the file's directory", map[string]string{"file/0.json": own("/s"), "told/0.json": own("/t")}, Directories{}, Directories{"/file", "/s"}, 0},
		{"in the default directory", map[string]string{"etc/cni/net.d/0.json": own("/s"), "told/0.json": own("/t")}, Directories{}, Directories{DefaultConfDir, "/s"}, 0},
		{"where the runtime tells", map[string]string{"told/0.json": own("/t")}, Directories{}, Directories{"/told", "/t"}, 1},
		{"nowhere", map[string]string{"told/0.json": `{"cniVersion": "1.0.0", "name": "n", "type": "bridge"}`}, Directories{}, Directories{"/told", netconf.DefaultStateDir}, 1},
		{"given", map[string]string{"file/0.json": own("/s")}, Directories{ConfDir: "/told"}, Directories{"/told", netconf.DefaultStateDir}, 0},
		{"a state directory given", map[string]string{"file/0.json": own("/s")}, Directories{StateDir: "/x"}, Directories{"/file", "/x"}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			fake := &nodetest.FakeCRI{Info: map[string]string{"cniconfig": `{"PluginDirs": ["/b"], "PluginConfDir": "/told"}`}}
			c.files[nodetest.ContainerdConfig] = config
			c.files[nodetest.ContainerdSocket[1:]] = "-> " + fake.Serve(t)
			if err := c.given.resolve(t.Context(), nodetest.Root(t, c.files)); err != nil || c.given != c.want || fake.Asked.Load() != c.asked {
				t.Errorf("%+v, %v, asked %d times; want %+v, %d", c.given, err, fake.Asked.Load(), c.want, c.asked)
			}
		})
	}
}

// TestFindRuntimesBroken has a configuration that cannot be read be an error that names the file
// and shows none of it, beside what the other runtimes say.
func TestFindRuntimesBroken(t *testing.T) {
	t.Parallel()
	const secret = "hunter2"
	for _, c := range []struct{ name, file, content, want string }{
		{"no TOML", nodetest.ContainerdConfig, "version = 2\npassword = " + secret, "/etc/containerd/config.toml: not valid TOML in line 2"},
		{"an import", "etc/containerd/conf.d/x.toml", "= " + secret, "/etc/containerd/conf.d/x.toml: not valid TOML in line 1"},
		{"CRI-O", "etc/crio/crio.conf.d/x", "[" + secret, "/etc/crio/crio.conf.d/x: not valid TOML"},
		{"a directory", nodetest.ContainerdConfig + "/", "", "is a directory"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			files := map[string]string{c.file: c.content, nodetest.K3sConfig: "version = 2\n"}
			if c.file != nodetest.ContainerdConfig && !strings.HasSuffix(c.file, "/") {
				files[nodetest.ContainerdConfig] = "version = 2\nimports = ['conf.d/*.toml']\n"
			}
			found, err := Find(t.Context(), nodetest.Root(t, files))
			if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), secret) {
				t.Errorf("%v, want %q", err, c.want)
			}
			if !slices.ContainsFunc(found, func(r Runtime) bool { return r.Name == "k3s" }) {
				t.Errorf("found: %v", found)
			}
		})
	}
}

// TestAsksTogether: runtimes that hang cost the time of one. Each question here waits for the other.
func TestAsksTogether(t *testing.T) {
	t.Parallel()
	var both sync.WaitGroup
	both.Add(2)
	found, err := find(nodetest.Root(t, map[string]string{nodetest.ContainerdConfig: "version = 2\n", nodetest.K3sConfig: "version = 2\n"}),
		func(*Runtime) bool {
			both.Done()
			both.Wait()
			return false
		})
	if len(found) != 2 || err != nil {
		t.Errorf("%v, %v", found, err)
	}
}
