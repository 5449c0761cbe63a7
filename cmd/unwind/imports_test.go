package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/mod/modfile"
)

const module = "cni-unwind/"

// goPackage contains the fields of go list's output that the tests read.
type goPackage struct {
	ImportPath, Doc           string
	Imports                   []string
	Deps                      []string // all dependencies, direct or not
	TestImports, XTestImports []string
}

// packages returns all packages of this module, by their paths in the module.
func packages(t *testing.T) map[string]goPackage {
	t.Helper()
	all, err := listed()
	check(t, err)
	return all
}

var listed = sync.OnceValues(func() (map[string]goPackage, error) {
	cmd := exec.Command("go", "list", "-json=ImportPath,Doc,Imports,Deps,TestImports,XTestImports", "./...")
	cmd.Dir = "../.."
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	all := map[string]goPackage{}
	for d := json.NewDecoder(bytes.NewReader(out)); err == nil && d.More(); {
		var p goPackage
		err = d.Decode(&p)
		all[strings.TrimPrefix(p.ImportPath, module)] = p
	}
	return all, err
})

// TestImports: packages import each other in one direction only, cmd → plugin → journal and ipam.
// The plugin binary, which starts for every pod, stays free of large dependencies.
func TestImports(t *testing.T) {
	all := packages(t)
	for _, tt := range []struct {
		pkg    string
		denied []string // pkg must import neither these packages nor packages below them
	}{
		{"journal", []string{module + "ipam", module + "plugin", module + "cmd", "github.com/containernetworking"}},
		{"ipam", []string{module + "journal", module + "plugin", module + "cmd"}},
		{"plugin", []string{module + "cmd"}},
		{"plugin/netconf", []string{"github.com/vishvananda", module + "plugin/delegate"}},
		{"plugin/known", []string{strings.TrimSuffix(module, "/"), "github.com", "golang.org"}},
		{"plugin/record", []string{module + "ipam", module + "plugin/netconf", module + "plugin/delegate"}},
		{"plugin/decide", []string{module + "ipam", module + "plugin/facts", module + "plugin/netconf", module + "plugin/undo",
			module + "plugin/sweep", "github.com/containernetworking/plugins"}},
		{"plugin/facts", []string{module + "plugin/undo", module + "plugin/sweep", module + "plugin/delegate"}},
		{"plugin/undo", []string{module + "plugin/sweep"}},
		{"plugin/delegate", []string{module + "plugin/decide", module + "plugin/undo"}},
		{"cmd/unwind", []string{"crypto", "testing", "github.com/spf13", "google.golang.org", "k8s.io", "go.opentelemetry.io", "go.yaml.in",
			"github.com/containernetworking/cni/libcni", "github.com/containernetworking/cni/pkg/invoke"}},
		{"cmd/internal/term", []string{module + "cmd", module + "plugin"}}, // both CLIs import it
		// kubectl-unwind runs on any operating system, and uses kubectl as its Kubernetes client.
		{"cmd/kubectl-unwind", []string{module + "journal", module + "ipam", module + "plugin", module + "cmd/unwindctl", "k8s.io"}},
	} {
		t.Run(tt.pkg, func(t *testing.T) {
			p, ok := all[tt.pkg]
			if !ok {
				t.Fatal("no such package")
			}
			deps := p.Deps
			if tt.pkg != "cmd/unwind" {
				for _, dep := range slices.Concat(p.TestImports, p.XTestImports) {
					if !forTests(strings.TrimPrefix(dep, module)) {
						deps = append(deps, dep)
					}
				}
			}
			for _, denied := range tt.denied {
				for _, dep := range deps {
					if dep == denied || strings.HasPrefix(dep, denied+"/") {
						t.Errorf("%s depends on %s", tt.pkg, dep)
					}
				}
			}
		})
	}
}

// forTests reports whether a package of this module contains test helpers.
func forTests(pkg string) bool {
	return slices.ContainsFunc(strings.Split(pkg, "/"), func(dir string) bool { return strings.HasSuffix(dir, "test") || dir == "e2e" })
}

// TestHelpers: each package of test helpers has a package comment, and only tests import it.
func TestHelpers(t *testing.T) {
	helpers := 0
	for pkg, p := range packages(t) {
		if forTests(pkg) {
			if helpers++; p.Doc == "" {
				t.Errorf("%s has no package comment", pkg)
			}
			continue
		}
		for _, imported := range p.Imports {
			if forTests(strings.TrimPrefix(imported, module)) {
				t.Errorf("%s imports %s, which is for tests", pkg, imported)
			}
		}
	}
	if helpers < 5 {
		t.Errorf("found only %d packages of test helpers", helpers)
	}
}

// TestUnwindctl: the packages of unwindctl import each other in one direction only. Each may import
// the packages in its row of the list, and cmd/internal/term, which kubectl-unwind also imports.
func TestUnwindctl(t *testing.T) {
	const internal = "cmd/unwindctl/internal/"
	allowed := map[string][]string{
		"durable": {},
		"node":    {},
		"pools":   {},
		"inspect": {"durable", "node", "pools"},
		"install": {"durable", "inspect", "node", "pools"},
		"doctor":  {"durable", "inspect", "install", "node", "pools"},
		"trial":   {"doctor", "durable", "inspect", "install", "node"},
		"bundle":  {},
		"metrics": {"durable", "inspect", "install"},
		"agent":   {"inspect", "install", "metrics", "node", "pools"},
	}
	for pkg, p := range packages(t) {
		name, is := strings.CutPrefix(pkg, internal)
		if !is {
			continue
		}
		if allowed[name] == nil {
			t.Errorf("%s is not in the list above", pkg)
		}
		for _, imported := range p.Imports {
			if strings.HasPrefix(imported, module+"cmd/") &&
				imported != module+"cmd/internal/term" &&
				!slices.Contains(allowed[name], strings.TrimPrefix(imported, module+internal)) {
				t.Errorf("%s imports %s", pkg, imported)
			}
		}
	}
}

// TestLayout: packages are only in directories that match the layout.
func TestLayout(t *testing.T) {
	layout := []string{"cmd/*", "cmd/internal/*", "cmd/unwindctl/internal/*", "plugin", "plugin/*", "plugin/plugintest/*", "plugin/e2e/pause",
		"journal", "journal/journaltest", "ipam", "ipam/ipamtest", "scripts/bench", "scripts/bench/noop", "scripts/mutants", "scripts/release", "scripts/words"}
	for pkg := range packages(t) {
		if !slices.ContainsFunc(layout, func(pattern string) bool { ok, _ := path.Match(pattern, pkg); return ok }) {
			t.Errorf("package %s is not one of %v", pkg, layout)
		}
	}
}

// TestRequirements: a module that go.mod requires directly is in the block "For tests alone" if,
// and only if, no program links it.
func TestRequirements(t *testing.T) {
	data, err := os.ReadFile("../../go.mod")
	check(t, err)
	file, err := modfile.Parse("go.mod", data, nil)
	check(t, err)
	all := packages(t)
	linked := slices.Concat(all["cmd/unwind"].Deps, all["cmd/unwindctl"].Deps, all["cmd/kubectl-unwind"].Deps)
	_, tests, _ := bytes.Cut(data, []byte("\n// For tests alone: "))
	tests, _, found := bytes.Cut(tests, []byte("\n)\n"))
	if !found {
		t.Fatal("go.mod has no block for tests alone")
	}
	for _, r := range file.Require {
		if r.Indirect {
			continue
		}
		isLinked := slices.ContainsFunc(linked, func(dep string) bool { return strings.HasPrefix(dep+"/", r.Mod.Path+"/") })
		if forTests := bytes.Contains(tests, []byte("\t"+r.Mod.Path+" ")); isLinked == forTests {
			t.Errorf("%s: linked into a program: %t; in the block for tests alone: %t", r.Mod.Path, isLinked, forTests)
		}
	}
}
