package install

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/plugin/netconf"
	"cni-unwind/scripts/systemd"
)

// DefaultUnitDir is where an administrator's units are (systemd.unit(5)).
const DefaultUnitDir = "/etc/systemd/system"

// programs are the files of unwindctl on a node: itself, and the plugin that it installs.
var programs = []string{"unwindctl", netconf.Name}

// InstallPrograms copies this program and the plugin into a directory, and returns the written
// paths. Without them, a host that was installed from a container has no unwindctl.
func (s Setup) InstallPrograms(dir string) (written []string, err error) {
	plugin, err := s.binary()
	if err != nil {
		return nil, err
	}
	for i, from := range []string{thisProgram, plugin} {
		to := filepath.Join(dir, programs[i])
		changed, err := copyProgram(from, to)
		if err != nil {
			return written, err
		}
		if changed {
			written = append(written, to)
		}
	}
	return written, nil
}

// copyProgram puts a program in place, whole. It does nothing if the same bytes are there.
func copyProgram(from, to string) (changed bool, err error) {
	content, err := os.Open(from)
	if err != nil {
		return false, err
	}
	defer content.Close()
	return put(to, content, 0o755)
}

// put gives a file a content, durably, unless it has it and can be read and run as mode says.
func put(path string, content io.ReadSeeker, mode fs.FileMode) (changed bool, err error) {
	if info, err := os.Stat(path); err == nil && mode&0o555&^info.Mode() == 0 &&
		sameContent(content, path) {
		return false, nil
	}
	if _, err := content.Seek(0, io.SeekStart); err != nil {
		return false, err
	}
	return true, durable.Replace(path, content, mode)
}

// installUnits writes the systemd units, which run unwindctl from programDir, and enables none.
func installUnits(unitDir, programDir string) (written []string, err error) {
	files, err := systemd.Units.ReadDir(".")
	if err != nil {
		return nil, err
	}
	for _, f := range files {
		text, err := systemd.Units.ReadFile(f.Name())
		if err != nil {
			return written, err
		}
		text = bytes.ReplaceAll(text, []byte(systemd.Program),
			[]byte(filepath.Join(programDir, programs[0])))
		path := filepath.Join(unitDir, f.Name())
		changed, err := put(path, bytes.NewReader(text), 0o644)
		if err != nil {
			return written, err
		}
		if changed {
			written = append(written, path)
		}
	}
	return written, nil
}

func removeUnits(ctx context.Context, unitDir string) (removed []string, err error) {
	files, err := systemd.Units.ReadDir(".")
	var names []string
	for _, f := range files {
		if _, statErr := os.Lstat(filepath.Join(unitDir, f.Name())); statErr == nil {
			names = append(names, f.Name())
		}
	}
	if err != nil || names == nil {
		return nil, err
	}
	if unitDir == DefaultUnitDir {
		err = systemctl(ctx, append([]string{"disable", "--now"}, names...)...)
	}
	for _, name := range names {
		path := filepath.Join(unitDir, name)
		if removeErr := durable.Remove(path); removeErr != nil {
			return removed, errors.Join(err, removeErr)
		}
		removed = append(removed, path)
	}
	if unitDir == DefaultUnitDir {
		err = errors.Join(err, systemctl(ctx, "daemon-reload"))
	}
	return removed, err
}

func systemctl(ctx context.Context, args ...string) error {
	out, err := exec.CommandContext(ctx, "systemctl", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("systemctl %s: %w: %s", args[0], err, bytes.TrimSpace(out))
	}
	return nil
}

// removePrograms removes unwindctl, and the plugin beside it, if they say that they are these.
func removePrograms(ctx context.Context, dir string) (removed []string, err error) {
	plugin, own := filepath.Join(dir, programs[1]), filepath.Join(dir, programs[0])
	if about, _, err := AskVersion(ctx, plugin); err == nil && versionOf(about) != "" {
		if err := durable.Remove(plugin); err != nil {
			return nil, err
		}
		removed = append(removed, plugin)
	}
	ctx, cancel := context.WithTimeout(ctx, verifyTimeout)
	defer cancel()
	said, err := exec.CommandContext(ctx, own, "version").Output()
	if err != nil || !strings.HasPrefix(string(said), programs[0]+" ") {
		return removed, nil // it is not there, or not ours
	}
	return append(removed, own), durable.Remove(own)
}
