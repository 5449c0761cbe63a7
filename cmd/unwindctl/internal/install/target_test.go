package install

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/nodetest"
)

// TestMain makes the tests independent of whether they run in a pod.
func TestMain(m *testing.M) {
	_ = os.Unsetenv("KUBERNETES_SERVICE_HOST")
	os.Exit(m.Run())
}

// TestPlaces: a directory that no flag sets comes from the runtime. A plugin directory from a flag
// comes before the runtime's own directories. If flags set both directories but no runtime, and
// no runtime uses that conflist directory, the flag's plugin directory is the only one. A directory
// from a flag is a problem if a kubelet's runtime reports others.
func TestPlaces(t *testing.T) {
	t.Parallel()
	// told returns a runtime's answer, with its plugin directories, conflist directory and
	// max_conf_num.
	told := func(bin, conf string, files int) string {
		return fmt.Sprintf(`{"PluginDirs": [%s], "PluginConfDir": %q, "PluginMaxConfNum": %d}`, bin, conf, files)
	}
	gke := told(`"/home/kubernetes/bin"`, "/etc/cni/net.d", 0)
	every := map[string]string{nodetest.ContainerdSocket: gke}
	both := map[string]string{nodetest.ContainerdSocket: gke, nodetest.K3sSocket: told(`"/opt/cni/bin"`, "/k3s", 1)}
	twoDirs := map[string]string{nodetest.ContainerdSocket: told(`"/a", "/b"`, "/etc/cni/net.d", 1)}
	sameDirs := map[string]string{nodetest.ContainerdSocket: told(`"/a", "/b"`, "/etc/cni/net.d", 0), nodetest.K3sSocket: told(`"/a"`, "/etc/cni/net.d", 0)}
	kubelet := map[string]string{nodetest.K3sSocket: told(`"/a"`, "/etc/cni/net.d", 1)}
	linked := map[string]string{nodetest.K3sSocket: told(`"/usr"`, "/etc", 1)}
	silent := map[string]string{nodetest.ContainerdSocket: ""}
	searched := map[string]string{"no answer": "", "no answer, one directory given": "/b /opt/cni/bin", "a kubelet's, plugins elsewhere": "/a",
		"its plugins elsewhere": "/b /home/kubernetes/bin", "perhaps another runtime's plugins": "/b /a", "no runtime": "/opt/cni/bin"} // by name
	for _, c := range []struct {
		name     string
		told     map[string]string // the runtimes' answers, by socket
		flags    Target
		confDir  string
		binDirs  string // joined by a space
		problems int
		whence   string // the beginning of Origin's text, or a part of the error
	}{
		{"no runtime", nil, Target{}, "/etc/cni/net.d", "/opt/cni/bin", 0, "No runtime configuration found: "},
		{"one", every, Target{}, "/etc/cni/net.d", "/home/kubernetes/bin", 1,
			"The runtime is containerd, according to /run/containerd/containerd.sock."},
		{"its plugins elsewhere", every, Target{BinDir: "/b"}, "/etc/cni/net.d", "/b /home/kubernetes/bin", 1, "The runtime is containerd, "},
		{"its conflists elsewhere", every, Target{ConfDir: "/c"}, "/c", "/home/kubernetes/bin", 1, "The runtime is containerd, "},
		{"its directories, given", every, Target{ConfDir: "/etc/cni/net.d", BinDir: "/b"}, "/etc/cni/net.d", "/b /home/kubernetes/bin", 1, "Using the specified directories."},
		{"one of its two, given", twoDirs, Target{BinDir: "/b"}, "/etc/cni/net.d", "/b /a", 0, "The runtime is containerd, "},
		{"another than its two", twoDirs, Target{BinDir: "/x"}, "/etc/cni/net.d", "/x /a /b", 0, "The runtime is containerd, "},
		{"one of its two and its conflists, given", twoDirs, Target{ConfDir: "/etc/cni/net.d", BinDir: "/b"}, "/etc/cni/net.d", "/b /a", 0, "Using the specified directories."},
		{"one of its two and other conflists, given", twoDirs, Target{ConfDir: "/other", BinDir: "/b"}, "/other", "/b", 0, "Using the specified directories."},
		{"other directories, given", every, Target{ConfDir: "/c", BinDir: "/b"}, "/c", "/b", 0, "Using the specified directories."},
		{"two", both, Target{}, "", "", 0, "this machine has several runtimes with different directories:\n" +
			"  containerd: conflists in /etc/cni/net.d, plugins in /home/kubernetes/bin\n  k3s: conflists in /k3s, plugins in /opt/cni/bin"},
		{"two of the same directories", sameDirs, Target{}, "/etc/cni/net.d", "/a /b", 2, "The runtime is containerd, "},
		{"another than the two", both, Target{Runtime: "b"}, "", "", 0, `runtime "b" is not on this machine; found: containerd, k3s`},
		{"one that is not there", nil, Target{Runtime: "a"}, "", "", 0, `runtime "a" is not on this machine; found: -`},
		{"one of two", both, Target{Runtime: "k3s"}, "/k3s", "/opt/cni/bin", 0, "The runtime is k3s, "},
		{"one of two, both its directories elsewhere", both, Target{Runtime: "k3s", ConfDir: "/c", BinDir: "/b"}, "/c", "/b /opt/cni/bin", 2, "The runtime is k3s, "},
		{"a kubelet's, plugins elsewhere", kubelet, Target{BinDir: "/b"}, "/etc/cni/net.d", "/b /a", 1, "The runtime is k3s, "},
		{"a kubelet's, conflists elsewhere", kubelet, Target{ConfDir: "/c"}, "/c", "/a", 1, "The runtime is k3s, "},
		{"a kubelet's, given", kubelet, Target{ConfDir: "/etc/cni/net.d", BinDir: "/a"}, "/etc/cni/net.d", "/a", 0, "Using the specified directories."},
		{"another runtime's beside a kubelet's", kubelet, Target{ConfDir: "/c", BinDir: "/b"}, "/c", "/b", 0, "Using the specified directories."},
		{"perhaps another runtime's plugins", kubelet, Target{ConfDir: "/etc/cni/net.d", BinDir: "/b"}, "/etc/cni/net.d", "/b /a", 0, "Using"},
		{"a kubelet's, through links", linked, Target{ConfDir: "/proc/self/root/etc", BinDir: "/proc/self/root/usr"}, "/proc/self/root/etc",
			"/proc/self/root/usr /usr", 0, "Using the specified directories."},
		{"no answer", silent, Target{}, "/etc/cni/net.d", "/opt/cni/bin", 1, "The runtime is containerd: using its usual directories."},
		{"no answer, one directory given", silent, Target{BinDir: "/b"}, "/etc/cni/net.d", "/b /opt/cni/bin", 1, "The runtime is containerd"},
		{"no answer, directories given", silent, Target{ConfDir: "/etc/cni/net.d", BinDir: "/b"}, "/etc/cni/net.d", "/b /opt/cni/bin", 0, "Using the specified directories."},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			files := map[string]string{}
			for socket, cniconfig := range c.told {
				files[map[string]string{nodetest.ContainerdSocket: nodetest.ContainerdConfig, nodetest.K3sSocket: nodetest.K3sConfig}[socket]] = ""
				if cniconfig != "" {
					files[socket[1:]] = "-> " + (&nodetest.FakeCRI{Info: map[string]string{"cniconfig": cniconfig}}).Serve(t)
				}
			}
			r, err := c.flags.Find(t.Context(), nodetest.Root(t, files))
			if c.confDir == "" {
				if err == nil || !strings.Contains(err.Error(), c.whence) {
					t.Errorf("%+v, %v, want %q", r, err, c.whence)
				}
				return
			}
			if err != nil || r.ConfDir != c.confDir || strings.Join(r.BinDirs, " ") != c.binDirs || len(r.Problems) != c.problems ||
				!strings.HasPrefix(c.flags.Origin(r), c.whence) {
				t.Errorf("%+v, %v, %s", r, err, c.flags.Origin(r))
			}
			if want, is := searched[c.name]; is && strings.Join(r.Searched, " ") != want {
				t.Errorf("searched: %v, want %q", r.Searched, want)
			}
		})
	}
}

// TestPlacesInPod: in a pod, a plugin directory that the runtime does not use is a problem even if the
// chart sets both directories. On the node itself, they may be those of nerdctl, podman or Nomad.
func TestPlacesInPod(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
	cri := &nodetest.FakeCRI{Info: map[string]string{"cniconfig": `{"PluginDirs": ["/a"], "PluginConfDir": "/etc/cni/net.d", "PluginMaxConfNum": 1}`}}
	root := nodetest.Root(t, map[string]string{nodetest.K3sConfig: "", nodetest.K3sSocket[1:]: "-> " + cri.Serve(t)})
	r, err := Target{ConfDir: "/etc/cni/net.d", BinDir: "/b"}.Find(t.Context(), root)
	if err != nil || len(r.Problems) != 1 || !slices.Equal(r.Searched, []string{"/a"}) {
		t.Errorf("%+v, %v", r, err)
	}
}

// TestInstalledPlaces: without flags, the runtime is the one for which unwind is installed, and the
// plugin directory is the one that contains unwind. A runtime that does not respond is ignored if
// another one responds and has the same directories.
func TestInstalledPlaces(t *testing.T) {
	t.Parallel()
	const own = `{"name": "n", "cniVersion": "1.0.0", "plugins": [{"type": "unwind", "chainFile": "/x.conflist"}]}`
	for _, c := range []struct {
		name    string
		files   map[string]string // in the directory of the test
		want    string            // the runtime, its conflist directory and its plugin directories
		problem string
	}{
		{"nothing is installed", nil, "", "this machine has several runtimes with different directories"},
		{"installed for one", map[string]string{"conf/00-unwind.conflist": own}, "k3s conf a b", ""},
		{"switched off", map[string]string{"conf/00-unwind.json.off": own}, "k3s conf a b", ""},
		{"in the second plugin directory", map[string]string{"conf/00-unwind.conflist": own, "b/unwind": ""}, "k3s conf b a", ""},
		{"in both", map[string]string{"conf/00-unwind.conflist": own, "a/unwind": "", "b/unwind": ""}, "k3s conf a b", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := nodetest.Root(t, c.files)
			told := fmt.Sprintf(`{"PluginDirs": [%q, %q], "PluginConfDir": %q, "PluginMaxConfNum": 1}`, dir+"/a", dir+"/b", dir+"/conf")
			r, err := Target{}.Find(t.Context(), nodetest.Root(t, map[string]string{nodetest.ContainerdConfig: "", nodetest.K3sConfig: "",
				nodetest.K3sSocket[1:]: "-> " + (&nodetest.FakeCRI{Info: map[string]string{"cniconfig": told}}).Serve(t)}))
			if c.problem != "" {
				if err == nil || !strings.Contains(err.Error(), c.problem) {
					t.Errorf("%+v, %v", r, err)
				}
				return
			}
			got := strings.ReplaceAll(strings.Join(append([]string{r.Name, r.ConfDir}, r.BinDirs...), " "), dir+"/", "")
			if got != c.want || err != nil || len(r.Problems) > 0 {
				t.Errorf("%s, %v, %q", got, err, r.Problems)
			}
		})
	}
	for _, responds := range []bool{true, false} {
		files := map[string]string{nodetest.ContainerdConfig: "", "etc/crio/crio.conf": "[crio.api]\nlisten = '/s'\n"}
		want, problems := "containerd", 1
		if responds {
			files["s"] = "-> " + (&nodetest.FakeCRI{}).Serve(t)
			want, problems = "cri-o", 0
		}
		r, err := Target{}.Find(t.Context(), nodetest.Root(t, files))
		if err != nil || r.Name != want || len(r.Problems) != problems {
			t.Errorf("CRI-O responds: %t; containerd does not: %+v, %v", responds, r, err)
		}
	}
}

// TestForm: for a CRI runtime, unwind's file is the configuration of one plugin, with the newest
// CNI version that the runtime supports. Otherwise, the file is a list.
func TestForm(t *testing.T) {
	t.Parallel()
	containerd := map[string]string{nodetest.ContainerdConfig: ""}
	for _, c := range []struct {
		name          string
		files         map[string]string
		flags         Target
		file, version string
	}{
		{"containerd", containerd, Target{}, "00-unwind.json", "1.1.0"},
		{"k3s", map[string]string{nodetest.K3sConfig: ""}, Target{}, "00-unwind.json", ""},
		{"CRI-O", map[string]string{"etc/crio/crio.conf": "[crio.api]\nlisten = '/none'\n"}, Target{}, "00-unwind.json", ""},
		{"none", nil, Target{}, "00-unwind.conflist", ""},
		{"containerd's directories, given", containerd, Target{ConfDir: "/etc/cni/net.d", BinDir: "/b"}, "00-unwind.json", "1.1.0"},
		{"a name", nil, Target{File: "0-x.json"}, "0-x.json", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r, err := c.flags.Find(t.Context(), nodetest.Root(t, c.files))
			nodetest.Check(t, err)
			if c.version != "" {
				r.Socket = (&nodetest.FakeCRI{Release: "v2.1.4"}).Serve(t)
			}
			s, err := (Options{Target: c.flags}).Setup(t.Context(), r)
			if err != nil || s.File != c.file || s.CNIVersion != c.version {
				t.Errorf("%+v, %v", s, err)
			}
		})
	}
}

// TestAccepts: an install is refused if the runtime's configuration forbids it. For example,
// CRI-O's default network must be that of the first conflist, or of the conflist that a flag names.
func TestAccepts(t *testing.T) {
	t.Parallel()
	root := nodetest.Root(t, map[string]string{
		"etc/crio/crio.conf":          "[crio.network]\ncni_default_network = \"other\"\n",
		"etc/cni/net.d/10-a.conflist": `{"name": "podnet", "plugins": [{"type": "bridge"}]}`,
		"etc/cni/net.d/20-b.conflist": `{"name": "other", "plugins": [{"type": "bridge"}]}`,
	})
	r, err := (Target{}).Find(t.Context(), root)
	if err != nil || len(r.Problems) != 0 {
		t.Fatalf("%+v, %v", r, err)
	}
	dir := filepath.Join(root, "etc/cni/net.d")
	for _, c := range []struct {
		name, source string
		more         []string
		want         string
	}{
		{"the first", "", nil, `cni_default_network is "other"`},
		{"that of the network", filepath.Join(dir, "20-b.conflist"), nil, ""},
		{"that of the network, and more", filepath.Join(dir, "20-b.conflist"), []string{"max_conf_num is 0"}, "max_conf_num is 0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w, err := Setup{ConfDir: dir, Source: c.source}.Plan()
			nodetest.Check(t, err)
			r := r
			r.Problems = append(append([]string{}, r.Problems...), c.more...)
			if err = w.RefusedBy(r); (err == nil) != (c.want == "") || err != nil && !strings.HasPrefix(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
}

// TestOwnFile: unwind's file keeps its name and form, whichever runtime a later install finds.
func TestOwnFile(t *testing.T) {
	t.Parallel()
	const list = `{"name": "a", "cniVersion": "1.0.0", "plugins": [{"type": "unwind", "chainFile": "/a"}]}`
	const plain = `{"name": "a", "cniVersion": "1.0.0", "plugins": [{"type": "bridge"}]}`
	for _, c := range []struct {
		name      string
		files     map[string]string
		given     string
		cri, none string
	}{
		{"nothing", nil, "", ownJSON, ownList},
		{"the provider's", map[string]string{"10-a.conflist": plain}, "", ownJSON, ownList},
		{"ours", map[string]string{ownList: list, "10-a.conflist": plain}, "", ownList, ownList},
		{"ours under another name", map[string]string{"00-a.json": list}, "", "00-a.json", "00-a.json"},
		{"another is given", map[string]string{ownList: list}, "00-b.json", "00-b.json", "00-b.json"},
		{"after the provider's", map[string]string{"10-a.conflist": plain, "20-a.conflist": list}, "", ownJSON, ownList},
		{"an extension that we do not write", map[string]string{"00-a.conf": list}, "", ownJSON, ownList},
		{"off", map[string]string{ownList + ".off": list, "10-a.conflist": plain}, "", ownList, ownList},
		{"off, and installed again", map[string]string{ownList + ".off": list, "00-a.json": list}, "", "00-a.json", "00-a.json"},
		{"another program's", map[string]string{"00-a.json.off": plain}, "", ownJSON, ownList},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			for name, text := range c.files {
				if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			for socket, want := range map[string]string{"": c.none, "/run/containerd/containerd.sock": c.cri} {
				if got := (Target{File: c.given}).OwnFile(node.Runtime{ConfDir: dir, Socket: socket}); got != want {
					t.Errorf("runtime %q: %s, want %s", socket, got, want)
				}
			}
		})
	}
}

// TestVersionFollowsRuntime: the configuration of one plugin can offer only one CNI version. This
// is the newest version that the runtime supports. While the runtime's support is unknown, the
// offered version does not change.
func TestVersionFollowsRuntime(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	text := `{"cniVersion": "0.4.0", "name": "podnet", "plugins": [{"type": "a"}]}`
	nodetest.Check(t, os.WriteFile(filepath.Join(dir, "10-provider.conflist"), []byte(text), 0o600))
	for _, c := range []struct{ runtime, want string }{
		{"", "1.0.0"}, {"1.1.0", "1.1.0"}, {"", "1.1.0"}, {"1.0.0", "1.0.0"}, {"1.1.0", "1.1.0"},
	} {
		s := Setup{ConfDir: dir, BinDir: dir, StateDir: filepath.Join(dir, "state"), File: ownJSON, CNIVersion: c.runtime}
		p, err := s.Plan()
		if err == nil {
			err = (&Changes{}).Make(t.Context(), s.WriteConflist(p))
		}
		nodetest.Check(t, err)
		if list, err := netconf.ReadConflist(s.Path()); err != nil || list.CNIVersion != c.want {
			t.Errorf("the runtime speaks %q: %+v, %v; want %s", c.runtime, list, err, c.want)
		}
	}
}
