package main

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

const (
	testName  = "docker.io/library/unwind:dev"
	testEpoch = "1700000000"
)

// program returns an ELF header, followed by the program's name.
func program(machine elf.Machine, name string) []byte {
	var out bytes.Buffer
	_ = binary.Write(&out, binary.LittleEndian, elf.Header64{
		Ident: [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F',
			byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)},
		Type: uint16(elf.ET_EXEC), Machine: uint16(machine), Version: uint32(elf.EV_CURRENT)})
	out.WriteString(name)
	return out.Bytes()
}

// built returns a directory with the programs and licenses of both architectures, as make image
// fills it.
func built(t *testing.T, mode os.FileMode) string {
	t.Helper()
	dir := t.TempDir()
	for arch, machine := range machines {
		for _, name := range []string{"unwind", "unwindctl"} {
			put(t, filepath.Join(dir, arch, name), program(machine, name), mode)
		}
		put(t, filepath.Join(dir, arch, "LICENSE"), []byte("ours"), mode)
		put(t, filepath.Join(dir, arch, "licenses/a@v1/LICENSE"), []byte("a's"), mode)
		put(t, filepath.Join(dir, arch, "notes"), nil, mode)
	}
	return dir
}

func put(t *testing.T, path string, data []byte, mode os.FileMode) {
	t.Helper()
	err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, data, mode))
	if err != nil {
		t.Fatal(err)
	}
}

// written returns the archive that the program writes for a directory.
func written(t *testing.T, dir string) []byte {
	t.Helper()
	archive := filepath.Join(t.TempDir(), "image.tar")
	err := run([]string{testName, "v1.2.3", "https://a/b", "0123abc", archive, dir, "amd64", "arm64"}, testEpoch)
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(archive)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// member is a file in a tar archive: the header fields that may differ, and the content.
type member struct {
	Name     string
	Mode     int64
	Uid, Gid int
	Seconds  int64
	Type     byte
	Data     string
}

func members(t *testing.T, r io.Reader) []member {
	t.Helper()
	var all []member
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if err == io.EOF {
			return all
		}
		data, err2 := io.ReadAll(tr)
		if err := errors.Join(err, err2); err != nil {
			t.Fatal(err)
		}
		all = append(all,
			member{h.Name, h.Mode, h.Uid, h.Gid, h.ModTime.Unix(), h.Typeflag, string(data)})
	}
}

func equal(t *testing.T, what string, got, want any) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%s:\n got %q\nwant %q", what, fmt.Sprintf("%+v", got), fmt.Sprintf("%+v", want))
	}
}

// TestImage reads the archive as a registry client does. It contains one name with an image for
// each architecture, and each image contains the programs, the licenses and nothing else.
func TestImage(t *testing.T) {
	dir := t.TempDir()
	for _, m := range members(t, bytes.NewReader(written(t, built(t, 0o700)))) {
		put(t, filepath.Join(dir, m.Name), []byte(m.Data), 0o600)
		equal(t, m.Name, m, member{m.Name, 0o644, 0, 0, 1700000000, tar.TypeReg, m.Data})
	}
	top := must(layout.ImageIndexFromPath(dir))(t)
	if err := validate.Index(top); err != nil {
		t.Error(err)
	}
	entries := must(top.IndexManifest())(t).Manifests
	if len(entries) != 1 {
		t.Fatalf("%d images, want one", len(entries))
	}
	equal(t, "the image's type", entries[0].MediaType, types.OCIImageIndex)
	equal(t, "the image's name", entries[0].Annotations, map[string]string{
		"io.containerd.image.name": testName, "org.opencontainers.image.ref.name": testName})

	about := map[string]string{"org.opencontainers.image.title": "unwind",
		"org.opencontainers.image.version": "v1.2.3", "org.opencontainers.image.licenses": "Apache-2.0",
		"org.opencontainers.image.source": "https://a/b", "org.opencontainers.image.revision": "0123abc"}
	index := must(top.ImageIndex(entries[0].Digest))(t)
	manifest := must(index.IndexManifest())(t)
	equal(t, "the index's annotations", manifest.Annotations, about)
	if len(manifest.Manifests) != 2 {
		t.Fatalf("%d architectures, want two", len(manifest.Manifests))
	}
	for i, arch := range []string{"amd64", "arm64"} {
		entry := manifest.Manifests[i]
		equal(t, "platform", entry.Platform, &v1.Platform{OS: "linux", Architecture: arch})
		image := must(index.Image(entry.Digest))(t)
		manifest := must(image.Manifest())(t)
		equal(t, arch+": types", []types.MediaType{entry.MediaType, manifest.Config.MediaType},
			[]types.MediaType{types.OCIManifestSchema1, types.OCIConfigJSON})
		equal(t, arch+": annotations", manifest.Annotations, about)
		config := must(image.ConfigFile())(t)
		equal(t, arch+": configuration", config.Config,
			v1.Config{Entrypoint: []string{"/unwindctl"}, Labels: about})
		equal(t, arch+": platform", config.Platform(), &v1.Platform{OS: "linux", Architecture: arch})
		equal(t, arch+": created", config.Created.Format(time.RFC3339), "2023-11-14T22:13:20Z")
		layers := must(image.Layers())(t)
		if len(layers) != 1 {
			t.Fatalf("%s: %d layers, want one", arch, len(layers))
		}
		equal(t, arch+": the layer's type", manifest.Layers[0].MediaType, types.OCILayer)
		var want []member
		for _, name := range []string{"unwind", "unwindctl"} {
			want = append(want, member{name, 0o755, 0, 0, 1700000000, tar.TypeReg,
				string(program(machines[arch], name))})
		}
		want = append(want, member{"LICENSE", 0o644, 0, 0, 1700000000, tar.TypeReg, "ours"},
			member{"licenses/a@v1/LICENSE", 0o644, 0, 0, 1700000000, tar.TypeReg, "a's"})
		equal(t, arch+": files", members(t, must(layers[0].Uncompressed())(t)), want)
	}
}

func must[T any](value T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return value
	}
}

// TestReproducible: the archive's bytes depend neither on the directory, nor on the files' modes
// and times, nor on the umask or the time zone.
func TestReproducible(t *testing.T) {
	one := written(t, built(t, 0o755))
	defer syscall.Umask(syscall.Umask(0o077))
	defer func(zone *time.Location) { time.Local = zone }(time.Local)
	time.Local = time.FixedZone("Kathmandu", 5*3600+45*60)
	dir := built(t, 0o600)
	early := time.Unix(1, 0)
	if err := os.Chtimes(filepath.Join(dir, "arm64", "unwind"), early, early); err != nil {
		t.Fatal(err)
	}
	if another := written(t, dir); !bytes.Equal(one, another) {
		equal(t, "files", members(t, bytes.NewReader(another)), members(t, bytes.NewReader(one)))
		t.Error("the two archives differ")
	}
}

func TestRefused(t *testing.T) {
	const args = testName + " v1.2.3 SOURCE REVISION ARCHIVE DIR amd64 arm64"
	for _, tt := range []struct {
		name, args, epoch string
		file, data        string // replaces this program by this content, or removes it
		want              string
	}{
		{"a program is missing", args, testEpoch, "arm64/unwindctl", "", "arm64/unwindctl: no such file"},
		{"a program of the other architecture", args, testEpoch, "arm64/unwind", string(program(elf.EM_X86_64, "unwind")),
			"arm64/unwind: a program for EM_X86_64, not EM_AARCH64"},
		{"no program", args, testEpoch, "amd64/unwind", "#!/bin/sh\n", "amd64/unwind: not a Linux program"},
		{"an unknown architecture", args + " riscv64", testEpoch, "", "", `unknown architecture "riscv64"`},
		{"a short name", strings.TrimPrefix(args, "docker.io/library/"), testEpoch, "", "",
			`image "unwind:dev": strict validation requires the registry`},
		{"a name without a tag", strings.Replace(args, ":dev", "", 1), testEpoch, "", "", `image "docker.io/library/unwind": `},
		{"no date", args, "", "", "", `SOURCE_DATE_EPOCH "": not a number`},
		{"no architecture", strings.TrimSuffix(args, " amd64 arm64"), testEpoch, "", "", "usage: "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir, archive := built(t, 0o755), filepath.Join(t.TempDir(), "image.tar")
			if tt.file != "" {
				_ = os.Remove(filepath.Join(dir, tt.file))
			}
			if tt.data != "" {
				put(t, filepath.Join(dir, tt.file), []byte(tt.data), 0o755)
			}
			args := strings.Fields(strings.NewReplacer("ARCHIVE", archive, "DIR", dir).Replace(tt.args))
			if err := run(args, tt.epoch); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
			if _, err := os.Lstat(archive); err == nil {
				t.Error("an archive was written")
			}
		})
	}
}
