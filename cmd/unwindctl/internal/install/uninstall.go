package install

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/journal"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/sweep"
)

// The exit codes after unwind was taken out of use: ExitUnrecorded if the off switch could not be
// written, ExitKept if files were kept because something still needs them.
const (
	ExitUnrecorded = 5
	ExitKept       = 6
)

// Uninstall switches unwind off. Without OffOnly, it also removes the installed files that nothing
// needs. It waits for the runtimes for at most askWithin.
//
//  1. Take unwind out of other programs' files. If that fails, continue.
//  2. Rename unwind's conflist: from then on, pods start without unwind. If the disk has no room
//     for the new name, remove the conflist. If that fails, stop.
//  3. Write the off switch, so that no agent installs unwind again. If that fails, a running agent
//     treats the removal as the off switch, but an agent that starts later installs unwind.
//  4. Remove the files that nothing needs. If some are still needed, keep them and return an error.
//     Keep the renamed conflist until nothing else is kept, because it names the state directory.
//  5. Report the file that the runtime loads next. If there is none, or it runs unwind, return an
//     error.
func Uninstall(ctx context.Context, out io.Writer, o Options) error {
	r, err := o.FindInstalled(ctx, "/", askWithin)
	if err != nil {
		return err
	}
	s := Setup{ConfDir: r.ConfDir, BinDir: r.BinDirs[0], File: o.OwnFile(r)}
	own := s.own()
	if c, _ := netconf.ReadConflist(s.renamed()); c != nil {
		own = append(own, c)
	}
	strict := o.StateDirFlag || !o.OffOnly
	if o.StateDir, err = s.usedStateDir(own, o.StateDir, strict); err != nil {
		return err
	}
	s.Source = s.Provider(r)
	u := &uninstall{Options: o, Setup: s, runtime: r, own: own}
	kind := journal.Uninstall
	if o.OffOnly {
		kind = journal.Off
	}
	done := Changes{DryRun: o.DryRun}
	err = done.try(ctx, s.repair)
	if outErr := done.Make(ctx, s.takeOut); outErr != nil {
		return errors.Join(err, outErr, done.print(out, &o.Output))
	}
	steps := []Step{s.takeBack, u.recordOff, u.journal, u.removeUnits, u.removePlugin, u.removeFiles,
		u.next}
	if o.OffOnly {
		steps = []Step{s.takeBack, u.recordOff, u.journal, u.next}
	}
	err = errors.Join(err, done.try(ctx, steps...))
	done.Record(o.StateDir, kind, o.By, err)
	if err == nil && done.Find("kept") != nil {
		err = term.WithHint("once nothing needs them, run unwindctl sweep and unwindctl uninstall again",
			"%w", term.Coded{Code: ExitKept, Text: "unwind is not completely removed from this node " +
				"yet, because the files marked \"kept\" are still needed"})
	}
	return errors.Join(err, done.print(out, &o.Output))
}

// uninstall is one run of Uninstall.
type uninstall struct {
	Options
	Setup       Setup
	runtime     node.Runtime
	own         []*netconf.Conflist  // unwind's conflists when uninstall began, in use or not
	attachments []inspect.Attachment // in the journal, once unwind's conflist is out of use
	unread      error                // why the journal cannot be read
	needed      string               // why files must stay, "" if nothing needs them
}

// recordOff is the step that writes the off switch after unwind's conflist was taken out of use.
func (u *uninstall) recordOff(context.Context) ([]*Change, error) {
	was, verb, text := ReadOff(u.StateDir), "off", "by "+u.By
	if was != nil {
		text = "already done: " + was.String()
	}
	if !u.OffOnly {
		verb = "uninstall"
	}
	unrecorded := func(err error) error {
		return term.WithHint("run unwindctl "+verb+" again once the state directory is writable", "%w",
			term.Coded{Code: ExitUnrecorded, Text: "pods start without unwind, but the next agent that " +
				"starts will install it again: " + err.Error()})
	}
	if err := durable.CannotCreate(u.StateDir); u.DryRun && was == nil && err != nil {
		return nil, unrecorded(fmt.Errorf("cannot record that unwind is switched off: %w", err))
	}
	return []*Change{{Change: "off", What: text, again: was != nil, apply: func(done *Change) error {
		if err := WriteOff(u.StateDir, u.By); err != nil {
			return unrecorded(err)
		}
		done.What = ReadOff(u.StateDir).String() + "; unwindctl on switches it on again"
		if !u.OffOnly {
			done.What = "no agent installs unwind while " + filepath.Join(u.StateDir, OffName) + " exists"
		}
		return nil
	}}}, nil
}

// journal is the step that reports a journal with attachments. uninstall then keeps the programs
// that can release these. If the step runs for "unwindctl off", an unreadable journal is an error.
func (u *uninstall) journal(ctx context.Context) ([]*Change, error) {
	r, err := inspect.Sweep(ctx, inspect.Plugin(io.Discard), nil, inspect.Scope{CRI: "none",
		Directories: node.Directories{ConfDir: u.Setup.ConfDir, StateDir: u.StateDir}},
		sweep.Options{DryRun: true})
	if err != nil {
		return nil, err
	}
	u.attachments, u.unread = r.Attachments, r.Err()
	n := len(inspect.Filter(u.attachments, (*inspect.Attachment).Dead))
	kept := &Change{Change: "kept", What: fmt.Sprintf("the journal in %s: %s (%d dead). The "+
		"runtime releases the live ones; unwindctl sweep --state-dir %[1]s releases the rest, with "+
		"--force if the guard keeps them because too many seem dead",
		u.StateDir, term.Attachments(len(u.attachments)), n)}
	switch {
	case u.OffOnly && n > 0:
		return []*Change{{Change: "pending", What: "DELs of " + term.Plural(n, "dead attachment",
			"dead attachments") + "; unwindctl sweep runs them"}}, u.unread
	case u.OffOnly:
		return nil, u.unread
	case u.unread != nil:
		kept.What = fmt.Sprintf("the journal in %s, which cannot be read: %s", u.StateDir,
			term.OneLine(u.unread.Error()))
	case len(u.attachments) == 0:
		return nil, nil
	}
	u.needed = "needed until the journal is empty"
	return []*Change{kept}, nil
}

// next is the step that reports what the runtime loads now.
func (u *uninstall) next(context.Context) ([]*Change, error) {
	network := u.runtime.DefaultNetwork
	if u.runtime.Socket == "" && u.own != nil { // a runtime without CRI selects a network by name
		network = u.own[0].Name
	}
	paths, err := netconf.Conflists(u.Setup.ConfDir)
	for _, path := range paths {
		c, readErr := u.Setup.readOther(path)
		switch {
		case u.DryRun && (u.isOwn(path) || u.Setup.isCopy(path)):
		case c == nil && (network != "" || u.runtime.SkipsInvalid()):
			err = errors.Join(err, fmt.Errorf("%s: %w", path, readErr))
		case network != "" && c.Name != network:
		case c == nil:
			return nil, term.WithHint("correct that file", "the runtime loads %s next, but cannot use it: "+
				"%w", path, readErr)
		case names(c.Data, ""):
			return nil, term.WithHint(takeOutHint(c), "unwind stays in use: the next file that the "+
				"runtime loads, %s, also runs unwind", path)
		default:
			loads := &Change{Change: "next", What: fmt.Sprintf("the runtime loads %s (%s)", path,
				strings.Join(c.Types, " → "))}
			return append(stillOn(paths), loads), nil
		}
	}
	if err != nil {
		return nil, term.WithHint("correct that file", "no pod can start: %w", err)
	}
	of := ""
	if network != "" {
		of = fmt.Sprintf(" for network %q", network)
	}
	return nil, term.WithHint("install the network's provider", "no pod can start: %s contains no "+
		"conflist%s", u.Setup.ConfDir, of)
}

// stillOn reports the conflists that contain unwind's chain: a person has wrapped them, and only a
// person unwraps them.
func stillOn(paths []string) (all []*Change) {
	for _, path := range paths {
		if c, _ := netconf.ReadConflist(path); Wrapped(c) {
			all = append(all, &Change{Change: "still on", What: fmt.Sprintf("unwind, for the network %s in "+
				"%s; to take it out, %s", c.Name, path, takeOutHint(c))})
		}
	}
	return all
}

// takeOutHint returns how to take unwind out of a conflist that this command does not manage.
func takeOutHint(c *netconf.Conflist) string {
	name := strings.TrimSuffix(filepath.Base(c.Path), node.OffSuffix)
	switch {
	case ours(c):
		return "use --conf-dir " + filepath.Dir(c.Path) + " --unwind-file " + name
	case Wrapped(c):
		return "run unwindctl unwrap --in-place " + c.Path
	}
	return "replace that file with the provider's conflist"
}

// usedStateDir returns the given state directory, or else the one in unwind's conflist, or else the
// default. It returns an error if unwind uses a conflist other than s.Path() or, if strict is set,
// a state directory other than the given one.
func (s Setup) usedStateDir(
	own []*netconf.Conflist, given string, strict bool,
) (string, error) {
	if own == nil {
		installed, _ := node.Installed(s.ConfDir)
		at := slices.IndexFunc(installed, func(c *netconf.Conflist) bool { return !madeFromOurs(c) })
		switch {
		case len(installed) == 0 || at >= 0 && installed[at].Path == s.Path():
			return cmp.Or(given, netconf.DefaultStateDir), nil
		case at >= 0:
			return "", term.WithHint(takeOutHint(installed[at]), "nothing was changed: unwind's conflist "+
				"is %s, not %s", installed[at].Path, s.Path())
		}
		own = installed
	}
	used := filepath.Clean(cmp.Or(own[0].Unwind.StateDir, netconf.DefaultStateDir))
	dir, err := absolute(given)
	if err == nil && strict && dir != "" && dir != used && !same(dir, used) {
		err = term.WithHint("use --state-dir "+used,
			"nothing was changed: unwind uses the journal in %s, not in %s", used, dir)
	}
	return cmp.Or(given, used), err
}

// removePlugin is the step that removes the plugin, unless it is or may be in use. If something
// uses a plugin that is missing, unwindctl stays, too: it can take unwind out of a conflist.
func (u *uninstall) removePlugin(ctx context.Context) ([]*Change, error) {
	path := u.Setup.plugin()
	_, missing := os.Lstat(path)
	why, err := u.users()
	kept := remove(path, cmp.Or(why, "it may still be in use"))
	switch {
	case missing == nil && err == nil && why == "":
		return u.keeping(removeProgram(ctx, path, "")), nil
	case missing == nil:
	case u.own != nil && u.runtime.Silent():
		kept.What = fmt.Sprintf("the plugin: it is not in %s, and %s does not report its plugin "+
			"directory; set --cni-bin-dir to that directory", u.Setup.BinDir, u.runtime.Name)
	case why != "":
		kept.What = fmt.Sprintf("the plugin: it is not in %s, but %s", u.Setup.BinDir, why)
	default:
		return nil, nil
	}
	return u.keeping(kept), err
}

// keeping returns a change. If the change keeps a file, later steps keep the other files.
func (u *uninstall) keeping(one *Change) []*Change {
	if one.Change == "kept" {
		u.needed = cmp.Or(u.needed, "needed to run uninstall again")
	}
	return []*Change{one}
}

// users describes what uses the plugin, or returns "" if nothing does. On an error, it is unknown.
func (u *uninstall) users() (string, error) {
	var paths, why []string
	installed, err := node.Installed(u.Setup.ConfDir)
	repairs, _ := u.Setup.repairs() // a dry run has not made these
	for _, c := range installed {
		repaired := slices.ContainsFunc(repairs, func(r *Change) bool { return r.path == c.Path })
		if !isKept(c) && !u.isOwn(c.Path) && !repaired {
			paths = append(paths, c.Path)
		}
	}
	if paths != nil {
		why = append(why, strings.Join(paths, ", "))
	}
	cached, cacheErr := cachedNaming(filepath.Join(u.CacheDir, "results"), u.attachments)
	unowned, running, store := 0, 0, &journal.Store{Dir: u.StateDir}
	for _, a := range u.attachments {
		if u.own == nil { // the attachment may use a conflist in another directory
			unowned++
		}
		if lock, err := store.LookAtLock(a.Key); err != nil || lock.Held {
			running++ // libcni caches the configuration of an ADD when the ADD ends
		}
	}
	for _, of := range []struct {
		n    int
		text string
	}{{cached, "%s in libcni's cache"}, {unowned, "%s in the journal"},
		{running, "a running operation on %s"}} {
		if of.n > 0 {
			why = append(why, fmt.Sprintf(of.text, term.Attachments(of.n)))
		}
	}
	err = errors.Join(err, u.unread, cacheErr)
	if why == nil || err != nil {
		return "", err
	}
	return "used by " + strings.Join(why, " and "), nil
}

// isOwn reports whether unwind's conflist was at a path when uninstall began. In a dry run, the
// conflist is still there, and must not count as a file that needs the plugin.
func (u *uninstall) isOwn(path string) bool {
	return slices.ContainsFunc(u.own, func(c *netconf.Conflist) bool { return c.Path == path })
}

// removeUnits is the step that removes the systemd units once the journal is empty.
func (u *uninstall) removeUnits(ctx context.Context) ([]*Change, error) {
	if u.ProgramDir == "" || u.UnitDir == "" {
		return nil, nil
	}
	return removeUnits(ctx, u.UnitDir, u.needed)
}

// removeFiles is the step that removes the programs, and unwind's conflist under the name that
// unwindctl off or another program gave it. While something needs these files, it keeps them. If it
// keeps one file, it also keeps the next ones, in the order plugin, unwindctl, conflist.
func (u *uninstall) removeFiles(ctx context.Context) (changes []*Change, err error) {
	for _, program := range slices.Backward(programs) {
		if path := filepath.Join(u.ProgramDir, program); u.ProgramDir != "" && durable.Exists(path) {
			changes = append(changes, u.keeping(removeProgram(ctx, path, u.needed))...)
		}
	}
	paths, _ := filepath.Glob(stem(u.Setup.Path()) + ".*")
	for _, own := range u.own {
		path := strings.TrimSuffix(strings.TrimSuffix(own.Path, node.OffSuffix), renamedBy)
		paths = append(paths, path+node.OffSuffix)
	}
	slices.Sort(paths)
	for _, path := range slices.Compact(paths) {
		c, _ := netconf.ReadConflist(path)
		inUse := slices.Contains(append(forms, renamedBy), filepath.Ext(path)) // only in a dry run
		if ours(c) && !inUse || u.DryRun && !durable.Exists(path) {
			changes = append(changes, remove(path, u.needed))
		}
	}
	if u.needed == "" {
		changes = append(changes, &Change{Change: "unchanged", What: u.StateDir +
			"; to remove it once no agent runs here, run rm -r " + u.StateDir})
	}
	return changes, nil
}

// cachedNaming returns the number of attachments that libcni has cached with a configuration that
// names unwind (cni libcni/api.go cachedInfo). CRI-O and podman run their DELs with that
// configuration (ocicni pkg/ocicni/ocicni.go loadNetworkFromCache, common libnetwork/cni/run.go
// getCachedNetworkConfig), and Nomad with its copy in memory. So they still need the plugin.
func cachedNaming(dir string, attachments []inspect.Attachment) (int, error) {
	node := facts.Node{CacheDir: dir}
	files, err := node.Cache()
	count := 0
	for _, f := range files {
		// Don't count an attachment that has no record and whose namespace is gone: the runtime has
		// forgotten it, and a sweep has released it.
		kept := f.NetNS == "" || durable.Exists(f.NetNS) ||
			slices.ContainsFunc(attachments, func(a inspect.Attachment) bool {
				return a.ContainerID == f.ContainerID
			})
		if kept && names(f.Config, "") {
			count++
		}
	}
	return count, err
}
