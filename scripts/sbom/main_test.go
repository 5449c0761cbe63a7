package main

import (
	"bytes"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/google/go-cmp/cmp"
)

// must runs a go command in the repository, and returns its output.
func must(t *testing.T, args ...string) string {
	t.Helper()
	out, err := goCommand(args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// sbom returns the output of the program, as text and decoded.
func sbom(t *testing.T, args ...string) (string, *cdx.BOM) {
	t.Helper()
	var out bytes.Buffer
	if err := write(args, &out); err != nil {
		t.Fatal(err)
	}
	var bom cdx.BOM
	if err := cdx.NewBOMDecoder(bytes.NewReader(out.Bytes()), cdx.BOMFileFormatJSON).Decode(&bom); err != nil {
		t.Fatal(err)
	}
	return out.String(), &bom
}

// TestModules compares the bill of each program with the modules that go list reports for it.
func TestModules(t *testing.T) {
	t.Setenv("CGO_ENABLED", "0")
	dir, texts := t.TempDir(), t.TempDir()
	must(t, "build", "-buildvcs=false", "-trimpath", "-o", dir+"/", "./cmd/unwind", "./cmd/unwindctl")
	args := []string{"v1.2.3", texts, filepath.Join(dir, "unwind"), filepath.Join(dir, "unwindctl")}
	text, bom := sbom(t, args...)

	var all []string
	for i, name := range []string{"unwind", "unwindctl"} {
		want := strings.Fields(must(t, "list", "-deps", "-f",
			"{{with .Module}}{{if not .Main}}pkg:golang/{{.Path}}@{{.Version}}{{end}}{{end}}", "./cmd/"+name))
		want = append(want, "pkg:golang/stdlib@"+strings.TrimPrefix(runtime.Version(), "go"))
		slices.Sort(want)
		want = slices.Compact(want)
		all = append(all, want...)
		got := (*bom.Dependencies)[i]
		if diff := cmp.Diff(want, *got.Dependencies); got.Ref != "unwind/"+name || diff != "" {
			t.Errorf("%s: %s", got.Ref, diff)
		}
		if (*(*bom.Metadata.Component.Components)[i].Properties)[0].Value != runtime.Version() {
			t.Errorf("%s: the bill lacks the version of Go", name)
		}
	}
	var libraries []string
	for _, c := range *bom.Components {
		libraries = append(libraries, c.PackageURL)
		files, _ := filepath.Glob(filepath.Join(texts, c.Name+"@"+c.Version, "[CL]*"))
		if len(files) == 0 || len(*c.Licenses) == 0 || slices.Contains(*c.Licenses, cdx.LicenseChoice{}) {
			t.Errorf("%s: licenses %v in %q", c.Name, c.Licenses, files)
		}
		if c.Name == "go.etcd.io/bbolt" && (*c.Licenses)[0].License.ID != "MIT" {
			t.Errorf("%s: %v", c.Name, (*c.Licenses)[0].License)
		}
	}
	slices.Sort(all)
	if diff := cmp.Diff(slices.Compact(all), libraries); diff != "" {
		t.Error(diff)
	}
	if again, _ := sbom(t, args...); again != text {
		t.Error("the second run prints another bill")
	}
	if bom.SpecVersion != cdx.SpecVersion1_6 || bom.SerialNumber != "" || bom.Metadata.Timestamp != "" || strings.Contains(text, dir) {
		t.Errorf("%s", text)
	}
}

func TestUsage(t *testing.T) {
	for _, args := range [][]string{nil, {"v1"}, {"v1", t.TempDir()}, {"v1", t.TempDir(), "main.go"}, {"v1", t.TempDir(), "missing"}} {
		var out bytes.Buffer
		if err := write(args, &out); err == nil || out.Len() > 0 {
			t.Errorf("%q: %v, %q", args, err, out.String())
		}
	}
}
