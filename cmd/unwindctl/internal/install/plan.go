package install

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/utils"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/plugin/netconf"
)

// RefusedBy returns an error if unwind must not be installed with the runtime's configuration.
func (p *Plan) RefusedBy(r node.Runtime) error {
	problems := slices.Clone(r.Problems)
	if problem := r.Skips(p.Source); problem != "" {
		problems = append(problems, problem)
	}
	if len(problems) == 0 {
		return nil
	}
	return term.WithHint("nothing was changed", "%s", strings.Join(problems, "\n"))
}

// refuseMissing returns an error if plugins of the chain are missing, because every ADD would fail.
func (p *Plan) refuseMissing(dirs []string) error {
	missing := p.chain.Missing(strings.Join(dirs, ":"))
	if len(missing) == 0 {
		return nil
	}
	return term.WithHint("install again once the network's provider has installed them; if they "+
		"are in another directory, set --cni-bin-dir",
		"plugins of the chain are missing from %s: %s; nothing was changed, because no pod would start",
		strings.Join(dirs, ", "), strings.Join(missing, ", "))
}

// Plan computes unwind's conflist from the current files. It writes nothing.
func (s Setup) Plan() (*Plan, error) {
	p := &Plan{path: s.Path()}
	if problem := durable.NotDirectory(s.ConfDir); problem != "" {
		return nil, NewObstacle(NoProvider,
			"install the CNI provider first, or set --conf-dir to the runtime's directory",
			"conflist directory %s: %s", s.ConfDir, problem)
	}
	old, err := s.readOwn(p)
	if err != nil {
		return nil, err
	}
	if err := s.checkDirectory(p); err != nil {
		return nil, err
	}
	if err := s.readSource(p); err != nil {
		return nil, err
	}
	if old != nil && old.Name != "" && old.Name != p.Source.Name {
		p.warnings = append(p.warnings, fmt.Sprintf("%s was for the network %s of %s, and is now for %s "+
			"of %s; to choose another network, set --provider-conf", p.path, old.Name, old.Unwind.ChainFile,
			p.Source.Name, p.Source.Path))
	}
	if p.repairs, err = s.repairs(); err != nil {
		return nil, err
	}
	p.content, err = s.content(p, old)
	if err != nil {
		return nil, err
	}
	p.changed = old == nil || old.Path != p.path || !sameJSON(old.Data, p.content)
	return p, nil
}

// Repairs describes each change to another program's file, and each removal of a copy of unwind's
// conflist.
func (p *Plan) Repairs() (texts []string) {
	for _, one := range p.repairs {
		texts = append(texts, one.What)
	}
	return texts
}

// readOwn reads unwind's conflist, even if unwindctl off or cilium has renamed it. It returns nil
// if the file is missing or Broken, and an error if unwindctl did not write it.
func (s Setup) readOwn(p *Plan) (*netconf.Conflist, error) {
	path, hint := p.path, "correct it; to switch unwind off immediately, run rm "+p.path
	err := fs.ErrNotExist
	for _, path = range s.paths() {
		if _, err = os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	if path != p.path {
		hint = "correct it, or remove it"
	}
	c, err := netconf.ReadConflist(path)
	switch {
	case Broken(path):
		p.warnings = append(p.warnings, path+" was not valid JSON, for example after a power loss, and "+
			"is written again: keys that you added to it are lost, and so is stateDir unless --state-dir "+
			"sets it")
		return nil, nil
	case !ours(c):
		return nil, term.WithHint("rename it, or choose another name with --unwind-file",
			"%s was not written by unwindctl, so unwindctl does not change it", path)
	case err != nil:
		return nil, term.WithHint(hint, "%s: %w", path, err)
	}
	return c, nil
}

// ours reports whether unwindctl wrote a file: its first plugin is unwind, which names another file
// as its chain. Other programs may have added plugins after unwind.
func ours(c *netconf.Conflist) bool {
	return c != nil && len(c.Types) > 0 && c.Types[0] == netconf.Name && c.Unwind != nil &&
		c.Unwind.ChainFile != "" && !namesItself(c)
}

// Wrapped reports whether a conflist contains unwind's chain, as unwindctl wrap writes it.
func Wrapped(c *netconf.Conflist) bool {
	return c != nil && c.Unwind != nil && c.Unwind.Chain != nil
}

// namesItself reports whether a file is its own chain. This happens if another program replaces the
// provider's file with a copy of unwind's conflist.
func namesItself(c *netconf.Conflist) bool { return same(c.Path, c.Unwind.ChainFile) }

// Broken reports whether a file has a name like unwind's conflist, but is not valid JSON, for
// example after a power loss. No runtime can use such a file.
func Broken(path string) bool {
	data, err := netconf.ReadFile(path)
	return err == nil && !json.Valid(data) && strings.Contains(filepath.Base(path), netconf.Name) &&
		slices.Contains(forms, filepath.Ext(strings.TrimSuffix(path, node.OffSuffix)))
}

// isCopy reports whether another program has copied unwind's conflist to path: the file has the
// same network and chain.
func (s Setup) isCopy(path string) bool {
	own, _ := netconf.ReadConflist(s.Path())
	c, _ := netconf.ReadConflist(path)
	return path != s.Path() && ours(own) && ours(c) && len(c.Types) == 1 && c.Name == own.Name &&
		c.Unwind.ChainFile == own.Unwind.ChainFile
}

// checkDirectory returns an error if the runtime would not use unwind's conflist, or if another
// file already runs unwind for the same network.
func (s Setup) checkDirectory(p *Plan) error {
	paths, err := netconf.Conflists(s.ConfDir)
	if err != nil {
		return err
	}
	provider, _ := netconf.ReadConflist(cmp.Or(s.Source, s.firstOther()))
	for _, path := range paths {
		if path == p.path || s.isCopy(path) {
			continue
		}
		c, _ := netconf.ReadConflist(path)
		another := Wrapped(c) && provider != nil && c.Name != provider.Name
		if c != nil && c.Unwind != nil && !another && (stem(path) == stem(p.path) || !madeFromOurs(c)) {
			if ours(c) {
				return term.WithHint("first run unwindctl uninstall --unwind-file "+filepath.Base(path),
					"unwind is already installed, with the conflist %s", path)
			}
			return term.WithHint(takeOutHint(c), "%s already runs unwind", path)
		}
		if filepath.Base(path) < filepath.Base(p.path) {
			return term.WithHint("use an --unwind-file that sorts before it, such as +unwind"+
				filepath.Ext(p.path)+" or, next to Multus, "+besideMultus,
				"%s would not sort first: the runtime would still use %s", filepath.Base(p.path), path)
		}
	}
	return nil
}

// besideMultus is a name that sorts before Multus's files, 00-multus.conf and 00-multus.conflist.
// Multus uses the first other .conf or .conflist for the cluster network, and ignores .json files
// (multus 4.3.0 cmd/thin_entrypoint/main.go getMasterConfigPath, pkg/server/config/generator.go
// findMasterPlugin). If Multus used unwind's conflist, it would call itself through unwind.
const besideMultus = "00-multus-unwind.json"

// firstOther returns the first conflist in the directory that is neither unwind's conflist nor a
// copy of it, or "" if there is none.
func (s Setup) firstOther() string {
	paths, _ := netconf.Conflists(s.ConfDir)
	for _, path := range paths {
		if path != s.Path() && !s.isCopy(path) {
			return path
		}
	}
	return ""
}

// Without returns the file that the runtime would use without unwind. It returns "" if there is
// none, or if CRI-O's configuration selects a network by name.
func (s Setup) Without(r node.Runtime) string {
	if r.DefaultNetwork != "" {
		return ""
	}
	return s.firstOther()
}

// elsewhere reports whether somebody chose a chainFile outside ConfDir on purpose. If the file is
// beside a conflist of unwind, and has a valid namesake in ConfDir, nobody did: the runtime's
// directory was changed, and its files were copied. The provider updates only the new file.
func (s Setup) elsewhere(chainFile string) bool {
	dir, name := filepath.Split(chainFile)
	before := Setup{ConfDir: filepath.Clean(dir), File: s.File}
	_, err := netconf.ReadConflist(filepath.Join(s.ConfDir, name))
	return !isAt(s.ConfDir, before.ConfDir) && (err != nil || len(before.own()) == 0)
}

// Provider returns the provider's file that unwind's conflist names. It returns "" if that file
// exists, but is not the file that the runtime would use without unwind. If the file is elsewhere,
// or containers may select its network by name, somebody chose it on purpose. So Provider returns
// it.
func (s Setup) Provider(r node.Runtime) string {
	named := s.Entry().ChainFile
	first := s.Without(r)
	if first == "" || isAt(first, named) || !durable.Exists(named) || s.elsewhere(named) {
		return named
	}
	taken, _ := netconf.ReadConflist(first)
	chain, _ := netconf.ReadConflist(named)
	if byName(r, taken, chain) {
		return named
	}
	return ""
}

// byName reports whether two conflists are for different networks, and containers may select one of
// them by its name. Either conflist may be nil.
func byName(r node.Runtime, one, other *netconf.Conflist) bool {
	return r.ByName() && one != nil && other != nil && one.Name != other.Name
}

// PassesOver returns an error if chainFile is not the file that the runtime would use without
// unwind. The error names the plugins that pods would lack. PassesOver accepts a chain from
// elsewhere, because it was chosen on purpose. It returns sure = false if the chain may have been
// chosen on purpose, because containers may select its network by name.
func (s Setup) PassesOver(r node.Runtime, chainFile string) (sure bool, err error) {
	first := s.Without(r)
	taken, _ := netconf.ReadConflist(first)
	chain, _ := netconf.ReadConflist(chainFile)
	if isAt(first, chainFile) || s.elsewhere(chainFile) || taken == nil || chain == nil {
		return true, nil
	}
	hint := "to use the file that the runtime would use, run unwindctl install (or the agent) " +
		"without --provider-conf"
	if byName(r, taken, chain) {
		return false, term.WithHint("if containers select their networks by name, as with nerdctl, "+
			"podman and Nomad, nothing is wrong; otherwise, "+hint, "unwind runs the network %s of %s; "+
			"without unwind, a CRI runtime would use %s of %s", chain.Name, chainFile, taken.Name, first)
	}
	lacking := slices.DeleteFunc(slices.Clone(taken.Types), func(plugin string) bool {
		return plugin == netconf.Name || slices.Contains(chain.Types, plugin)
	})
	err = fmt.Errorf("without unwind the runtime would use %s, but unwind's chain is %s", first,
		chainFile)
	if len(lacking) > 0 {
		err = fmt.Errorf("pods start without %s: %w", strings.Join(lacking, ", "), err)
	}
	return true, term.WithHint(hint, "%w", err)
}

// readSource reads the provider's conflist, and parses its chain as unwind would.
func (s Setup) readSource(p *Plan) error {
	path := s.Source
	if path == "" {
		if path = s.firstOther(); path == "" {
			return NewObstacle(NoProvider, "run unwindctl install again once the network's provider has "+
				"written one", "no provider's conflist in %s", s.ConfDir)
		}
	}
	path, err := filepath.Abs(path)
	if err != nil {
		return err
	}
	const half = "try again if the provider is still writing the file; otherwise correct the file, " +
		"because the runtime cannot use it either"
	p.Source, err = s.readOther(path)
	if errors.Is(err, fs.ErrNotExist) {
		return NewObstacle(NoProvider, "correct --provider-conf, or install the network's provider, "+
			"which writes that file", "%s: %w", path, err)
	}
	if err != nil && (p.Source == nil || p.Source.Unwind == nil) {
		return term.WithHint(half, "%s: %w", path, err)
	}
	switch {
	case Wrapped(p.Source):
		return term.WithHint(takeOutHint(p.Source)+", or set --provider-conf to another network's "+
			"conflist", "%s already runs unwind", path)
	case path == p.path || p.Source.Unwind != nil || names(p.Source.Data, p.path):
		return term.WithHint("set --provider-conf to the conflist of the network's provider",
			"%s already runs unwind",
			path)
	case managed(p.Source.Data) != nil:
		return term.WithHint("set --provider-conf to another conflist", "%s: %w", path,
			managed(p.Source.Data))
	case p.Source.Name == "":
		return term.WithHint(half, "%s: key \"name\" is missing", path)
	case utils.ValidateNetworkName(p.Source.Name) != nil:
		return term.WithHint(half, "%s: key \"name\": %q is not a valid network name", path,
			p.Source.Name)
	}
	conf := netconf.Conf{Name: p.Source.Name, ChainFile: p.Source.Path}
	if p.chain, err = conf.ParseChain(p.Source.Data, ""); err != nil {
		return term.WithHint("correct the file, or set --provider-conf to another conflist; nothing was "+
			"changed", "chainFile %s: %w", path, err)
	}
	return p.checkProviders()
}

// checkProviders warns about cilium, which renames other conflists (cilium 1.19.6, 1.20.2
// daemon/cmd/cni/config.go). It returns an error if Multus could use unwind's conflist as the
// cluster network, and so call itself forever (see besideMultus).
func (p *Plan) checkProviders() error {
	for _, d := range p.chain.Delegates {
		switch {
		case d.Type == "cilium-cni":
			p.warnings = append(p.warnings, "cilium renames all other conflists in the directory, "+
				"including unwind's, unless it is installed with cni.exclusive=false")
		case strings.HasPrefix(d.Type, "multus") && filepath.Ext(p.path) != ".json":
			return term.WithHint("use --unwind-file "+besideMultus+", a name that Multus ignores",
				"Multus may use %s as the cluster network. Multus would then call itself, and no pod "+
					"could start",
				filepath.Base(p.path))
		}
	}
	return nil
}
