package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
	"testing"
)

const module = "cni-unwind/"

// goPackage is what go list says of one.
type goPackage struct {
	ImportPath                string
	Deps                      []string // of all that it needs
	TestImports, XTestImports []string
}

// packages returns those of this module, as they are built.
func packages(t *testing.T) map[string]goPackage {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Deps,TestImports,XTestImports", "./...")
	cmd.Dir = "../.."
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]goPackage{}
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p goPackage
		err := d.Decode(&p)
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		all[strings.TrimPrefix(p.ImportPath, module)] = p
	}
}

// TestImports keeps data flowing one way: cmd → plugin → journal and ipam. And what starts once per pod stays small.
func TestImports(t *testing.T) {
	all := packages(t)
	for _, tt := range []struct {
		pkg    string
		denied []string // packages, and all below them
	}{
		{"journal", []string{module + "ipam", module + "plugin", module + "cmd", "github.com/containernetworking"}},
		{"ipam", []string{module + "journal", module + "plugin", module + "cmd"}},
		{"plugin", []string{module + "cmd"}},
		{"cmd/unwind", []string{"testing", "github.com/spf13", "google.golang.org", "k8s.io", "go.opentelemetry.io",
			"github.com/containernetworking/cni/libcni", "github.com/containernetworking/cni/pkg/invoke"}},
	} {
		t.Run(tt.pkg, func(t *testing.T) {
			p, ok := all[tt.pkg]
			if !ok {
				t.Fatal("no such package")
			}
			deps := p.Deps
			if tt.pkg != "cmd/unwind" {
				deps = slices.Concat(deps, p.TestImports, p.XTestImports)
			}
			for _, denied := range tt.denied {
				for _, dep := range deps {
					if dep == denied || strings.HasPrefix(dep, denied+"/") {
						t.Errorf("it depends on %s", dep)
					}
				}
			}
		})
	}
}

// TestLayout has no package where none belongs.
func TestLayout(t *testing.T) {
	layout := []string{"cmd/*", "plugin", "journal", "ipam", "scripts/bench", "scripts/bench/noop", "scripts/sbom"}
	for pkg := range packages(t) {
		if !slices.ContainsFunc(layout, func(pattern string) bool { ok, _ := path.Match(pattern, pkg); return ok }) {
			t.Errorf("package %s is not one of %v", pkg, layout)
		}
	}
}
