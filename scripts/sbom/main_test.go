package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/google/go-cmp/cmp"
)

// goCommand runs one in the project's folder.
func goCommand(t *testing.T, args ...string) string {
	t.Helper()
	cmd := exec.Command("go", args...)
	cmd.Dir = "../.."
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// sbom returns what the program prints, and that read again.
func sbom(t *testing.T, args ...string) (string, *cdx.BOM) {
	t.Helper()
	var out bytes.Buffer
	if err := run(args, &out); err != nil {
		t.Fatal(err)
	}
	var bom cdx.BOM
	if err := cdx.NewBOMDecoder(bytes.NewReader(out.Bytes()), cdx.BOMFileFormatJSON).Decode(&bom); err != nil {
		t.Fatal(err)
	}
	return out.String(), &bom
}

// TestModules compares what is in the bill with what go list says that each program is made of.
func TestModules(t *testing.T) {
	dir := t.TempDir()
	goCommand(t, "build", "-buildvcs=false", "-trimpath", "-o", dir+"/", "./cmd/unwind", "./cmd/unwindctl")
	args := []string{"v1.2.3", filepath.Join(dir, "unwind"), filepath.Join(dir, "unwindctl")}
	text, bom := sbom(t, args...)

	var all []string
	for i, name := range []string{"unwind", "unwindctl"} {
		want := strings.Fields(goCommand(t, "list", "-deps", "-f",
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
			t.Errorf("%s: no version of Go", name)
		}
	}
	var libraries []string
	for _, c := range *bom.Components {
		libraries = append(libraries, c.PackageURL)
	}
	slices.Sort(all)
	if diff := cmp.Diff(slices.Compact(all), libraries); diff != "" {
		t.Error(diff)
	}
	if again, _ := sbom(t, args...); again != text {
		t.Error("it is another one the second time")
	}
	if bom.SpecVersion != cdx.SpecVersion1_6 || bom.SerialNumber != "" || bom.Metadata.Timestamp != "" || strings.Contains(text, dir) {
		t.Errorf("%s", text)
	}
}

func TestUsage(t *testing.T) {
	for _, args := range [][]string{nil, {"v1"}, {"v1", "main.go"}, {"v1", "missing"}} {
		var out bytes.Buffer
		if err := run(args, &out); err == nil || out.Len() > 0 {
			t.Errorf("%q: %v, %q", args, err, out.String())
		}
	}
}
