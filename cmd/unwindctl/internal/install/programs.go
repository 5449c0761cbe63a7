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
	"slices"
	"strings"

	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/plugin/netconf"
	"cni-unwind/scripts/systemd"
)

// DefaultUnitDir is the directory for an administrator's units (systemd.unit(5)).
const DefaultUnitDir = "/etc/systemd/system"

// programs are the files that install copies to a node: unwindctl, and the plugin that it installs.
var programs = []string{"unwindctl", netconf.Name}

// InstallPrograms copies this program and the plugin into a directory, and returns the written
// paths. If a container installed unwind, the host has no other unwindctl.
func (s Setup) InstallPrograms(dir string) (written []string, err error) {
	plugin, err := s.binary()
	if err != nil {
		return nil, err
	}
	for i, from := range []string{thisProgram, plugin} {
		to := filepath.Join(dir, programs[i])
		changed, err := s.copyProgram(from, to)
		if err != nil {
			return written, err
		}
		if changed {
			written = append(written, to)
		}
	}
	return written, nil
}

// copyProgram copies a program atomically. It does nothing if the target has the same content.
func (s Setup) copyProgram(from, to string) (changed bool, err error) {
	content, err := os.Open(from)
	if err != nil {
		return false, err
	}
	defer content.Close()
	return s.put(to, content, 0o755)
}

// put writes a file durably, unless it already has this content and the permissions of mode. A dry
// run writes nothing.
func (s Setup) put(path string, content io.ReadSeeker, mode fs.FileMode) (changed bool, err error) {
	if info, err := os.Stat(path); err == nil && mode&0o555&^info.Mode() == 0 &&
		sameContent(content, path) {
		if !s.DryRun {
			durable.RemoveTemporary(path)
		}
		return false, nil
	} else if s.DryRun {
		return true, nil
	}
	if _, err := content.Seek(0, io.SeekStart); err != nil {
		return false, err
	}
	return true, durable.Replace(path, content, mode)
}

// installUnits writes the systemd units, which run unwindctl from programDir. It does not enable
// them.
func (s Setup) installUnits(unitDir, programDir string) (written []string, err error) {
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
		changed, err := s.put(path, bytes.NewReader(text), 0o644)
		if err != nil {
			return written, err
		}
		if changed {
			written = append(written, path)
		}
	}
	return written, nil
}

// removeUnits stops and removes the systemd units, unless they are needed.
func removeUnits(ctx context.Context, unitDir, needed string, done *changes) error {
	files, err := systemd.Units.ReadDir(".")
	var names []string
	for _, f := range files {
		if durable.Exists(filepath.Join(unitDir, f.Name())) {
			names = append(names, f.Name())
		}
	}
	if err != nil || names == nil {
		return err
	}
	if unitDir == DefaultUnitDir && needed == "" {
		err = systemctl(ctx, append([]string{"disable", "--now"}, names...)...)
	}
	for _, name := range names {
		err = errors.Join(err, done.remove(filepath.Join(unitDir, name), needed))
	}
	if unitDir == DefaultUnitDir && needed == "" {
		err = errors.Join(err, systemctl(ctx, "daemon-reload"))
	}
	return err
}

func systemctl(ctx context.Context, args ...string) error {
	out, err := exec.CommandContext(ctx, "systemctl", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("systemctl %s: %w: %s", args[0], err, bytes.TrimSpace(out))
	}
	return nil
}

// removePrograms removes the plugin next to unwindctl, and then unwindctl, unless they are needed.
func removePrograms(ctx context.Context, dir, needed string, done *changes) (err error) {
	for _, program := range slices.Backward(programs) {
		path := filepath.Join(dir, program)
		switch {
		case !durable.Exists(path):
		case !isOurs(ctx, path):
			done.add("kept", "%s (not recognized as %s)", path, program)
		default:
			err = errors.Join(err, done.remove(path, needed))
		}
	}
	return err
}

// isOurs runs a program and reports whether it is what its name says: the plugin or unwindctl.
func isOurs(ctx context.Context, path string) bool {
	if filepath.Base(path) == netconf.Name {
		about, _, err := AskVersion(ctx, path)
		return err == nil && versionOf(about) != ""
	}
	ctx, cancel := context.WithTimeout(ctx, verifyTimeout)
	defer cancel()
	said, err := exec.CommandContext(ctx, path, "version").Output()
	return err == nil && strings.HasPrefix(string(said), programs[0]+" ")
}
