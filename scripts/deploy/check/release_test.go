package check

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chart/loader"
	"sigs.k8s.io/yaml"
)

// release is a release in a directory, as `make release` writes it.
type release struct {
	*testing.T
	dir, version string
}

// TestRelease checks the release that `make release-check` builds in the directory UNWIND_RELEASE:
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
	t.Run("image", func(t *testing.T) { r.with(t).image(images[0]) })
	t.Run("packages", func(t *testing.T) { r.with(t).packages() })
}

func (r release) with(t *testing.T) release { return release{t, r.dir, r.version} }

// chart checks that the chart has the release's version, and that the chart's default image is the
// release's image.
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

// krew checks krew's manifest: it lists each archive of kubectl-unwind with the right checksum, and
// each archive contains the program. The keys are those of krew's pkg/index (v0.4.4).
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
		if files := r.files(filepath.Join(r.dir, name)); files[p.Bin] == nil || files["LICENSE"] == nil {
			r.Errorf("%s: no %s, or no license", name, p.Bin)
		}
	}
	slices.Sort(want)
	slices.Sort(got)
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

// archives checks that each archive contains unwind's license. Each program in it must have a bill
// of materials, and the archive must contain the licenses of all components in that bill.
func (r release) archives() {
	archives, _ := filepath.Glob(filepath.Join(r.dir, "*.tar.gz"))
	for _, archive := range archives {
		top, files, programs := r.platform(archive)
		if files["LICENSE"] == nil {
			r.Errorf("%s: no license", top)
		}
		for _, program := range programs {
			name := strings.TrimSuffix(program, ".exe") + top + ".cdx.json"
			var bill struct {
				Metadata struct {
					Component  struct{ Version string }
					Properties []struct{ Name, Value string }
				}
				Components []struct{ Name, Version string }
			}
			if err := json.Unmarshal(readFile(r.T, filepath.Join(r.dir, name)), &bill); err != nil {
				r.Errorf("%s: %v", name, err)
				continue
			}
			sum := fmt.Sprintf("%x", sha256.Sum256(files[program]))
			if !slices.ContainsFunc(bill.Metadata.Properties, func(p struct{ Name, Value string }) bool {
				return p.Name == "cdx:gomod:binary:hash:SHA-256" && p.Value == sum
			}) || bill.Metadata.Component.Version != r.version || len(bill.Components) == 0 {
				r.Errorf("%s: not the bill of %s %s in %s", name, program, r.version, archive)
			}
			for _, c := range bill.Components {
				if !hasPrefix(files, "licenses/"+c.Name+"@"+c.Version+"/") {
					r.Errorf("%s: no license of %s", name, c.Name)
				}
			}
		}
	}
	if len(archives) < 7 {
		r.Errorf("archives: %q", archives)
	}
}

// platform returns three parts of an archive: the version and the platform in its name (for example
// -v1.2.3-linux-amd64); its files, without its top directory; and the names of its programs.
func (r release) platform(archive string) (name string, files map[string][]byte, programs []string) {
	top := strings.TrimSuffix(filepath.Base(archive), ".tar.gz")
	files = map[string][]byte{}
	for name, data := range r.files(archive) {
		files[strings.TrimPrefix(name, top+"/")] = data
	}
	if name, is := strings.CutPrefix(top, "kubectl-unwind"); !is {
		return strings.TrimPrefix(top, "unwind"), files, []string{"unwind", "unwindctl"}
	} else if strings.Contains(name, "-windows-") {
		return name, files, []string{"kubectl-unwind.exe"}
	} else {
		return name, files, []string{"kubectl-unwind"}
	}
}

func hasPrefix(files map[string][]byte, prefix string) bool {
	for name := range files {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}

// image checks that, for each architecture, the image has the archive's programs and licenses, and
// unwindctl as its entrypoint.
func (r release) image(archive string) {
	blobs := r.files(archive)
	type descriptor struct {
		MediaType, Digest string
		Platform          struct{ OS, Architecture string }
		Annotations       map[string]string
	}
	read := func(d descriptor, into any) {
		r.Helper()
		must(r.T, json.Unmarshal(blobs["blobs/"+strings.Replace(d.Digest, ":", "/", 1)], into))
	}
	var index, platforms struct{ Manifests []descriptor }
	must(r.T, json.Unmarshal(blobs["index.json"], &index))
	if len(index.Manifests) != 1 || index.Manifests[0].Annotations["org.opencontainers.image.ref.name"] == "" {
		r.Fatalf("%+v, want one image with a name", index)
	}
	read(index.Manifests[0], &platforms)
	var architectures []string
	for _, d := range platforms.Manifests {
		var manifest struct {
			Config descriptor
			Layers []descriptor
		}
		var config struct {
			OS, Architecture string
			Config           struct {
				Entrypoint []string
				Labels     map[string]string
			}
		}
		read(d, &manifest)
		read(manifest.Config, &config)
		architectures = append(architectures, d.Platform.Architecture)
		if config.OS != "linux" || config.Architecture != d.Platform.Architecture || len(manifest.Layers) != 1 ||
			!slices.Equal(config.Config.Entrypoint, []string{"/unwindctl"}) ||
			config.Config.Labels["org.opencontainers.image.version"] != r.version {
			r.Fatalf("%+v, %+v", config, manifest)
		}
		layer := filepath.Join(r.TempDir(), "layer.tar.gz")
		must(r.T, os.WriteFile(layer, blobs["blobs/"+strings.Replace(manifest.Layers[0].Digest, ":", "/", 1)], 0o600))
		_, want, _ := r.platform(filepath.Join(r.dir, "unwind-"+r.version+"-linux-"+config.Architecture+".tar.gz"))
		maps.DeleteFunc(want, func(name string, _ []byte) bool {
			return !slices.Contains([]string{"unwind", "unwindctl", "LICENSE"}, name) && !strings.HasPrefix(name, "licenses/")
		})
		if got := r.files(layer); !maps.EqualFunc(got, want, bytes.Equal) {
			r.Errorf("%s: the image has %q, want %q, or other contents", config.Architecture, slices.Sorted(maps.Keys(got)),
				slices.Sorted(maps.Keys(want)))
		}
	}
	equal(r.T, "architectures", architectures, []string{"amd64", "arm64"})
}

// packages checks that there is a deb and an rpm for each architecture. Each deb must contain
// unwindctl, licenses, a man page, and the same plugin as the archive. Its scripts must be those of
// scripts/release, and its units must run the package's unwindctl.
func (r release) packages() {
	for _, format := range []string{"deb", "rpm"} {
		if all, _ := filepath.Glob(filepath.Join(r.dir, "unwind_*."+format)); len(all) != 2 {
			r.Errorf("%s: %q, want one for each architecture", format, all)
		}
	}
	if _, err := exec.LookPath("dpkg-deb"); err != nil {
		r.Skip(err)
	}
	for _, arch := range []string{"amd64", "arm64"} {
		all, _ := filepath.Glob(filepath.Join(r.dir, "unwind_*_"+arch+".deb"))
		if len(all) != 1 {
			continue
		}
		unpacked := filepath.Join(r.TempDir(), "package.tar")
		out, err := exec.Command("dpkg-deb", "--fsys-tarfile", all[0]).Output()
		if must(r.T, errors.Join(err, os.WriteFile(unpacked, out, 0o600))); err != nil {
			continue
		}
		files := r.files(unpacked)
		_, want, _ := r.platform(filepath.Join(r.dir, "unwind-"+r.version+"-linux-"+arch+".tar.gz"))
		if !bytes.Equal(files["./usr/bin/unwind"], want["unwind"]) || files["./usr/bin/unwindctl"] == nil ||
			!hasPrefix(files, "./usr/share/doc/unwind/licenses/std@") || files["./usr/share/man/man8/unwindctl.8.gz"] == nil {
			r.Errorf("%s: %q", all[0], slices.Sorted(maps.Keys(files)))
		}
		out, err = exec.Command("dpkg-deb", "--ctrl-tarfile", all[0]).Output()
		if must(r.T, errors.Join(err, os.WriteFile(unpacked, out, 0o600))); err != nil {
			continue
		}
		for script, source := range map[string]string{"./postinst": "postinstall.sh", "./prerm": "preremove.sh"} {
			if want, _ := os.ReadFile(filepath.Join("../../release", source)); !bytes.Equal(r.files(unpacked)[script], want) {
				r.Errorf("%s: %s is not scripts/release/%s", all[0], script, source)
			}
		}
		for _, unit := range []string{"unwind-agent.service", "unwind-sweep.service", "unwind-sweep-boot.service"} {
			text := string(files["./usr/lib/systemd/system/"+unit])
			if !strings.Contains(text, "\nExecStart=/usr/bin/unwindctl ") || strings.Contains(text, "/usr/local") {
				r.Errorf("%s: %s", unit, text)
			}
		}
	}
}

// files returns the contents of the files in a tar archive, by name. The archive may be compressed.
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
