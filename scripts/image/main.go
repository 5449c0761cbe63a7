// Image writes the agent's image, for one or more architectures, as one OCI archive: an OCI image
// layout 1.0 in a tar file. It needs no daemon and no registry.
//
//	image NAME VERSION SOURCE REVISION ARCHIVE DIRECTORY ARCH…
//
// SOURCE is the repository's URL and REVISION the commit; each may be empty. The programs and
// licenses of each ARCH are in DIRECTORY/ARCH. scripts/deploy/Containerfile builds the same image:
// change both together. The same programs give the same bytes: all times are SOURCE_DATE_EPOCH, and
// root owns all files. make image runs this program.
package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// programs are the image's files. A container runs unwindctl.
var programs = []string{"unwind", "unwindctl"}

// machines maps GOARCH to the architecture in a program's ELF header.
var machines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

func main() {
	if err := run(os.Args[1:], os.Getenv("SOURCE_DATE_EPOCH")); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func run(args []string, epoch string) error {
	if len(args) < 7 {
		return errors.New("usage: image NAME VERSION SOURCE REVISION ARCHIVE DIRECTORY ARCH…")
	}
	ref, archive, dir := args[0], args[4], args[5]
	// The kubelet asks the runtime for the full name, even if a pod uses a short one.
	if _, err := name.NewTag(ref, name.StrictValidation); err != nil {
		return fmt.Errorf("image %q: %w; give the full name, such as docker.io/library/unwind:dev", ref,
			err)
	}
	seconds, err := strconv.ParseInt(epoch, 10, 64)
	if err != nil {
		return fmt.Errorf("SOURCE_DATE_EPOCH %q: not a number of seconds", epoch)
	}
	date := time.Unix(seconds, 0).UTC()
	about := map[string]string{
		"org.opencontainers.image.title":    "unwind",
		"org.opencontainers.image.version":  args[1],
		"org.opencontainers.image.source":   args[2],
		"org.opencontainers.image.revision": args[3],
		"org.opencontainers.image.licenses": "Apache-2.0",
	}
	maps.DeleteFunc(about, func(_, value string) bool { return value == "" })
	index := v1.ImageIndex(empty.Index)
	for _, arch := range args[6:] {
		image, err := imageOf(arch, filepath.Join(dir, arch), about, date)
		if err != nil {
			return err
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: image, Descriptor: v1.Descriptor{
			Platform: &v1.Platform{OS: "linux", Architecture: arch}}})
	}
	index = mutate.Annotations(index, about).(v1.ImageIndex)
	return write(archive, index, ref, date)
}

// imageOf returns the image of the programs in a directory, for one architecture.
func imageOf(arch, dir string, labels map[string]string, date time.Time) (v1.Image, error) {
	files, err := pack(arch, dir, date)
	if err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromOpener(
		func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(files)), nil },
		tarball.WithMediaType(types.OCILayer), tarball.WithCompressionLevel(gzip.DefaultCompression),
		tarball.WithCompressedCaching) // compress it once for digest, size and bytes
	if err != nil {
		return nil, err
	}
	created := v1.Time{Time: date}
	image := mutate.MediaType(empty.Image, types.OCIManifestSchema1)
	image, err = mutate.ConfigFile(mutate.ConfigMediaType(image, types.OCIConfigJSON), &v1.ConfigFile{
		Created: created, OS: "linux", Architecture: arch, RootFS: v1.RootFS{Type: "layers"},
		Config: v1.Config{Entrypoint: []string{"/unwindctl"}, Labels: labels},
	})
	if err != nil {
		return nil, err
	}
	image, err = mutate.Append(image, mutate.Addendum{Layer: layer, History: v1.History{
		Created: created, CreatedBy: "scripts/image"}})
	if err != nil {
		return nil, err
	}
	return mutate.Annotations(image, labels).(v1.Image), nil
}

// pack returns a tar file of the programs in a directory and of the licenses there. Each program
// must be of the architecture.
func pack(arch, dir string, date time.Time) ([]byte, error) {
	machine, known := machines[arch]
	if !known {
		return nil, fmt.Errorf("unknown architecture %q; use amd64 or arm64", arch)
	}
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, program := range programs {
		path := filepath.Join(dir, program)
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		binary, err := elf.NewFile(bytes.NewReader(data))
		if err != nil {
			return nil, fmt.Errorf("%s: not a Linux program: %w", path, err)
		}
		if binary.Machine != machine {
			return nil, fmt.Errorf("%s: a program for %v, not %v", path, binary.Machine, machine)
		}
		if err := add(w, program, 0o755, date, data); err != nil {
			return nil, err
		}
	}
	err := addAll(w, dir, date, func(name string) bool {
		return name == "LICENSE" || strings.HasPrefix(name, "licenses/")
	})
	return out.Bytes(), errors.Join(err, w.Close())
}

// write writes the index and everything that it refers to into an archive, under the image's name.
func write(archive string, index v1.ImageIndex, ref string, date time.Time) error {
	dir, err := os.MkdirTemp("", "unwind-image-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	// The archive has one entry, the index of all architectures. One entry for each architecture would
	// give several images of the same name. containerd reads the first annotation, podman and skopeo
	// the second.
	path, err := layout.Write(dir, empty.Index)
	if err != nil {
		return err
	}
	err = path.AppendIndex(index, layout.WithAnnotations(map[string]string{
		"io.containerd.image.name": ref, "org.opencontainers.image.ref.name": ref}))
	if err != nil {
		return err
	}
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	err = addAll(w, dir, date, func(string) bool { return true })
	if err := errors.Join(err, w.Close()); err != nil {
		return err
	}
	return os.WriteFile(archive, out.Bytes(), 0o644)
}

// addAll adds the files of a directory that are wanted, by name.
func addAll(w *tar.Writer, dir string, date time.Time, wanted func(name string) bool) error {
	return fs.WalkDir(os.DirFS(dir), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !wanted(name) {
			return err
		}
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		return add(w, name, 0o644, date, data)
	})
}

func add(w *tar.Writer, name string, mode int64, date time.Time, data []byte) error {
	err := w.WriteHeader(&tar.Header{
		Format: tar.FormatUSTAR, Name: name, Mode: mode, Size: int64(len(data)), ModTime: date})
	if err == nil {
		_, err = w.Write(data)
	}
	return err
}
