package install

import (
	"cmp"
	"context"
	"encoding/json"
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
	By                  string // who switches unwind off
	Output              term.Output
}

type change struct {
	Change string `json:"change"` // renamed, removed, released, changed, kept, off, on
	What   string `json:"what"`
}

type changes []change

func (c *changes) add(what, format string, args ...any) {
	*c = append(*c, change{what, fmt.Sprintf(format, args...)})
}

// remove removes a file, unless it is needed.
func (c *changes) remove(path, needed string) error {
	if needed != "" {
		c.add("kept", "%s (%s)", path, needed)
		return nil
	}
	if err := durable.Remove(path); err != nil {
		return err
	}
	c.add("removed", "%s", path)
	return nil
}

func (c *changes) print(out io.Writer, o *term.Output) error {
	if o.IsObject() {
		return o.PrintObject(out, "changes", *c)
	}
	text := ""
	for _, one := range *c {
		text += fmt.Sprintf("%-10s %s\n", one.Change+":", one.What)
	}
	_, err := io.WriteString(out, text)
	return err
}

// ExitUnrecorded is the exit code of a command that took unwind out of use but could not write the
// off switch.
const ExitUnrecorded = 5

// Uninstall switches unwind off. Without OffOnly it also removes the binary once nothing names it.
//
//  1. Rename our conflist: from then on, pods start without unwind. If the disk has no room for the
//     new name, remove the conflist.
//  2. Write the off switch, so that no agent installs unwind again. If that fails, a running agent
//     treats the removal as the off switch, but an agent that starts later installs unwind.
//  3. Remove what nothing needs. Our conflist stays under its other name until the last uninstall,
//     because it names the state directory.
func Uninstall(ctx context.Context, out io.Writer, o UninstallOptions) error {
	r, err := o.Find(ctx, "/")
	if err != nil {
		return err
	}
	s := Setup{ConfDir: r.ConfDir, BinDir: r.BinDirs[0], File: o.OwnFile(r)}
	strict := o.StateDirFlag || !o.OffOnly
	if o.StateDir, err = s.usedStateDir(ctx, o.StateDir, strict); err != nil {
		return err
	}
	s.Source = s.Provider(r)
	done := changes{}
	o.removeTemporary(s, &done)
	removed, said, removeErr := s.Remove()
	if removeErr != nil && removed == nil && said == nil {
		return removeErr
	}
	for _, path := range removed {
		if off := path + node.OffSuffix; o.OffOnly && slices.Contains(s.kept(), off) {
			done.add("renamed", "%s to %s; unwindctl on restores it", path, off)
		} else {
			done.add("removed", "%s", path)
		}
	}
	for _, sentence := range said {
		done.add("changed", "%s", sentence)
	}
	if removed == nil {
		done.add("off", "unwind is not in use: there is no %s", s.Path())
	}
	err = errors.Join(removeErr, o.recordOff(&done))
	if o.OffOnly {
		for _, path := range s.kept() {
			if removed == nil {
				done.add("kept", "%s (unwindctl on restores unwind's file from it)", path)
			}
		}
		attachments, readErr := inspect.ReadJournal(ctx, &journal.Store{Dir: o.StateDir})
		if n := countPending(attachments); n > 0 {
			done.add("kept", "pending DELs of %s; unwindctl sweep retries them", term.Attachments(n))
		}
		return errors.Join(err, readErr, done.print(out, &o.Output))
	}
	found := removed != nil || len(s.kept()) > 0
	inUse, binaryErr := s.removeBinary(ctx, o.CacheDir, o.StateDir, found, &done)
	journal := describeJournal(ctx, o.StateDir)
	if journal != "" {
		done.add("kept", "%s", journal)
	}
	nodeErr := o.removeFromNode(ctx, s, inUse, journal != "", &done)
	return errors.Join(err, binaryErr, nodeErr, done.print(out, &o.Output))
}

// usedStateDir returns the state directory in our conflist, in use or kept by off, and the given or
// the default one if there is no conflist. It returns an error if unwind uses another conflist than
// ours or, if strict is set, another state directory than the given one.
func (s Setup) usedStateDir(ctx context.Context, given string, strict bool) (string, error) {
	installed, _ := node.Installed(ctx, s.ConfDir)
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
		name := strings.TrimSuffix(filepath.Base(other.Path), node.OffSuffix)
		hint := "use --conf-dir " + filepath.Dir(other.Path) + " --unwind-file " + name
		if !ours(other) {
			hint = "replace that file with the provider's conflist"
		}
		return "", term.WithHint(hint, "nothing was changed: unwind's conflist is %s, not %s", other.Path,
			s.Path())
	}
	used := filepath.Clean(cmp.Or(installed[own].Unwind.StateDir, netconf.DefaultStateDir))
	dir, err := absolute(given)
	if err == nil && strict && dir != "" && dir != used && !same(dir, used) {
		err = term.WithHint("use --state-dir "+used,
			"nothing was changed: unwind uses the journal in %s, not in %s", used, dir)
	}
	return cmp.Or(given, used), err
}

// removeTemporary removes temporary files that killed installs have left.
func (o UninstallOptions) removeTemporary(s Setup, done *changes) {
	paths := []string{s.Path(), s.otherForm(), s.plugin(), filepath.Join(o.StateDir, OffName)}
	if o.ProgramDir != "" {
		for _, program := range programs {
			paths = append(paths, filepath.Join(o.ProgramDir, program))
		}
	}
	for _, path := range paths {
		for _, temporary := range durable.RemoveTemporary(path) {
			done.add("removed", "%s", temporary)
		}
	}
}

// recordOff writes the off switch after our conflist was removed.
func (o UninstallOptions) recordOff(done *changes) error {
	first := ReadOff(o.StateDir) == nil
	err := WriteOff(o.StateDir, o.By)
	off := ReadOff(o.StateDir)
	switch {
	case err != nil:
		return term.WithHint("run unwindctl off again once the disk is writable", "%w",
			term.Coded{Code: ExitUnrecorded, Text: "pods start without unwind, but an agent that starts " +
				"will install it again: " + err.Error()})
	case o.OffOnly && first && off.By == somebody && o.By != "":
		done.add("off", "%s: the disk is too full to record %s; unwindctl on switches it on again", off,
			o.By)
	case o.OffOnly:
		done.add("off", "%s; unwindctl on switches it on again", off)
	}
	return nil
}

// removeFromNode removes the files that installForNode wrote, and the conflist that off has kept.
// While the journal is not empty, all of these are needed. While the plugin is in use, the programs
// and that conflist are needed.
func (o UninstallOptions) removeFromNode(ctx context.Context, s Setup, pluginInUse, hasJournal bool,
	done *changes) error {
	var err error
	needed := ""
	if hasJournal {
		needed = "needed until the journal is empty"
	}
	if o.ProgramDir != "" && o.UnitDir != "" {
		err = removeUnits(ctx, o.UnitDir, needed, done)
	}
	if pluginInUse && !hasJournal {
		needed = "needed to run uninstall again"
	}
	if o.ProgramDir != "" {
		err = errors.Join(err, removePrograms(ctx, o.ProgramDir, needed, done))
	}
	for _, path := range s.kept() {
		if needed != "" {
			done.add("kept", "%s (%s)", path, needed)
		} else {
			err = errors.Join(err, durable.Remove(path))
		}
	}
	off := filepath.Join(o.StateDir, OffName)
	switch {
	case needed != "" && durable.Exists(off):
		done.add("off", "%s records that unwind is off here, so no agent installs it", off)
	case durable.Exists(off):
		done.add("off", "%s records that unwind is off here, so no agent installs it; once no agent "+
			"runs here, run rm -r %s to remove this record too", off, o.StateDir)
	}
	return err
}

// removeBinary removes the plugin, unless it is or may be in use. found says whether our conflist
// was found. If it was not, the attachments in the journal may use a conflist in another directory.
func (s Setup) removeBinary(
	ctx context.Context, cacheDir, stateDir string, found bool, done *changes,
) (inUse bool, err error) {
	path := s.plugin()
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	conflists, err := s.naming(ctx)
	store := &journal.Store{Dir: stateDir}
	attachments, readErr := inspect.ReadJournal(ctx, store)
	cached, cacheErr := cachedNaming(filepath.Join(cacheDir, "results"), attachments)
	if err = errors.Join(err, readErr, cacheErr); err != nil {
		done.add("kept", "%s (it may still be in use)", path)
		return true, err
	}
	var why []string
	if len(conflists) > 0 {
		why = append(why, strings.Join(conflists, ", "))
	}
	if cached > 0 {
		why = append(why, term.Attachments(cached)+" in libcni's cache")
	}
	if n := len(attachments); n > 0 && !found {
		why = append(why, term.Attachments(n)+" in the journal")
	}
	running := slices.DeleteFunc(attachments, func(a inspect.Attachment) bool {
		lock, err := store.LookAtLock(a.Key)
		return err == nil && !lock.Held
	})
	if n := len(running); n > 0 { // libcni caches the configuration of an ADD when the ADD ends
		why = append(why, "a running operation on "+term.Attachments(n))
	}
	if len(why) > 0 {
		done.add("kept", "%s (used by %s; run unwindctl uninstall again once their pods are gone)",
			path, strings.Join(why, " and "))
		return true, nil
	}
	if !isOurs(ctx, path) {
		done.add("kept", "%s (not recognized as unwind)", path)
		return false, nil
	}
	return false, done.remove(path, "")
}

// naming returns the conflists that run unwind, in any directory that a runtime may use.
func (s Setup) naming(ctx context.Context) (paths []string, err error) {
	installed, err := node.Installed(ctx, s.ConfDir)
	for _, c := range installed {
		if !strings.HasSuffix(c.Path, node.OffSuffix) {
			paths = append(paths, c.Path)
		}
	}
	return paths, err
}

// cachedNaming returns the number of attachments that libcni has cached with a configuration that
// names unwind (cni libcni/api.go cachedInfo). CRI-O runs a DEL with that configuration (ocicni
// pkg/ocicni/ocicni.go loadNetworkFromCache).
func cachedNaming(dir string, attachments []inspect.Attachment) (int, error) {
	node := facts.Node{CacheDir: dir}
	files, err := node.Cache()
	if all, joined := err.(interface{ Unwrap() []error }); joined {
		err = errors.Join(slices.DeleteFunc(slices.Clone(all.Unwrap()), isTorn)...)
	}
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

// isTorn reports whether a file in libcni's cache is not JSON. No runtime can find unwind's name in
// such a file.
func isTorn(err error) bool {
	var syntax *json.SyntaxError
	return errors.As(err, &syntax)
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
