package install

import (
	"bytes"
	"context"
	"embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/plugin/netconf"
)

// units contains the systemd units that unwindctl install --systemd writes. They are in the
// directory unitSource.
//
//go:embed systemd/unwind-*
var units embed.FS

const (
	unitSource = "systemd"
	// unitProgram is the path of unwindctl in the texts of the units. There, the state directory is
	// netconf.DefaultStateDir.
	unitProgram = "/usr/local/bin/unwindctl"
)

// DefaultUnitDir is the directory for an administrator's units (systemd.unit(5)).
const DefaultUnitDir = "/etc/systemd/system"

// programs are the files that install copies to a node: unwindctl, and the plugin that it installs.
var programs = []string{"unwindctl", netconf.Name}

// InstallPrograms returns the step that copies this program and the plugin into a directory. If a
// container installs unwind, the host would have no unwindctl without that copy.
func (s Setup) InstallPrograms(dir string) Step {
	return func(context.Context) (changes []*Change, err error) {
		plugin, err := s.binary()
		for i, from := range []string{thisProgram, plugin} {
			if err != nil {
				break
			}
			var one *Change
			one, err = put(filepath.Join(dir, programs[i]), 0o755, func() (io.ReadCloser, error) {
				return os.Open(from)
			})
			changes = append(changes, one)
		}
		return changes, err
	}
}

// put returns the change that durably writes the content from open to a file. The file stays
// unchanged if it already has that content and at least mode's read and execute permissions.
func put(path string, mode fs.FileMode, open func() (io.ReadCloser, error)) (*Change, error) {
	content, err := open()
	if err != nil {
		return nil, err
	}
	defer func() { _ = content.Close() }()
	info, err := os.Stat(path)
	if err == nil && mode&0o555&^info.Mode() == 0 && sameContent(content, path) {
		return &Change{Change: "unchanged", What: path, apply: func(*Change) error {
			durable.RemoveTemporary(path)
			return nil
		}}, nil
	}
	return &Change{Change: "written", What: path, apply: func(*Change) error {
		content, err := open()
		if err != nil {
			return err
		}
		defer func() { _ = content.Close() }()
		return durable.Replace(path, content, mode)
	}}, nil
}

// installUnits returns the step that writes the systemd units. They run unwindctl from ProgramDir,
// with the flags of the install that choose files and directories. The step does not enable them.
func (o Options) installUnits(s Setup) Step {
	return func(context.Context) (changes []*Change, err error) {
		files, err := units.ReadDir(unitSource)
		program := filepath.Join(o.ProgramDir, programs[0])
		agent, sweep, flagErr := o.unitFlags(s)
		here := strings.NewReplacer(unitProgram+" run", program+" run"+agent,
			unitProgram+" sweep", program+" sweep"+sweep, netconf.DefaultStateDir, s.stateDir())
		for _, f := range files {
			data, readErr := units.ReadFile(path.Join(unitSource, f.Name()))
			text := here.Replace(string(data))
			one, putErr := put(filepath.Join(o.UnitDir, f.Name()), 0o644, func() (io.ReadCloser, error) {
				return io.NopCloser(strings.NewReader(text)), nil
			})
			changes, err = append(changes, one), errors.Join(err, readErr, putErr)
		}
		return changes, errors.Join(err, flagErr)
	}
}

// unitFlags returns the install's flags for the agent and for the sweeps, as text for ExecStart.
func (o Options) unitFlags(s Setup) (agent, sweep string, err error) {
	binDirs, err := o.binDirs()
	programDir, dirErr := absolute(o.ProgramDir)
	if programDir == filepath.Dir(unitProgram) {
		programDir = "" // the agent's default
	}
	for _, flag := range []struct {
		name, given, value string
		sweeps             bool // whether sweep has this flag, too
	}{
		{"runtime", o.Runtime, o.Runtime, false},
		{"conf-dir", o.ConfDir, s.ConfDir, true},
		{"cni-bin-dir", o.BinDir, strings.Join(binDirs, ":"), true},
		{"unwind-file", o.File, o.File, false},
		{"provider-conf", o.Conf, s.Source, false},
		{"state-dir", o.StateDir, s.StateDir, true},
		{"install-dir", programDir, programDir, false},
	} {
		if flag.given == "" {
			continue
		}
		text := fmt.Sprintf(" \"--%s=%s\"", flag.name, inUnit.Replace(flag.value))
		agent += text
		if flag.sweeps {
			sweep += text
		}
	}
	return agent, sweep, errors.Join(err, dirErr)
}

// inUnit quotes a text for systemd's ExecStart (systemd.service(5), "Command lines").
var inUnit = strings.NewReplacer(`\`, `\\`, `"`, `\"`, "%", "%%", "$", "$$")

// removeUnits returns the changes that remove the systemd units, unless they are needed. Units in
// DefaultUnitDir are stopped first.
func removeUnits(ctx context.Context, unitDir, needed string) (changes []*Change, err error) {
	files, err := units.ReadDir(unitSource)
	args := []string{"disable", "--now"}
	for _, f := range files {
		if path := filepath.Join(unitDir, f.Name()); durable.Exists(path) {
			args = append(args, f.Name())
			changes = append(changes, remove(path, needed))
		}
	}
	if unitDir != DefaultUnitDir || needed != "" || changes == nil {
		return changes, err
	}
	run := func(args ...string) []*Change {
		return []*Change{{apply: func(*Change) error { return systemctl(ctx, args...) }}}
	}
	return slices.Concat(run(args...), changes, run("daemon-reload")), err
}

func systemctl(ctx context.Context, args ...string) error {
	out, err := exec.CommandContext(ctx, "systemctl", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("systemctl %s: %w: %s", args[0], err, bytes.TrimSpace(out))
	}
	return nil
}

// removeProgram returns the change that removes a program. The file stays if it is needed, or if it
// is another program that is also called unwind or unwindctl. If it does not run, it may be either,
// and is kept.
func removeProgram(ctx context.Context, path, needed string) *Change {
	if needed != "" {
		return remove(path, needed)
	}
	name := filepath.Base(path)
	stdout, stderr, err := ask(ctx, []string{path, "version"}) // the plugin ignores the argument
	var exit *exec.ExitError
	switch {
	case err == nil && strings.HasPrefix(stdout.String(), programs[0]+" "),
		versionOf(stderr.String()) != "":
		return remove(path, "")
	case err != nil && !(errors.As(err, &exit) && exit.Exited()):
		return remove(path, fmt.Sprintf("it does not run, so it may be another program; if it is "+
			"unwind's, remove it: %v", err))
	}
	return &Change{Change: "unchanged", What: fmt.Sprintf("%s (does not identify "+
		"itself as %s)", path, name)}
}

// remove returns the change that removes a file or, if needed is not "", keeps it for that reason.
func remove(path, needed string) *Change {
	if needed != "" {
		return &Change{Change: "kept", What: fmt.Sprintf("%s (%s)", path, needed)}
	}
	return &Change{Change: "removed", What: path,
		apply: func(*Change) error { return durable.Remove(path) }}
}
