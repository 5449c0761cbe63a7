package e2e

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
)

type object map[string]any

// writePause writes an archive (OCI image layout 1.0) of PauseImage. The image contains only
// the given program.
func writePause(archive, program string) error {
	binary, err := os.ReadFile(program)
	if err != nil {
		return err
	}
	var layer bytes.Buffer
	if err := writeTar(tar.NewWriter(&layer), file{"pause", binary}); err != nil {
		return err
	}
	config, err1 := json.Marshal(object{
		"os": "linux", "architecture": runtime.GOARCH, "config": object{"Entrypoint": []string{"/pause"}},
		"rootfs": object{"type": "layers", "diff_ids": []string{digest(layer.Bytes())}},
	})
	manifest, err2 := json.Marshal(object{
		"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
		"config": descriptor("application/vnd.oci.image.config.v1+json", config),
		"layers": []object{descriptor("application/vnd.oci.image.layer.v1.tar", layer.Bytes())},
	})
	entry := descriptor("application/vnd.oci.image.manifest.v1+json", manifest)
	entry["annotations"] = object{"io.containerd.image.name": PauseImage, "org.opencontainers.image.ref.name": PauseImage}
	index, err3 := json.Marshal(object{"schemaVersion": 2, "manifests": []object{entry}})
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	out, err := os.Create(archive)
	if err != nil {
		return err
	}
	return errors.Join(writeTar(tar.NewWriter(out),
		file{"oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)}, file{"index.json", index},
		blob(config), blob(manifest), blob(layer.Bytes())), out.Close())
}

type file struct {
	name string
	data []byte
}

func blob(data []byte) file { return file{fmt.Sprintf("blobs/sha256/%x", sha256.Sum256(data)), data} }

func digest(data []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(data)) }

func descriptor(mediaType string, data []byte) object {
	return object{"mediaType": mediaType, "digest": digest(data), "size": len(data)}
}

func writeTar(w *tar.Writer, files ...file) error {
	for _, f := range files {
		if err := w.WriteHeader(&tar.Header{Name: f.name, Mode: 0o755, Size: int64(len(f.data))}); err != nil {
			return err
		}
		if _, err := w.Write(f.data); err != nil {
			return err
		}
	}
	return w.Close()
}
