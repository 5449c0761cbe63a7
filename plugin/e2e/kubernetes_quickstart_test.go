//go:build e2e

package e2e_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"cni-unwind/plugin/e2e"
)

// TestKubernetesQuickstart runs scripts/quickstart.sh on a worker. Afterwards the worker has the
// same CNI files as before.
func TestKubernetesQuickstart(t *testing.T) {
	c := e2e.NewCluster(t)
	w := c.Join("quick", func(*e2e.Node) e2e.Network {
		return e2e.Network{Subnet: "10.22.1.0/24", Plugins: []string{e2e.Portmap}}
	})
	removeFile(t, w.File(e2e.PluginDir, "unwind"))
	before := files(t, w, e2e.ConfDir) + files(t, w, e2e.PluginDir)

	var out strings.Builder
	cmd := exec.Command(e2e.Path(t, "scripts/quickstart.sh"))
	cmd.Env = append(c.KubectlEnv(), "ARCHIVE="+e2e.Path(t, ".tools/e2e/image-now.tar"))
	cmd.Stdout, cmd.Stderr = &out, &out
	err := w.Start(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	t.Logf("scripts/quickstart.sh\n%s", &out)
	check(t, err)
	for _, want := range []string{"5 of 5 addresses are taken", "no IP addresses available", "5 recent", "5 free", "Completed"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the output does not contain %q", want)
		}
	}
	if after := files(t, w, e2e.ConfDir) + files(t, w, e2e.PluginDir); after != before {
		t.Errorf("files before:\n%s\nand after:\n%s", before, after)
	}
	w.RunPods("after", 2)
	mustBeReady(t, w, "after", 2)
	if left := w.Journal(); len(left) > 0 {
		t.Errorf("the journal has %+v", left)
	}
}

// files returns the names of the files in a directory of a worker, one per line.
func files(t *testing.T, w *e2e.Worker, dir string) string {
	t.Helper()
	entries, err := os.ReadDir(w.File(dir))
	check(t, err)
	var names strings.Builder
	for _, e := range entries {
		names.WriteString(filepath.Join(dir, e.Name()) + "\n")
	}
	return names.String()
}
