package nodetest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Root creates files in a new directory and returns its path. A name that ends in / creates a
// directory. The content "-> TARGET" creates a symbolic link.
func Root(t testing.TB, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		path := filepath.Join(root, name)
		err := os.MkdirAll(filepath.Dir(path), 0o755)
		target, isLink := strings.CutPrefix(content, "-> ")
		switch {
		case err != nil:
		case strings.HasSuffix(name, "/"):
			err = os.MkdirAll(path, 0o755)
		case isLink:
			err = os.Symlink(target, path)
		default:
			err = os.WriteFile(path, []byte(content), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// The configuration files and sockets of runtimes.
const (
	ContainerdConfig = "etc/containerd/config.toml"
	K3sConfig        = "var/lib/rancher/k3s/agent/etc/containerd/config.toml"
	K0sConfig        = "etc/k0s/containerd.toml"
	ContainerdSocket = "/run/containerd/containerd.sock"
	K3sSocket        = "/run/k3s/containerd/containerd.sock"
	CrioSocket       = "/var/run/crio/crio.sock"
)
