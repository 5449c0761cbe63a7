package install

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/node"
)

// Target selects the runtime and the directories, as given by flags.
type Target struct{ Runtime, ConfDir, BinDir, File string }

// Find returns the selected runtime, with the given directories.
func (p Target) Find(root string) (node.Runtime, error) {
	if p.File != "" && (filepath.Base(p.File) != p.File ||
		!slices.Contains([]string{".json", ".conflist"}, filepath.Ext(p.File))) {
		return node.Runtime{}, term.Usage("--file %q is not the name of a .json or .conflist file",
			p.File)
	}
	confDir, confErr := absolute(p.ConfDir)
	binDir, binErr := absolute(p.BinDir)
	if err := errors.Join(confErr, binErr); err != nil {
		return node.Runtime{}, err
	}
	r := node.Runtime{MaxConfs: 1}
	found, err := node.Find(root)
	at := slices.IndexFunc(found, func(r node.Runtime) bool { return r.ConfDir == confDir })
	switch {
	case p.given() && at >= 0: // that runtime, with its problems
		r = found[at]
		r.Problems = nil
		r.Check(root)
	case p.given():
	case err != nil:
		return node.Runtime{}, err
	default:
		if r, err = node.Choose(found, p.Runtime); err != nil {
			return r, err
		}
	}
	r.ConfDir = cmp.Or(confDir, r.ConfDir)
	if binDir != "" { // the others come after it
		r.BinDirs = append([]string{binDir}, slices.DeleteFunc(slices.Clone(r.BinDirs),
			func(dir string) bool { return dir == binDir })...)
	}
	return r, nil
}

func absolute(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	return filepath.Abs(path)
}

// given reports whether the directories need no configuration of a runtime.
func (p Target) given() bool { return p.ConfDir != "" && p.BinDir != "" && p.Runtime == "" }

// again returns the flags for another command to select the same target.
func (p Target) again(r node.Runtime) string {
	text := ""
	for _, flag := range []struct{ name, given, value string }{
		{"runtime", p.Runtime, p.Runtime}, {"conf-dir", p.ConfDir, r.ConfDir},
		{"bin-dir", p.BinDir, r.BinDirs[0]},
	} {
		if flag.given != "" {
			text += fmt.Sprintf(" --%s %s", flag.name, flag.value)
		}
	}
	if p.File != "" {
		text += " --file " + p.File
	}
	return text
}

func (p Target) Origin(r node.Runtime) string {
	switch {
	case p.given():
		return "The directories are as specified."
	case r.Name == "":
		return fmt.Sprintf("No runtime configuration found: using the common defaults %s and %s.",
			r.ConfDir, strings.Join(r.BinDirs, ", "))
	case r.Config == "":
		return fmt.Sprintf("The runtime is %s, without a configuration file: using its defaults.",
			r.Name)
	}
	return fmt.Sprintf("The runtime is %s, according to %s.", r.Name, r.Config)
}
