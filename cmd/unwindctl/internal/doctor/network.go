package doctor

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/version"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/netconf"
)

// runtime returns the container runtime, with the default directories if its own are unknown.
func (e *examination) runtime(ctx context.Context) (node.Runtime, error) {
	r, err := e.Target.Find(ctx, "/")
	var wrong term.UsageError
	if errors.As(err, &wrong) {
		return r, err
	}
	if err != nil {
		e.add("runtime", Warning, cmp.Or(term.HintOf(err),
			"correct the runtime's configuration, or set --conf-dir and --cni-bin-dir"), "%v", err)
	}
	r.ConfDir = cmp.Or(r.ConfDir, node.DefaultConfDir)
	if len(r.BinDirs) == 0 {
		r.BinDirs = []string{node.DefaultBinDir}
	}
	for _, p := range r.Problems {
		problem, remedy, _ := strings.Cut(p, "; ")
		e.add("runtime", Failure, remedy, "%s", problem)
	}
	for _, n := range r.Notes {
		e.add("runtime", Warning, "", "%s", n)
	}
	if err == nil {
		severity := OK
		if r.Name == "" && e.Target.ConfDir == "" { // the directories are a guess
			severity = Warning
		}
		e.add("runtime", severity, r.SweepAdvice(ctx),
			"%s Conflists: %s; plugins: %s.", e.Target.Origin(r), r.ConfDir, strings.Join(r.BinDirs, ", "))
	}
	return r, nil
}

// network examines the conflist that the runtime uses. It returns unwind's entry and chain, each
// nil if it is unusable.
func (e *examination) network(ctx context.Context, r node.Runtime) (*netconf.Conf, *netconf.Chain) {
	own := install.Setup{ConfDir: r.ConfDir, File: e.OwnFile(r)}
	obstacle := own.Obstacle(e.StateDir)
	if obstacle != nil && obstacle.Reason == install.Off && durable.Exists(own.Path()) {
		obstacle = install.NewObstacle(install.Off,
			"run unwindctl off to stop using that file, or unwindctl on to keep using it",
			"%v, but the runtime still uses %s", obstacle, own.Path())
	}
	if obstacle != nil {
		severity := Failure
		if obstacle.Reason.Ready() {
			severity = Warning
		}
		e.add("network", severity, inspect.HintFor(obstacle), "%v", obstacle)
	}
	paths, err := netconf.Conflists(r.ConfDir)
	if err != nil || len(paths) == 0 {
		text := ""
		if err != nil {
			text = ": " + err.Error()
		} else if !durable.Exists(r.ConfDir) {
			text = ": no such directory"
		}
		e.add("network", Failure, "install the network's provider, then run unwindctl install; or set "+
			"--conf-dir to the runtime's directory", "no conflist in %s%s", r.ConfDir, text)
		return nil, nil
	}
	e.writable("network", r.ConfDir)
	var ours *netconf.Conflist
	for i, path := range paths {
		e.writable("network", path)
		c, err := netconf.ReadConflist(path)
		if c != nil && c.Unwind == nil && i == 0 {
			_, _, err = c.Chain()
		}
		switch {
		case install.Broken(path):
			remedy := "run unwindctl install, which writes it again"
			if i == 0 {
				remedy += "; until then, no pod can start"
			}
			e.add("network", Failure, remedy, "%s: %v", path, err)
		case (c == nil || c.Unwind == nil && err != nil) && i == 0:
			e.add("network", Failure, "correct it, because the runtime uses the directory's first file",
				"%s: %v", path, err)
		case c == nil, c.Unwind == nil && (i > 0 || obstacle != nil):
		case c.Unwind == nil:
			e.add("network", Warning,
				"run unwindctl install; if that file still sorts first, set an --unwind-file that sorts "+
					"before it",
				"%s sorts first and does not run unwind, so unwind is not in use", path)
		case err != nil:
			e.add("network", Failure, "correct that key", "%s: %v", path, err)
		case ours != nil && install.Wrapped(c) && c.Name != ours.Name:
			e.add("network", OK, "", "%s: unwind also runs the network %s", path, c.Name)
		case ours != nil:
			e.add("network", Warning,
				"run unwindctl install to remove unwind from the unused file",
				"%s contains unwind, but the runtime uses %s", path, ours.Path)
		default:
			ours = c
		}
	}
	if ours == nil {
		return nil, nil
	}
	if problem, remedy, _ := strings.Cut(r.Skips(ours), "; "); problem != "" {
		e.add("runtime", Failure, remedy, "%s", problem)
	}
	e.used = ours
	copied := ours.Path != own.Path()
	own.File = filepath.Base(ours.Path)
	if sure, err := own.PassesOver(r, ours.Unwind.ChainFile); err != nil {
		severity := Failure
		if !sure {
			severity = Warning
		}
		e.add("network", severity, inspect.HintFor(err), "%v", err)
	}
	return ours.Unwind, e.entry(ctx, r, ours, copied)
}

// entry examines unwind's conflist or a copy of it. It returns the chain, or nil if the chain is
// unusable.
func (e *examination) entry(
	ctx context.Context, r node.Runtime, c *netconf.Conflist, copied bool,
) *netconf.Chain {
	for _, w := range c.Unwind.Warnings {
		e.add("configuration", Warning, "remove it from "+c.Path, "%s", w)
	}
	if len(c.Types) > 1 {
		remedy := "run unwindctl wrap --in-place " + c.Path + ", which moves them to the end of the chain"
		if c.Unwind.ChainFile != "" && copied {
			remedy = "run unwindctl install, which replaces unwind in that file with the plugins of " +
				"its chain"
		} else if c.Unwind.ChainFile != "" {
			remedy = "unwindctl install moves them to the end of " + c.Unwind.ChainFile +
				"; a service mesh does not edit a --unwind-file that ends in .json"
		}
		problem := "runs plugins outside unwind's chain, so unwind cannot roll them back"
		if filepath.Ext(c.Path) != ".conflist" {
			problem = "contains plugins outside unwind's chain, and the runtime does not run them"
		}
		others := slices.Clone(c.Types)
		others = slices.DeleteFunc(others, func(t string) bool { return t == netconf.Name })
		e.add("configuration", Failure, remedy, "%s %s: %s", c.Path, problem, strings.Join(others, ", "))
	}
	var list struct {
		CNIVersions []string     `json:"cniVersions"`
		OnlyInlined netconf.Flag `json:"loadOnlyInlinedPlugins"`
		DisableGC   netconf.Flag `json:"disableGC"`
	}
	_ = json.Unmarshal(c.Data, &list)
	isList, offered := filepath.Ext(c.Path) == ".conflist", c.CNIVersion
	if slices.Contains(list.CNIVersions, "1.1.0") {
		offered = "1.1.0"
	}
	switch newest := r.CNIVersion(ctx); {
	case newest == "1.0.0" && c.CNIVersion == "1.1.0":
		e.add("configuration", Failure, "run unwindctl install",
			"%s has cniVersion 1.1.0, which this runtime does not support: no pod can start", c.Path)
	case isList && offered != "1.1.0" && !r.OnlyByName():
		e.add("configuration", Warning, `add "cniVersions": ["1.0.0", "1.1.0"] to it`,
			"%s does not offer cniVersion 1.1.0, so no runtime calls STATUS or GC", c.Path)
	case !isList && newest != "1.0.0" && c.CNIVersion != "1.1.0":
		e.add("configuration", Warning, "run unwindctl install while the runtime is running",
			"%s has cniVersion %s, so the runtime calls neither STATUS nor GC", c.Path, c.CNIVersion)
	}
	if directory := filepath.Join(r.ConfDir, c.Name); isList && !bool(list.OnlyInlined) &&
		durable.Exists(directory) {
		e.add("configuration", Failure, `add "loadOnlyInlinedPlugins": true to `+c.Path,
			"libcni runs the plugins in %s after unwind, so unwind cannot roll them back", directory)
	}
	chain, err := c.Unwind.LoadChain()
	if err != nil {
		remedy := "correct it; until then, no pod can start"
		if errors.Is(err, fs.ErrNotExist) {
			remedy = "restart the provider to write that file again, or run unwindctl off; until then, no " +
				"pod can start"
		}
		e.add("configuration", Failure, remedy, "%s: %v", c.Path, err)
		return nil
	}
	if chain.Warning != "" {
		e.add("configuration", Warning, "run unwindctl install", "%s", chain.Warning)
	}
	if lost := chain.LostCapabilities(c.Unwind); len(lost) > 0 {
		e.add("configuration", Warning,
			"run unwindctl install, or add them to the entry's \"capabilities\"",
			"plugins need the capabilities %s, which unwind's entry in %s does not declare, so the "+
				"runtime drops them", strings.Join(lost, ", "), c.Path)
	}
	switch {
	case isList && bool(list.DisableGC):
		e.add("configuration", OK, "", "disableGC is set: the runtime's GC releases nothing")
	case chain.DisableGC && isList:
		e.add("configuration", Warning, "run unwindctl install", "the chain sets disableGC, but %s does "+
			"not, so the runtime's GC deletes attachments that it does not list", c.Path)
	case chain.DisableGC:
		e.add("configuration", Warning, "install with an --unwind-file that ends in .conflist",
			"the chain sets disableGC, which runtimes ignore in a .json file: the runtime's GC deletes "+
				"attachments that it does not list")
	case c.Unwind.DisableGC:
		e.add("configuration", OK, "", "disableGC is set in unwind's entry: unwind does nothing on GC")
	}
	switch e.observe = c.Unwind.Observes(); {
	case e.observe:
		e.add("configuration", OK, "", "unwind only observes (--observe): it undoes failed ADDs, but "+
			"STATUS, GC and the agent release nothing; unwindctl sweep does")
	case !c.Unwind.SweepOnStatus:
		e.add("configuration", Warning,
			"remove sweepOnStatus from unwind's entry, or run unwindctl sweep from a timer",
			"sweepOnStatus is false: STATUS releases nothing")
	}
	if grace := c.Unwind.GracePeriod; grace < time.Minute {
		e.add("configuration", Warning, "set gracePeriod to at least 1m", "%s: gracePeriod is %s: GC "+
			"may release a pod that has just started and is not on the runtime's list yet", c.Path, grace)
	}
	if limit := c.Unwind.DelegateTimeout; limit > 0 && limit < time.Second {
		e.add("configuration", Warning, "raise or remove delegateTimeout", "%s: delegateTimeout is %s: "+
			"unwind kills plugins after that time, so ADDs may fail", c.Path, limit)
	}
	newer, _ := version.GreaterThanOrEqualTo(chain.CNIVersion, "0.3.0")
	var types []string
	for _, p := range chain.Delegates {
		types = append(types, p.Type)
		if known.ByType(p.Type).DefaultIPAM != "" && !newer { // flannel's manifest once set no cniVersion
			e.add("configuration", Warning,
				fmt.Sprintf("set a newer cniVersion in the source of %[1]s's conflist: see "+
					"scripts/providers/%[1]s.md", p.Type),
				"%s's conflist has cniVersion %s, in which results contain no interfaces", p.Type,
				term.OrDash(chain.CNIVersion))
		}
	}
	verbs := ""
	if offered == "1.1.0" && chain.CNIVersion != offered {
		verbs = ", so unwind does not pass STATUS and GC on to the plugins"
	}
	e.add("configuration", OK, "", "%s: network %s, cniVersion %s; plugins %s, cniVersion %s%s",
		c.Path, c.Name, offered, strings.Join(types, " → "), term.OrDash(chain.CNIVersion), verbs)
	return chain
}

// writable warns of a file or directory that other users can write to.
func (e *examination) writable(what, path string) {
	if info, err := os.Stat(path); err == nil && info.Mode().Perm()&0o022 != 0 {
		e.add(what, Warning, "chmod go-w "+path, "%s is writable by other users", path)
	}
}

// plugins checks that every plugin of the chain exists and supports the chain's cniVersion.
func (e *examination) plugins(ctx context.Context, r node.Runtime, chain *netconf.Chain) {
	asked, dirs := map[string]bool{}, strings.Join(r.BinDirs, ", ")
	ask := func(name, spoken string) {
		if name == "" || asked[name] {
			return
		}
		asked[name] = true
		path, err := netconf.FindPlugin(name, e.binPath)
		if err != nil {
			remedy := "install it; without it no pod can start"
			if name == netconf.Name {
				remedy = install.PluginRemedy(e.used, r.BinDirs[0]) + "; until then, no pod can start"
			}
			e.add("plugins", Failure, remedy, "%s not found in %s", name, dirs)
			return
		}
		e.writable("plugins", path)
		versions, err := install.SupportedVersions(ctx, path)
		switch {
		case err != nil && install.NoExec(filepath.Dir(path)):
			e.add("plugins", Failure, "remount "+filepath.Dir(path)+" without noexec", "%s: %v", path, err)
		case err != nil:
			e.add("plugins", Failure, "reinstall it", "%s: %v", path, err)
		case !slices.Contains(versions, spoken):
			e.add("plugins", Failure,
				"install a release that supports it, or lower the chain's cniVersion",
				"%s does not support the chain's cniVersion %s, only %s",
				path, spoken, strings.Join(versions, ", "))
		case name == netconf.Name && e.plugin != e.Version:
			remedy := "run the unwindctl install of the release that you want (which -a unwindctl lists " +
				"the copies on this node)"
			if e.agent != "" {
				remedy = fmt.Sprintf("upgrade the agent (process %s), which installs its own version of the "+
					"plugin; if it is new already, its log explains why it has not", e.agent)
			}
			e.add("plugins", Warning, remedy,
				"%s is from a different release (%s) than this unwindctl (%s)", path, term.OrDash(e.plugin),
				e.Version)
		default:
			e.add("plugins", OK, "", "%s supports %s", path, spoken)
		}
	}
	ask(netconf.Name, "1.0.0")
	version := cmp.Or(chain.CNIVersion, "0.1.0") // for a plugin, no cniVersion means 0.1.0
	for _, p := range chain.Delegates {
		ask(p.Type, version)
		_, err := netconf.FindPlugin(p.IPAM, e.binPath)
		if p.IPAM != "" && !p.ExecutesIPAM() && err != nil {
			e.add("plugins", OK, "", "%s has ipam.type %s, but %s contains no such plugin: presumably, "+
				"it assigns addresses itself", p.Type, p.IPAM, dirs)
			continue
		}
		ask(p.IPAM, version)
	}
}
