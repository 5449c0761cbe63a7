package install

import (
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
	found, err := node.Find(root)
	if p.given() {
		return p.givenDirs(found, root)
	}
	if err != nil {
		return node.Runtime{}, err
	}
	r, err := node.Choose(found, p.Runtime)
	if err != nil || p.ConfDir == "" && p.BinDir == "" {
		return r, err
	}
	if p.ConfDir != "" {
		r.ConfDir, err = filepath.Abs(p.ConfDir)
	} else {
		r.BinDirs, err = p.binDirs(r)
	}
	return r, err
}

// binDirs returns the given directory of plugins, and after it the others of a runtime.
func (p Target) binDirs(r node.Runtime) ([]string, error) {
	given, err := filepath.Abs(p.BinDir)
	others := slices.DeleteFunc(slices.Clone(r.BinDirs), func(dir string) bool {
		return dir == given
	})
	return append([]string{given}, others...), err
}

// given reports whether the directories need no configuration of a runtime.
func (p Target) given() bool { return p.ConfDir != "" && p.BinDir != "" && p.Runtime == "" }

// givenDirs returns the directories as given. If a runtime has its conflists there, it returns that
// runtime with its problems.
func (p Target) givenDirs(found []node.Runtime, root string) (node.Runtime, error) {
	confDir, err := filepath.Abs(p.ConfDir)
	r := node.Runtime{MaxConfs: 1}
	if i := slices.IndexFunc(found, func(r node.Runtime) bool {
		return r.ConfDir == confDir
	}); i >= 0 {
		r = found[i]
		r.Problems = nil
		r.Check(root)
	}
	var binErr error
	r.ConfDir = confDir
	r.BinDirs, binErr = p.binDirs(r)
	return r, errors.Join(err, binErr)
}

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

// Origin returns a sentence about where the directories come from.
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
