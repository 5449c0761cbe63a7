package main

import (
	"context"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// TestPlaces has the folders come from the flags and, where these say nothing, from the runtime; what is against any install
// is so whatever the flags say.
func TestPlaces(t *testing.T) {
	t.Parallel()
	every := "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.cni]\nmax_conf_num = 0\nbin_dir = '/home/kubernetes/bin'\n"
	both := map[string]string{containerdConfig: every, k3sConfig: "version = 2\n[plugins.'io.containerd.grpc.v1.cri'.cni]\nconf_dir = '/k3s'\n"}
	for _, c := range []struct {
		name     string
		files    map[string]string
		flags    placeFlags
		confDir  string
		binDir   string
		problems int
		whence   string // or the error
	}{
		{"no runtime", nil, placeFlags{}, "/etc/cni/net.d", "/opt/cni/bin", 0, "No runtime's configuration was found: "},
		{"one", map[string]string{containerdConfig: every}, placeFlags{}, "/etc/cni/net.d", "/home/kubernetes/bin", 1,
			"The runtime is containerd, as /etc/containerd/config.toml has it."},
		{"its plugins elsewhere", map[string]string{containerdConfig: every}, placeFlags{binDir: "/b"}, "/etc/cni/net.d", "/b", 1, "The runtime is containerd, "},
		{"its conflists elsewhere", map[string]string{containerdConfig: every}, placeFlags{confDir: "/c"}, "/c", "/home/kubernetes/bin", 1, "The runtime is containerd, "},
		{"its folders, given", map[string]string{containerdConfig: every}, placeFlags{confDir: "/etc/cni/net.d", binDir: "/b"}, "/etc/cni/net.d", "/b", 1, "The folders are as given."},
		{"other folders, given", map[string]string{containerdConfig: every}, placeFlags{confDir: "/c", binDir: "/b"}, "/c", "/b", 0, "The folders are as given."},
		{"folders given, a broken configuration", map[string]string{containerdConfig: "["}, placeFlags{confDir: "/c", binDir: "/b"}, "/c", "/b", 0, "The folders are as given."},
		{"a broken configuration", map[string]string{containerdConfig: "["}, placeFlags{}, "", "", 0, "/etc/containerd/config.toml: not valid TOML"},
		{"two", both, placeFlags{}, "", "", 0, "several runtimes are on this machine"},
		{"one of two", both, placeFlags{runtime: "k3s"}, "/k3s", "/opt/cni/bin", 0, "The runtime is k3s, "},
		{"a default", map[string]string{"run/containerd/containerd.sock": ""}, placeFlags{}, "/etc/cni/net.d", "/opt/cni/bin", 0,
			"The runtime is containerd, without a configuration: its defaults are taken."},
		{"merged and replaced differ, given", map[string]string{
			containerdConfig:        "version = 2\nimports = ['x.toml']\n[plugins.'io.containerd.grpc.v1.cri'.cni]\nbin_dir = '/main'\n",
			"etc/containerd/x.toml": "version = 2\n[plugins.'io.containerd.grpc.v1.cri'.registry]\nconfig_path = '/r'\n",
		}, placeFlags{confDir: "/etc/cni/net.d", binDir: "/b"}, "/etc/cni/net.d", "/b", 0, "The folders are as given."},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			c.flags.file = ownFile
			r, err := c.flags.find(rootWith(t, c.files))
			if c.confDir == "" {
				if err == nil || !strings.Contains(err.Error(), c.whence) {
					t.Errorf("%+v, %v, want %q", r, err, c.whence)
				}
				return
			}
			if err != nil || r.ConfDir != c.confDir || r.BinDirs[0] != c.binDir || len(r.Problems) != c.problems ||
				!strings.HasPrefix(c.flags.whence(r), c.whence) {
				t.Errorf("%+v, %v, %s", r, err, c.flags.whence(r))
			}
		})
	}
}

// TestAccepts has an install be refused for what the runtime's configuration says, but not for the first conflist's network
// if another file is named.
func TestAccepts(t *testing.T) {
	t.Parallel()
	root := rootWith(t, map[string]string{
		"etc/crio/crio.conf":          "[crio.network]\ncni_default_network = \"other\"\n",
		"etc/cni/net.d/10-a.conflist": `{"name": "podnet", "plugins": [{"type": "bridge"}]}`,
		"etc/cni/net.d/20-b.conflist": `{"name": "other", "plugins": [{"type": "bridge"}]}`,
	})
	r, err := (placeFlags{file: ownFile}).find(root)
	if err != nil || len(r.Problems) != 1 {
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
			w, err := installation{ConfDir: dir, Source: c.source}.wrap()
			if err != nil {
				t.Fatal(err)
			}
			r := r
			r.Problems = append(append([]string{}, r.Problems...), c.more...)
			if err = r.accepts(w); (err == nil) != (c.want == "") || err != nil && !strings.HasPrefix(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
}

// versionCRI is a runtime that says its version.
type versionCRI struct {
	cri.UnimplementedRuntimeServiceServer
	version string
}

func (v *versionCRI) Version(context.Context, *cri.VersionRequest) (*cri.VersionResponse, error) {
	return &cri.VersionResponse{RuntimeName: "containerd", RuntimeVersion: v.version}, nil
}

func serveVersion(t *testing.T, version string) string {
	socket, l := listen(t)
	server := grpc.NewServer()
	cri.RegisterRuntimeServiceServer(server, &versionCRI{version: version})
	go func(l net.Listener) { _ = server.Serve(l) }(l)
	t.Cleanup(server.Stop)
	return socket
}

// TestCalls has a person be told of the timer wherever the runtime does not have what is dead swept by itself.
func TestCalls(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		r     runtimePaths
		want  string
		timer bool
	}{
		{"containerd 2", runtimePaths{Name: "containerd", Socket: serveVersion(t, "v2.1.4")}, "containerd has what is dead swept", false},
		{"containerd 1", runtimePaths{Name: "containerd", Socket: serveVersion(t, "1.7.27")}, "containerd 1 calls neither", true},
		{"k3s", runtimePaths{Name: "k3s", Socket: serveVersion(t, "v1.7.23-k3s2"), Major: 2}, "containerd 1 calls neither", true},
		{"no answer", runtimePaths{Name: "containerd", Socket: "/none"}, "containerd 2 and later", true},
		{"no answer, version 3 of the file", runtimePaths{Name: "containerd", Socket: "/none", Major: 2}, "containerd has what is dead swept", false},
		{"no version", runtimePaths{Name: "containerd", Socket: serveVersion(t, "unknown")}, "containerd 2 and later", true},
		{"CRI-O", runtimePaths{Name: "cri-o", Socket: "/none"}, "CRI-O has what is dead swept when it starts", true},
		{"Nomad", runtimePaths{Name: "nomad"}, "If the runtime is not", true},
		{"none", runtimePaths{}, "If the runtime is not", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if got := c.r.calls(t.Context()); !strings.HasPrefix(got, c.want) || strings.Contains(got, "unwind-sweep.timer") != c.timer {
				t.Error(got)
			}
		})
	}
}

// TestNameBefore has every name that is advised sort first, and not be what multus calls.
func TestNameBefore(t *testing.T) {
	t.Parallel()
	for _, other := range []string{"00-multus.conf", "00-multus.conflist", "00-a.conflist", "00--z.conf", "0.conf", "01-x.conf", "..conflist", "!.conf"} {
		advice := nameBefore(other)
		name, ok := strings.CutPrefix(advice, "--file ")
		name, _, _ = strings.Cut(name, " ")
		if ok && (name >= other || filepath.Ext(name) != ".conflist") || ok == (other == "!.conf") {
			t.Errorf("%s: %s", other, advice)
		}
		if strings.HasPrefix(other, "00-multus") && !strings.HasPrefix(name, "00-multus") {
			t.Errorf("%s: %s would be taken by multus for the cluster's network", other, advice)
		}
	}
}
