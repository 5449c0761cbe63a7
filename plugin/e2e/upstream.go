package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"cni-unwind/journal"
)

// Upstream runs the reference plugins' own integration suite in a copy of its sources, and returns
// the state of each spec. If wrapped is true, the suite's configurations run through unwind, and
// the journal must be empty after the suite.
func Upstream(t *testing.T, module string, wrapped bool) map[string]string {
	t.Helper()
	tools, err := filepath.Abs("../../.tools")
	check(t, err)
	bin, err := filepath.Abs("../../bin")
	check(t, err)
	dir := t.TempDir()
	check(t, os.CopyFS(dir, os.DirFS(filepath.Join(module, "src"))))
	check(t, os.Mkdir(filepath.Join(dir, "bin"), 0o700))
	plugins, err := filepath.Glob(filepath.Join(tools, "cni", "*"))
	check(t, err)
	for _, plugin := range append(plugins, filepath.Join(bin, "unwind")) {
		check(t, os.Symlink(plugin, filepath.Join(dir, "bin", filepath.Base(plugin))))
	}
	suite, state := filepath.Join(dir, "integration"), filepath.Join(dir, "state")
	if wrapped {
		wrapAll(t, filepath.Join(bin, "unwindctl"), filepath.Join(suite, "testdata"), state)
	}
	cmd := exec.Command(filepath.Join(module, "integration.test"), "-ginkgo.json-report=report.json")
	if Short() {
		cmd.Args = append(cmd.Args, "-ginkgo.skip=limits traffic") // these specs take a minute
	}
	cmd.Dir = suite
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "PATH="+filepath.Join(tools, "bin")+":"+os.Getenv("PATH"))
	out, testErr := cmd.CombinedOutput()
	data, err := os.ReadFile(filepath.Join(suite, "report.json"))
	if err != nil {
		t.Fatalf("%v, %v: %s", testErr, err, out)
	}
	var reports []struct {
		SpecReports []struct {
			ContainerHierarchyTexts    []string
			LeafNodeType, LeafNodeText string
			State                      string
		}
	}
	check(t, json.Unmarshal(data, &reports))
	states := map[string]string{}
	for _, report := range reports {
		for _, spec := range report.SpecReports {
			if spec.LeafNodeType == "It" && spec.State != "skipped" {
				states[strings.Join(append(spec.ContainerHierarchyTexts, spec.LeafNodeText), " ")] = spec.State
			}
		}
	}
	if testErr != nil {
		t.Errorf("wrapped %t: %s", wrapped, out)
	}
	if wrapped {
		ran := 0
		err := (&journal.Store{Dir: state}).View(context.Background(), func(tx *journal.Tx) error {
			ran++
			return tx.All(func(e *journal.Record, err error) error {
				t.Errorf("the journal still has %s", e.Key)
				return err
			})
		})
		if _, statErr := os.Stat(filepath.Join(state, "journal.db")); err != nil || statErr != nil || ran == 0 {
			t.Errorf("the journal: %v, %v", err, statErr)
		}
	}
	return states
}

// wrapAll wraps the chain of each configuration below dir in an unwind entry. The entries' journal
// is in the directory state.
func wrapAll(t *testing.T, unwindctl, dir, state string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		var list map[string]json.RawMessage
		if err := json.Unmarshal([]byte(run(t, "", unwindctl, "wrap", path)), &list); err != nil {
			return err
		}
		var entries []map[string]any
		if err := json.Unmarshal(list["plugins"], &entries); err != nil {
			return err
		}
		entries[0]["stateDir"] = state
		if list["plugins"], err = json.Marshal(entries); err != nil {
			return err
		}
		data, err := json.Marshal(list)
		if err != nil {
			return err
		}
		if err := os.Remove(path); err != nil {
			return err
		}
		return os.WriteFile(strings.TrimSuffix(path, filepath.Ext(path))+".conflist", data, 0o600)
	})
	check(t, err)
}

// run runs a program in a directory and returns its standard output.
func run(t *testing.T, dir, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, &stderr)
	}
	return string(out)
}
