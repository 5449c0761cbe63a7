package install

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
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
)

// UninstallOptions are the flags of unwindctl uninstall, and of off.
type UninstallOptions struct {
	Target
	CacheDir, StateDir string
	StateDirFlag       bool // StateDir comes from --state-dir, not from an agent's environment

	ProgramDir, UnitDir string // as for install; if ProgramDir is "", both stay
	OffOnly             bool   // remove only our conflist
	DryRun              bool
	By                  string // who switches unwind off
	Output              term.Output
}

// ExitUnrecorded is the exit code of a command that took unwind out of use but could not write the
// off switch.
const ExitUnrecorded = 5

// Uninstall switches unwind off. Without OffOnly it also removes the binary once nothing names it.
// It does not wait for a runtime.
//
//  1. Take unwind out of other programs' files. If that fails, continue.
//  2. Rename our conflist: from then on, pods start without unwind. If the disk has no room for the
//     new name, remove the conflist. If that fails, stop.
//  3. Write the off switch, so that no agent installs unwind again. If that fails, a running agent
//     treats the removal as the off switch, but an agent that starts later installs unwind.
//  4. Remove what nothing needs. Our conflist stays under its other name until the last uninstall,
//     because it names the state directory. What something still needs is kept, which is an error.
//  5. Report what the runtime loads next. It is an error if that is nothing, or runs unwind.
func Uninstall(ctx context.Context, out io.Writer, o UninstallOptions) error {
	r, err := o.FindInstalled(ctx, "/")
	if err != nil {
		return err
	}
	s := Setup{ConfDir: r.ConfDir, BinDir: r.BinDirs[0], File: o.OwnFile(r)}
	if o.StateDir, err = s.usedStateDir(o.StateDir, o.StateDirFlag || !o.OffOnly); err != nil {
		return err
	}
	s.Source = s.Provider(r)
	u := &uninstall{UninstallOptions: o, Setup: s, runtime: r, network: s.network()}
	done := Changes{DryRun: o.DryRun}
	err = done.Try(s.repairs)
	if outErr := done.Make(s.takeOut); outErr != nil {
		return errors.Join(err, outErr, done.print(out, &o.Output))
	}
	rest := []Step{u.Setup.takeBack, u.recordOff, u.pending(ctx), u.next}
	if !o.OffOnly {
		rest = []Step{u.Setup.takeBack, u.recordOff, u.keepJournal(ctx), u.removeUnits(ctx), u.removePlugin(ctx),
			u.removeFiles(ctx), u.next}
	}
	err = errors.Join(err, done.Try(rest...))
	if !o.OffOnly && len(done.Of("kept")) > 0 {
		err = errors.Join(err, term.WithHint("run unwindctl sweep and unwindctl uninstall again once the "+
			"pods that were added through unwind are gone",
			"unwind is not removed from this node yet: something needs the files that are kept"))
	}
	return errors.Join(err, done.print(out, &o.Output))
}

// uninstall is one run of Uninstall.
type uninstall struct {
	UninstallOptions
	Setup   Setup
	runtime node.Runtime
	network string // of our conflist, "" if there is none
	needed  string // why files must stay, "" if nothing needs them
}

// recordOff writes the off switch after our conflist was removed.
func (u *uninstall) recordOff() ([]*Change, error) {
	path := filepath.Join(u.StateDir, OffName)
	text := func() string {
		off := ReadOff(u.StateDir)
		switch {
		case !u.OffOnly:
			return "no agent installs unwind while " + path + " exists"
		case off == nil:
			return "by " + u.By
		}
		return off.String() + "; unwindctl on switches it on again"
	}
	first := ReadOff(u.StateDir) == nil
	return []*Change{{Change: "off", What: text(), apply: func(done *Change) error {
		if err := WriteOff(u.StateDir, u.By); err != nil {
			return term.WithHint("run unwindctl off again once the disk is writable", "%w",
				term.Coded{Code: ExitUnrecorded, Text: "pods start without unwind, but an agent that starts " +
					"will install it again: " + err.Error()})
		}
		done.What = text()
		if off := ReadOff(u.StateDir); first && off.By == somebody && u.By != "" {
			done.What = fmt.Sprintf("%s: the disk is too full to record %s; unwindctl on switches it on "+
				"again", off, u.By)
		}
		return nil
	}}}, nil
}

// pending is the step that reports the pending DELs, which off does not run.
func (u *uninstall) pending(ctx context.Context) Step {
	return func() ([]*Change, error) {
		attachments, err := inspect.ReadJournal(ctx, &journal.Store{Dir: u.StateDir})
		n := countPending(attachments)
		if n == 0 {
			return nil, err
		}
		return []*Change{{Change: "pending", What: "DELs of " + term.Attachments(n) +
			"; unwindctl sweep retries them"}}, err
	}
}

// next is the step that reports what the runtime loads now.
func (u *uninstall) next() ([]*Change, error) {
	network := u.runtime.DefaultNetwork
	if u.runtime.Socket == "" { // such a runtime chooses the file by the network's name
		network = u.network
	}
	paths, err := netconf.Conflists(u.Setup.ConfDir)
	for _, path := range paths {
		c, readErr := u.Setup.readOther(path)
		isOwn := path == u.Setup.Path() || path == u.Setup.otherForm()
		switch {
		case isOwn && u.DryRun: // it is still there
		case network != "" && (c == nil || c.Name != network):
		case c == nil:
			return nil, term.WithHint("correct that file", "the runtime loads %s next, but cannot use it: "+
				"%w", path, readErr)
		case names(c.Data, ""):
			return nil, term.WithHint(takeOutHint(c), "the runtime loads %s next, which runs unwind", path)
		default:
			return []*Change{{Change: "next", What: fmt.Sprintf("the runtime loads %s (%s)", path,
				strings.Join(c.Types, " → "))}}, nil
		}
	}
	of := ""
	if network != "" {
		of = fmt.Sprintf(" for network %q", network)
	}
	return nil, errors.Join(err, term.WithHint("install the network's provider", "no pod can start: "+
		"%s contains no conflist%s", u.Setup.ConfDir, of))
}

// takeOutHint returns how to take unwind out of a conflist other than ours.
func takeOutHint(c *netconf.Conflist) string {
	name := strings.TrimSuffix(filepath.Base(c.Path), node.OffSuffix)
	switch {
	case ours(c):
		return "use --conf-dir " + filepath.Dir(c.Path) + " --unwind-file " + name
	case c.Unwind != nil && c.Unwind.Chain != nil:
		return "run unwindctl unwrap --in-place " + c.Path
	}
	return "replace that file with the provider's conflist"
}

// usedStateDir returns the state directory in our conflist, in use or kept by off, and the given or
// the default one if there is no conflist. It returns an error if unwind uses another conflist than
// ours or, if strict is set, another state directory than the given one.
func (s Setup) usedStateDir(given string, strict bool) (string, error) {
	installed, _ := node.Installed(s.ConfDir)
	own := slices.IndexFunc(installed, func(c *netconf.Conflist) bool {
		path := strings.TrimSuffix(c.Path, node.OffSuffix)
		return path == s.Path() || path == s.otherForm()
	})
	install := slices.IndexFunc(installed, func(c *netconf.Conflist) bool { return !madeFromOurs(c) })
	switch {
	case len(installed) == 0:
		return cmp.Or(given, netconf.DefaultStateDir), nil
	case own < 0 && install < 0:
		own = 0
	case own < 0:
		other := installed[install]
		return "", term.WithHint(takeOutHint(other), "nothing was changed: unwind's conflist is %s, not %s",
			other.Path, s.Path())
	}
	used := filepath.Clean(cmp.Or(installed[own].Unwind.StateDir, netconf.DefaultStateDir))
	dir, err := absolute(given)
	if err == nil && strict && dir != "" && dir != used && !same(dir, used) {
		err = term.WithHint("use --state-dir "+used,
			"nothing was changed: unwind uses the journal in %s, not in %s", used, dir)
	}
	return cmp.Or(given, used), err
}

// network returns the network of our conflist, in use or kept by off, or "" if there is none.
func (s Setup) network() string {
	for _, path := range append([]string{s.Path(), s.otherForm()}, s.kept()...) {
		if c, _ := netconf.ReadConflist(path); ours(c) {
			return c.Name
		}
	}
	return ""
}

// again is why files stay while the plugin is kept.
const again = "needed to run uninstall again"

// removePlugin is the step that removes the plugin, unless it is or may be in use.
func (u *uninstall) removePlugin(ctx context.Context) Step {
	return func() ([]*Change, error) {
		path := u.Setup.plugin()
		if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
			if u.network == "" || !u.runtime.Silent() {
				return nil, nil
			}
			u.needed = cmp.Or(u.needed, again)
			return []*Change{{Change: "kept", What: fmt.Sprintf("the plugin, which is not in %s: %s does not "+
				"report its plugin directory, so set --cni-bin-dir", u.Setup.BinDir, u.runtime.Name)}}, nil
		}
		why, err := u.users(ctx)
		switch {
		case err != nil:
			u.needed = cmp.Or(u.needed, again)
			return []*Change{remove(path, "it may still be in use")}, err
		case len(why) == 0:
			return []*Change{removeProgram(ctx, path, "")}, nil
		}
		u.needed = cmp.Or(u.needed, again)
		return []*Change{remove(path, "used by "+strings.Join(why, " and "))}, nil
	}
}

// users returns what uses the plugin, or may use it.
func (u *uninstall) users(ctx context.Context) (why []string, err error) {
	installed, err := node.Installed(u.Setup.ConfDir)
	for _, c := range installed { // a dry run leaves ours there
		if !strings.HasSuffix(c.Path, node.OffSuffix) && c.Path != u.Setup.Path() &&
			c.Path != u.Setup.otherForm() {
			why = append(why, c.Path)
		}
	}
	if why != nil {
		why = []string{strings.Join(why, ", ")}
	}
	store := &journal.Store{Dir: u.StateDir}
	attachments, readErr := inspect.ReadJournal(ctx, store)
	cached, cacheErr := cachedNaming(filepath.Join(u.CacheDir, "results"), attachments)
	if cached > 0 {
		why = append(why, term.Attachments(cached)+" in libcni's cache")
	}
	// without our conflist, these attachments may use one in another directory
	if n := len(attachments); n > 0 && u.network == "" {
		why = append(why, term.Attachments(n)+" in the journal")
	}
	running := slices.DeleteFunc(attachments, func(a inspect.Attachment) bool {
		lock, err := store.LookAtLock(a.Key)
		return err == nil && !lock.Held
	})
	if n := len(running); n > 0 { // libcni caches the configuration of an ADD when the ADD ends
		why = append(why, "a running operation on "+term.Attachments(n))
	}
	return why, errors.Join(err, readErr, cacheErr)
}

// keepJournal is the step that reports a journal with attachments. While there is one, nothing that
// can release them is removed.
func (u *uninstall) keepJournal(ctx context.Context) Step {
	return func() ([]*Change, error) {
		text := describeJournal(ctx, u.StateDir)
		if text == "" {
			return nil, nil
		}
		u.needed = "needed until the journal is empty"
		return []*Change{{Change: "kept", What: text}}, nil
	}
}

// removeUnits is the step that removes the systemd units once the journal is empty.
func (u *uninstall) removeUnits(ctx context.Context) Step {
	return func() ([]*Change, error) {
		if u.ProgramDir == "" || u.UnitDir == "" {
			return nil, nil
		}
		return removeUnits(ctx, u.UnitDir, u.needed)
	}
}

// removeFiles is the step that removes the programs and the conflist that off has kept, once the
// plugin is gone too.
func (u *uninstall) removeFiles(ctx context.Context) Step {
	return func() (changes []*Change, err error) {
		stale := []string{u.Setup.Path(), u.Setup.otherForm(), u.Setup.plugin(),
			filepath.Join(u.StateDir, OffName)}
		if u.ProgramDir != "" {
			changes = removePrograms(ctx, u.ProgramDir, u.needed)
			for _, program := range programs {
				stale = append(stale, filepath.Join(u.ProgramDir, program))
			}
		}
		for _, path := range u.Setup.kept() {
			changes = append(changes, remove(path, u.needed))
		}
		for _, path := range stale { // temporary files that killed installs have left
			changes = append(changes, &Change{apply: func(*Change) error {
				durable.RemoveTemporary(path)
				return nil
			}})
		}
		if u.needed == "" {
			changes = append(changes, &Change{Change: "unchanged",
				What: u.StateDir + "; once no agent runs here, run rm -r " + u.StateDir})
		}
		return changes, nil
	}
}

// cachedNaming returns the number of attachments that libcni has cached with a configuration that
// names unwind (cni libcni/api.go cachedInfo). CRI-O runs a DEL with that configuration (ocicni
// pkg/ocicni/ocicni.go loadNetworkFromCache).
func cachedNaming(dir string, attachments []inspect.Attachment) (int, error) {
	node := facts.Node{CacheDir: dir}
	files, err := node.Cache()
	count := 0
	for _, f := range files {
		// If the recorded namespace is gone and the journal has no entry, a sweep has released the
		// attachment, because the runtime forgot it.
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

func describeJournal(ctx context.Context, stateDir string) string {
	store := &journal.Store{Dir: stateDir}
	attachments, err := inspect.ReadJournal(ctx, store)
	if err != nil {
		return fmt.Sprintf("the journal in %s, which cannot be read: %s", stateDir,
			term.OneLine(err.Error()))
	}
	if len(attachments) == 0 {
		return ""
	}
	flag := " --state-dir " + stateDir
	if stateDir == netconf.DefaultStateDir {
		flag = ""
	}
	return fmt.Sprintf("the journal in %s: %s, %d with pending DELs. The runtime releases "+
		"the live ones; unwindctl sweep%s releases the rest",
		stateDir, term.Attachments(len(attachments)), countPending(attachments), flag)
}

func countPending(attachments []inspect.Attachment) int {
	return len(inspect.Filter(attachments, (*inspect.Attachment).PendingDEL))
}
