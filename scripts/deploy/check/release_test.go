package check

import (
	"archive/tar"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chart/loader"
	"sigs.k8s.io/yaml"
)

// release is a release in a directory, as make release writes it.
type release struct {
	*testing.T
	dir, version string
}

// TestRelease checks the release in the directory UNWIND_RELEASE, which make release-check builds:
// its parts refer to each other by the right names, versions and checksums.
func TestRelease(t *testing.T) {
	dir := os.Getenv("UNWIND_RELEASE")
	if dir == "" {
		t.Skip("make release-check runs this test")
	}
	const image = "-image.tar"
	images, err := filepath.Glob(filepath.Join(dir, "unwind-*"+image))
	if err != nil || len(images) != 1 {
		t.Fatalf("images: %q, %v", images, err)
	}
	version := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(images[0]), "unwind-"), image)
	r := release{t, dir, version}
	t.Run("chart", func(t *testing.T) { r.with(t).chart(images[0]) })
	t.Run("krew", func(t *testing.T) { r.with(t).krew() })
	t.Run("sums", func(t *testing.T) { r.with(t).sums() })
	t.Run("archives", func(t *testing.T) { r.with(t).archives() })
}

func (r release) with(t *testing.T) release { return release{t, r.dir, r.version} }

// chart checks that the chart has the release's version, and that its default image is the
// release's.
func (r release) chart(archive string) {
	chart, err := loader.Load(filepath.Join(r.dir, "unwind-"+strings.TrimPrefix(r.version, "v")+".tgz"))
	must(r.T, err)
	if err := chart.Validate(); err != nil || chart.Metadata.AppVersion != r.version ||
		"v"+chart.Metadata.Version != r.version {
		r.Errorf("%+v: %v", chart.Metadata, err)
	}
	var index struct {
		Manifests []struct {
			Digest      string
			Annotations map[string]string
		}
	}
	must(r.T, json.Unmarshal(r.files(archive)["index.json"], &index))
	m := index.Manifests[0]
	want := m.Annotations["io.containerd.image.name"] + "@" + m.Digest
	got := agent(objects(r.T, manifests(r.T, chart, nil))).Image
	if got != want || !strings.Contains(got, r.version) {
		r.Errorf("image %s, want %s", got, want)
	}
}

// krew checks krew's manifest: it lists each archive of kubectl-unwind with its checksum, and
// installs the program and the license from it. The keys are those of krew's pkg/index (v0.4.4).
func (r release) krew() {
	var plugin struct {
		APIVersion string
		Kind       string
		Metadata   struct{ Name string }
		Spec       struct {
			Version, Homepage, ShortDescription, Description string
			Platforms                                        []struct {
				Selector    struct{ MatchLabels map[string]string }
				URI, Sha256 string
				Files       []struct{ From, To string }
				Bin         string
			}
		}
	}
	must(r.T, yaml.UnmarshalStrict(readFile(r.T, filepath.Join(r.dir, "unwind.yaml")), &plugin))
	if plugin.Metadata.Name != "unwind" || plugin.Spec.Version != r.version {
		r.Errorf("%+v", plugin)
	}
	var want, got []string
	archives, _ := filepath.Glob(filepath.Join(r.dir, "kubectl-unwind-*.tar.gz"))
	for _, archive := range archives {
		want = append(want, filepath.Base(archive))
	}
	for _, p := range plugin.Spec.Platforms {
		name := path.Base(p.URI)
		got = append(got, name)
		system, arch := p.Selector.MatchLabels["os"], p.Selector.MatchLabels["arch"]
		if name != fmt.Sprintf("kubectl-unwind-%s-%s-%s.tar.gz", r.version, system, arch) ||
			p.URI != plugin.Spec.Homepage+"/releases/download/"+r.version+"/"+name {
			r.Errorf("%s, %s: %s", system, arch, p.URI)
		}
		data := readFile(r.T, filepath.Join(r.dir, name))
		if sum := fmt.Sprintf("%x", sha256.Sum256(data)); sum != p.Sha256 {
			r.Errorf("%s has the checksum %s, the manifest %s", name, sum, p.Sha256)
		}
		files := r.files(filepath.Join(r.dir, name))
		moved := map[string]bool{}
		for _, f := range p.Files {
			for name := range files {
				if matches, _ := path.Match(f.From, name); matches && f.To == "." {
					moved[path.Base(name)] = true
				}
			}
		}
		if !moved[p.Bin] || !moved["LICENSE"] || len(moved) != 2 {
			r.Errorf("%s: krew installs %v, want the program and LICENSE", name, moved)
		}
	}
	equal(r.T, "the manifest's archives", want, got)
	if len(got) == 0 {
		r.Error("the manifest lists no archives")
	}
}

// sums checks that SHA256SUMS lists each file except the notes, which are not published as a file.
func (r release) sums() {
	entries, err := os.ReadDir(r.dir)
	must(r.T, err)
	var want string
	for _, e := range entries {
		if e.Name() != "SHA256SUMS" && e.Name() != "NOTES.md" {
			data := readFile(r.T, filepath.Join(r.dir, e.Name()))
			want += fmt.Sprintf("%x  %s\n", sha256.Sum256(data), e.Name())
		}
	}
	equal(r.T, "SHA256SUMS", want, string(readFile(r.T, filepath.Join(r.dir, "SHA256SUMS"))))
}

// archives checks that each archive contains its license, a bill of materials of its programs, and
// the licenses of everything in the bill.
func (r release) archives() {
	archives, _ := filepath.Glob(filepath.Join(r.dir, "*.tar.gz"))
	for _, archive := range archives {
		top := strings.TrimSuffix(filepath.Base(archive), ".tar.gz")
		files := r.files(archive)
		var bill struct {
			Metadata struct {
				Component struct {
					Version    string
					Components []struct {
						Name   string
						Hashes []struct{ Content string }
					}
				}
			}
			Components []struct {
				Name, Version string
				Licenses      []struct{ License struct{ ID string } }
			}
		}
		if err := json.Unmarshal(files[top+"/sbom.cdx.json"], &bill); err != nil {
			r.Errorf("%s: sbom.cdx.json: %v", top, err)
			continue
		}
		var programs []string
		for _, program := range bill.Metadata.Component.Components {
			programs = append(programs, program.Name)
			if sum := fmt.Sprintf("%x", sha256.Sum256(files[top+"/"+program.Name])); sum != program.Hashes[0].Content {
				r.Errorf("%s: %s has another checksum in the bill", top, program.Name)
			}
		}
		names := slices.Collect(maps.Keys(files))
		for _, c := range bill.Components {
			texts := top + "/licenses/" + c.Name + "@" + c.Version + "/"
			if len(c.Licenses) == 0 || c.Licenses[0].License.ID == "" ||
				!slices.ContainsFunc(names, func(name string) bool { return strings.HasPrefix(name, texts) }) {
				r.Errorf("%s: no license, or no license text, of %s: %v", top, c.Name, c.Licenses)
			}
		}
		// The image contains the same programs as the archive of its architecture.
		if arch, is := strings.CutPrefix(top, "unwind-"+r.version+"-linux-"); is {
			ofImage := readFile(r.T, filepath.Join(r.dir, "unwind-"+r.version+"-image-"+arch+".cdx.json"))
			equal(r.T, "the bill of the image", string(files[top+"/sbom.cdx.json"]), string(ofImage))
		}
		want := []string{"unwind", "unwindctl"}
		switch {
		case strings.Contains(top, "-windows-"):
			want = []string{"kubectl-unwind.exe"}
		case strings.HasPrefix(top, "kubectl-"):
			want = []string{"kubectl-unwind"}
		}
		if !slices.Equal(programs, want) || bill.Metadata.Component.Version != r.version || files[top+"/LICENSE"] == nil {
			r.Errorf("%s: the bill is for version %s and lists %q; files: %q", top, bill.Metadata.Component.Version, programs,
				slices.Sorted(maps.Keys(files)))
		}
	}
	if len(archives) < 7 {
		r.Errorf("archives: %q", archives)
	}
}

// files returns the files of a tar file, which may be compressed.
func (r release) files(name string) map[string][]byte {
	r.Helper()
	f, err := os.Open(name)
	must(r.T, err)
	defer f.Close()
	var in io.Reader = f
	if strings.HasSuffix(name, "gz") {
		if in, err = gzip.NewReader(f); err != nil {
			r.Fatal(err)
		}
	}
	files := map[string][]byte{}
	for tr := tar.NewReader(in); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		data, err2 := io.ReadAll(tr)
		must(r.T, errors.Join(err, err2))
		if h.Typeflag == tar.TypeReg {
			files[h.Name] = data
		}
	}
}
