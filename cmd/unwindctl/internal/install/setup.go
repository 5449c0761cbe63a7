// Package install puts unwind into a runtime's network configuration, and removes it.
//
// Setup.Plan computes the changes from the existing files and writes nothing. Applying the plan
// writes the binary before the conflist, each atomically, so the node works even if the install is
// interrupted at any point. Inline and Restore change a single file: Inline moves its chain into
// unwind's entry, and Restore moves the chain back.
package install

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/plugin/netconf"
)

// The default names of unwind's conflist. Both sort first. podman loads only lists of plugins
// (.conflist). CRI runtimes also load a single plugin's configuration (.json). For them, ownJSON is
// the default, because mesh installers neither patch it nor mistake it for the provider's file
// (go-cni opts.go loadFromConfDir, ocicni pkg/ocicni/ocicni.go loadNetworks; istio
// cni/pkg/install/cniconfig.go, linkerd2-proxy-init cni-plugin/deployment/scripts/install-cni.sh).
const (
	ownList = "00-unwind.conflist"
	ownJSON = "00-unwind.json"
)

// forms are the extensions that unwind's conflist may have.
var forms = []string{".json", ".conflist"}

// OwnFile returns the name of unwind's conflist: --unwind-file, or else the name of the existing
// file, or else the default for the runtime. The existing file is the first one in the directory,
// if it is unwind's, or else one that unwindctl off or cilium has renamed. OwnFile prefers the
// existing file's name to the default, so that the extension stays the same even if a later command
// finds another runtime, or none.
func (p Target) OwnFile(r node.Runtime) string {
	if p.File != "" {
		return p.File
	}
	paths, _ := netconf.Conflists(r.ConfDir)
	off, _ := filepath.Glob(filepath.Join(r.ConfDir, "*"+node.OffSuffix))
	renamed, _ := filepath.Glob(filepath.Join(r.ConfDir, "*"+renamedBy))
	for _, path := range slices.Concat(paths[:min(1, len(paths))], off, renamed) {
		name := strings.TrimSuffix(strings.TrimSuffix(filepath.Base(path), node.OffSuffix), renamedBy)
		c, _ := netconf.ReadConflist(path)
		made := madeFromOurs(c) && !strings.Contains(name, netconf.Name)
		if (ours(c) && !made || Broken(path)) && slices.Contains(forms, filepath.Ext(name)) {
			return name
		}
	}
	if r.Socket != "" {
		return ownJSON
	}
	return ownList
}

// Setup describes an installation of unwind: the binary, and unwind's conflist, which sorts first
// and names the provider's file as its chain. unwindctl changes other conflists only after another
// program has copied or changed unwind's conflist (see repairs).
type Setup struct {
	ConfDir, BinDir string // of the runtime
	Source          string // the provider's conflist, "" = the first in ConfDir except unwind's
	File            string // the name of unwind's conflist, "" = ownList
	CNIVersion      string // the newest that the runtime supports, "" = unknown
	ByName          bool   // for nerdctl, podman or Nomad, which choose networks by name
	Binary          string // the plugin to install, "" = unwind next to this program
	StateDir        string // "" = the one in unwind's conflist, else the default
	Observe         bool   // journal only: no sweep on STATUS, and GC does nothing
}

func (s Setup) Path() string { return filepath.Join(s.ConfDir, cmp.Or(s.File, ownList)) }

// paths returns the paths where unwind's conflist may be: its path while it is in use, its path
// after unwindctl off and, if cilium has renamed it, its new path.
func (s Setup) paths() []string {
	paths := []string{s.Path(), s.Path() + node.OffSuffix}
	if renamed := s.renamed(); renamed != "" {
		paths = append(paths, renamed)
	}
	return paths
}

// own returns unwind's conflists: first those in use, then those that unwindctl off has renamed. It
// looks for both extensions, .json and .conflist, because uninstall cannot know which one the
// install used: that depended on the runtime and on --unwind-file.
func (s Setup) own() (found []*netconf.Conflist) {
	for _, suffix := range []string{"", node.OffSuffix} {
		for _, form := range forms {
			path := stem(s.Path()) + form + suffix
			if c, _ := netconf.ReadConflist(path); ours(c) {
				found = append(found, c)
			}
		}
	}
	return found
}

func stem(path string) string { return strings.TrimSuffix(path, filepath.Ext(path)) }

func isKept(c *netconf.Conflist) bool { return strings.HasSuffix(c.Path, node.OffSuffix) }

// names reports whether a configuration contains unwind or, if own is not "", has the file own as
// its "clusterNetwork". Multus's configuration contains plugins ("delegates") or the path of a
// conflist ("clusterNetwork"). If these run unwind, a Multus in unwind's chain calls unwind again.
func names(data []byte, own string) bool {
	var value any
	if json.Unmarshal(data, &value) != nil {
		return false
	}
	var in func(any) bool
	in = func(value any) bool {
		switch v := value.(type) {
		case map[string]any:
			network, _ := v["clusterNetwork"].(string)
			if v["type"] == netconf.Name || own != "" &&
				filepath.Base(network) == filepath.Base(own) {
				return true
			}
			return slices.ContainsFunc(slices.Collect(maps.Values(v)), in)
		case []any:
			return slices.ContainsFunc(v, in)
		}
		return false
	}
	return in(value)
}

// Entry returns unwind's entry in the first file of paths that has one, or an empty entry.
func (s Setup) Entry() netconf.Conf {
	for _, path := range s.paths() {
		if c, _ := netconf.ReadConflist(path); c != nil && c.Unwind != nil {
			return *c.Unwind
		}
	}
	return netconf.Conf{}
}

// stateDir returns the state directory: the given one, or else the one that unwind's conflist
// names, or else the default.
func (s Setup) stateDir() string {
	return cmp.Or(s.StateDir, s.Entry().StateDir, netconf.DefaultStateDir)
}

type Plan struct {
	path     string            // of unwind's conflist
	Source   *netconf.Conflist // the provider's conflist, as it will be after the repairs
	chain    *netconf.Chain
	content  []byte
	changed  bool // whether content differs from the existing file
	repairs  []*Change
	warnings []string
	CopyErr  error // why the provider's file could not be copied
}

// Target selects the runtime and the directories, as given by flags. BinDir may be a list like
// CNI_PATH: unwind is installed into its first directory.
type Target struct{ Runtime, ConfDir, BinDir, File string }

// binDirs returns the given plugin directories.
func (p Target) binDirs() (dirs []string, err error) {
	for _, dir := range filepath.SplitList(p.BinDir) {
		dir, dirErr := absolute(dir)
		err = errors.Join(err, dirErr)
		if dir != "" {
			dirs = append(dirs, dir)
		}
	}
	if p.BinDir != "" && dirs == nil {
		err = term.Usage("--cni-bin-dir %q: contains no directory", p.BinDir)
	}
	return dirs, err
}

// Find returns the selected runtime, with the given directories.
func (p Target) Find(ctx context.Context, root string) (node.Runtime, error) {
	return p.choose(func() ([]node.Runtime, error) { return node.Find(ctx, root) })
}

// askWithin limits how long unwindctl off and uninstall wait for a runtime that does not respond.
const askWithin = 500 * time.Millisecond

// FindInstalled is Find for the commands on, off and uninstall. It queries no runtime if the flags
// set both directories, or if the usual directories contain unwind. Otherwise, it calls Find; the
// parameter within is the timeout.
func (p Target) FindInstalled(
	ctx context.Context, root string, within time.Duration,
) (node.Runtime, error) {
	r, err := p.choose(func() ([]node.Runtime, error) { return node.Read(root) })
	if err == nil {
		s := Setup{ConfDir: r.ConfDir, BinDir: r.BinDirs[0], File: p.OwnFile(r)}
		if p.given() || s.own() != nil && durable.Exists(s.plugin()) {
			return r, nil
		}
	}
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	return p.Find(ctx, root)
}

func (p Target) choose(runtimes func() ([]node.Runtime, error)) (node.Runtime, error) {
	if p.File != "" && (filepath.Base(p.File) != p.File ||
		!slices.Contains(forms, filepath.Ext(p.File))) {
		return node.Runtime{}, term.Usage("--unwind-file %q: must be the name of a .json or "+
			".conflist file, without a directory", p.File)
	}
	confDir, confErr := absolute(p.ConfDir)
	binDirs, binErr := p.binDirs()
	if err := errors.Join(confErr, binErr); err != nil {
		return node.Runtime{}, err
	}
	r := node.Runtime{MaxConfs: 1, Kubelet: node.InPod()}
	found, err := runtimes()
	uses := func(r node.Runtime) bool { return isAt(r.ConfDir, confDir) }
	at := slices.IndexFunc(found, // preferably a runtime that searches binDirs, too
		func(r node.Runtime) bool { return uses(r) && len(unused(r, "", binDirs)) == 0 })
	if at < 0 {
		at = slices.IndexFunc(found, uses)
	}
	switch {
	case p.given() && at >= 0: // the runtime of that directory, without its problems
		r = found[at]
		r.Problems = nil
		r.Check()
	case p.given():
	case err != nil:
		return node.Runtime{}, err
	default:
		if p.Runtime == "" {
			found = p.installedFor(found)
		}
		if r, err = node.Choose(found, p.Runtime); err != nil {
			return r, err
		}
	}
	// a node's operator may set both directories for nerdctl, podman or Nomad
	ofKubelet := reported(r) && (!p.given() || node.InPod())
	if ofKubelet {
		r.Problems = append(r.Problems, unused(r, confDir, binDirs)...)
		r.Searched = r.BinDirs
	}
	r.ConfDir = cmp.Or(confDir, r.ConfDir)
	installed := slices.IndexFunc(r.BinDirs, func(dir string) bool {
		return durable.Exists(Setup{BinDir: dir}.plugin())
	})
	if installed > 0 { // for example because the first directory is read-only
		dir := r.BinDirs[installed]
		r.BinDirs = slices.Insert(slices.Delete(slices.Clone(r.BinDirs), installed, installed+1), 0, dir)
	}
	r.BinDirs = append(slices.Clone(binDirs), slices.DeleteFunc(slices.Clone(r.BinDirs),
		func(dir string) bool { return slices.Contains(binDirs, dir) })...)
	if !ofKubelet && (!r.Silent() || binDirs != nil) {
		r.Searched = r.BinDirs
	}
	return r, nil
}

// isAt reports whether two paths are equal, or lead to the same file or directory through links.
func isAt(dir, given string) bool { return dir == given || same(dir, given) }

// reported reports whether a kubelet's pods probably use a runtime's directories. A containerd
// without a kubelet reports directories too, but nerdctl may use others.
func reported(r node.Runtime) bool { return r.Kubelet && r.Known() }

// unused returns a problem for each given directory that the kubelet's runtime does not use.
func unused(r node.Runtime, confDir string, binDirs []string) (problems []string) {
	if !reported(r) {
		return nil
	}
	if confDir != "" && !isAt(r.ConfDir, confDir) {
		problems = append(problems, fmt.Sprintf("--conf-dir is %s, but %s reads conflists from %s, so "+
			"pods would bypass unwind; correct or omit --conf-dir (chart value paths.confDir)", confDir,
			r.Name, r.ConfDir))
	}
	for _, binDir := range binDirs {
		is := func(dir string) bool { return isAt(dir, binDir) }
		if !slices.ContainsFunc(r.BinDirs, is) {
			problems = append(problems, fmt.Sprintf("--cni-bin-dir is %s, but %s searches %s for plugins, "+
				"so no pod could start; correct or omit --cni-bin-dir (chart value paths.binDir)", binDir,
				r.Name, strings.Join(r.BinDirs, ", ")))
		}
	}
	return problems
}

// installedFor returns the runtimes whose conflist directory contains unwind's conflist, in use or
// switched off. If there is none, it returns all runtimes. So a second runtime that is installed
// later doesn't make the choice unclear.
func (p Target) installedFor(found []node.Runtime) []node.Runtime {
	with := slices.DeleteFunc(slices.Clone(found), func(r node.Runtime) bool {
		return Setup{ConfDir: r.ConfDir, File: p.OwnFile(r)}.own() == nil
	})
	if len(with) == 0 {
		return found
	}
	return with
}

func absolute(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	return filepath.Abs(path)
}

// given reports whether the flags set both directories, so that no runtime has to be found.
func (p Target) given() bool { return p.ConfDir != "" && p.BinDir != "" && p.Runtime == "" }

// byName reports whether a given conflist directory is probably that of nerdctl, podman or Nomad.
// These programs choose networks by name.
func (p Target) byName(r node.Runtime) bool {
	return p.ConfDir != "" && p.Runtime == "" && r.OnlyByName()
}

func (p Target) Origin(r node.Runtime) string {
	switch {
	case p.given():
		return "Using the specified directories."
	case r.Name == "":
		return fmt.Sprintf("No runtime configuration found: using the common defaults %s and %s.",
			r.ConfDir, strings.Join(r.BinDirs, ", "))
	case r.Config == "":
		return fmt.Sprintf("The runtime is %s: using its usual directories.", r.Name)
	}
	return fmt.Sprintf("The runtime is %s, according to %s.", r.Name, r.Config)
}
