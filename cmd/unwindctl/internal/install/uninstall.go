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
	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/netconf"
)

// UninstallOptions are the flags of unwindctl uninstall, and of off.
type UninstallOptions struct {
	Target
	CacheDir, StateDir string

	ProgramDir, UnitDir string // as install has them; without the first, both are left
	Purge               bool   // remove the state directory
	OffOnly             bool   // remove our conflist alone
	By                  string // who wants it
	Output              term.Output
}

type change struct {
	Change string `json:"change"` // removed, returned, kept, off, on
	What   string `json:"what"`
}

type changes []change

func (c *changes) add(what, format string, args ...any) {
	*c = append(*c, change{what, fmt.Sprintf(format, args...)})
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

// Uninstall switches unwind off: it writes the off-switch, so that no agent installs again, and
// then removes our conflist. Without OffOnly it also removes the binary once nothing names it.
func Uninstall(ctx context.Context, out io.Writer, o UninstallOptions) error {
	r, err := o.Find("/")
	if err != nil {
		return err
	}
	s := Setup{ConfDir: r.ConfDir, BinDir: r.BinDirs[0], File: cmp.Or(o.File, OwnFile(r))}
	if o.StateDir == "" {
		o.StateDir = s.stateDir()
	}
	if o.Purge {
		if err := checkPurge(ctx, o.StateDir); err != nil {
			return err
		}
	}
	if o.OffOnly || durable.Exists(o.StateDir) { // else there is no agent
		if err := WriteOff(o.StateDir, o.By); err != nil {
			return err
		}
	}
	removed, said, removeErr := s.Remove()
	if removeErr != nil && removed == nil && said == nil {
		return removeErr
	}
	done := changes{}
	for _, path := range removed {
		done.add("removed", "%s", path)
	}
	for _, sentence := range said {
		done.add("returned", "%s", sentence)
	}
	if removed == nil {
		done.add("off", "unwind is not in use: there is no %s", s.Path())
	}
	if o.OffOnly {
		done.add("off", "%s; unwindctl on switches it on again", ReadOff(o.StateDir))
		return errors.Join(removeErr, done.print(out, &o.Output))
	}
	binaryErr := s.removeBinary(ctx, o.CacheDir, o.StateDir, &done)
	var nodeErr error
	if journal := describeJournal(ctx, o.StateDir); journal != "" {
		done.add("kept", "%s", journal)
	} else {
		nodeErr = o.removeFromNode(ctx, &done)
	}
	return errors.Join(removeErr, binaryErr, nodeErr, done.print(out, &o.Output))
}

// removeFromNode removes what installForNode wrote and, with --purge, the state directory. As long
// as the journal has something, unwindctl and its units are needed.
func (o UninstallOptions) removeFromNode(ctx context.Context, done *changes) error {
	var units, programs []string
	var err, unitErr error
	if o.ProgramDir != "" {
		if o.UnitDir != "" {
			units, unitErr = removeUnits(ctx, o.UnitDir)
		}
		programs, err = removePrograms(ctx, o.ProgramDir)
		err = errors.Join(unitErr, err)
	}
	for _, path := range slices.Concat(units, programs) {
		done.add("removed", "%s", path)
	}
	if !o.Purge {
		return err
	}
	purgeErr := checkPurge(ctx, o.StateDir) // a pod may have come before the conflist went
	if purgeErr == nil {
		purgeErr = purge(o.StateDir)
	}
	if purgeErr == nil {
		done.add("removed", "%s", o.StateDir)
	}
	return errors.Join(err, purgeErr)
}

func (s Setup) removeBinary(ctx context.Context, cacheDir, stateDir string, done *changes) error {
	path := s.plugin()
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	conflists, err := s.naming()
	attachments, readErr := inspect.ReadJournal(ctx, &journal.Store{Dir: stateDir})
	cached, cacheErr := cachedNaming(filepath.Join(cacheDir, "results"), attachments)
	if err = errors.Join(err, readErr, cacheErr); err != nil {
		done.add("kept", "%s (unknown whether it is still in use)", path)
		return err
	}
	var why []string
	if len(conflists) > 0 {
		why = append(why, strings.Join(conflists, ", "))
	}
	if cached > 0 {
		why = append(why, term.Attachments(cached)+" in libcni's cache")
	}
	if len(why) > 0 {
		done.add("kept", "%s (named by %s; run unwindctl uninstall again once their pods are gone)",
			path, strings.Join(why, " and "))
		return nil
	}
	if about, _, err := AskVersion(ctx, path); err != nil || !strings.Contains(about, netconf.Name) {
		done.add("kept", "%s (not recognized as unwind)", path)
		return nil //nolint:nilerr // what cannot be asked stays, and that is said
	}
	if err := durable.Remove(path); err != nil {
		return err
	}
	done.add("removed", "%s", path)
	return nil
}

func (s Setup) naming() ([]string, error) {
	paths, err := netconf.Conflists(s.ConfDir)
	return slices.DeleteFunc(paths, func(path string) bool {
		c, _ := netconf.ReadConflist(path)
		return c == nil || !slices.Contains(c.Types, netconf.Name)
	}), err
}

// cachedNaming returns how many attachments libcni has cached with a configuration that names
// unwind (cni libcni/api.go cachedInfo). CRI-O gives a DEL that configuration (ocicni
// pkg/ocicni/ocicni.go loadNetworkFromCache).
func cachedNaming(dir string, attachments []inspect.Attachment) (int, error) {
	node := alive.Node{CacheDir: dir}
	files, err := node.Cache()
	if all, joined := err.(interface{ Unwrap() []error }); joined {
		err = errors.Join(slices.DeleteFunc(slices.Clone(all.Unwrap()), isTorn)...)
	}
	count := 0
	for _, f := range files {
		// An attachment without a namespace and without an entry in the journal was swept: the
		// runtime has forgotten it.
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

// isTorn reports whether a file of libcni's cache is not JSON: no runtime reads unwind's name from
// it.
func isTorn(err error) bool {
	var syntax *json.SyntaxError
	return errors.As(err, &syntax)
}

func describeJournal(ctx context.Context, stateDir string) string {
	store := &journal.Store{Dir: stateDir}
	attachments, err := inspect.ReadJournal(ctx, store)
	if err != nil {
		return fmt.Sprintf("the journal in %s stays; it cannot be read: %s", stateDir,
			term.OneLine(err.Error()))
	}
	pending := 0
	for _, a := range attachments {
		if a.PendingDEL() {
			pending++
		}
	}
	if len(attachments) == 0 {
		return ""
	}
	flag := " --state-dir " + stateDir
	if stateDir == netconf.DefaultStateDir {
		flag = ""
	}
	return fmt.Sprintf("the journal in %s stays: %s, %d with pending DELs. The runtime releases "+
		"the live ones; unwindctl sweep%s releases the rest",
		stateDir, term.Attachments(len(attachments)), pending, flag)
}

// checkPurge returns an error if attachments, or a running agent, still need the state directory.
func checkPurge(ctx context.Context, stateDir string) error {
	store := &journal.Store{Dir: stateDir}
	if pid := store.AgentProcess(); pid != "" {
		return term.WithHint("stop it first; uninstall without --purge leaves unwind switched off "+
			"while it runs",
			"--purge: nothing was changed: an agent is running (process %s) and would install again", pid)
	}
	attachments, err := inspect.ReadJournal(ctx, store)
	if err != nil {
		return fmt.Errorf("--purge: nothing was changed: %w", err)
	}
	if len(attachments) > 0 {
		return term.WithHint("run uninstall without --purge, and again with it once unwindctl list is "+
			"empty; unwindctl sweep releases dead attachments",
			"--purge: nothing was changed: the journal in %s has %s, which nothing would release",
			stateDir, term.Attachments(len(attachments)))
	}
	return nil
}

// purge removes unwind's files, following no link, and the state directory if it is then empty.
func purge(stateDir string) error {
	files, err := filepath.Glob(filepath.Join(stateDir, "journal.*"))
	for _, path := range append(files, filepath.Join(stateDir, "locks"),
		filepath.Join(stateDir, journal.AgentLockName), filepath.Join(stateDir, OffName)) {
		err = errors.Join(err, os.RemoveAll(path))
	}
	if removeErr := os.Remove(stateDir); removeErr != nil && !errors.Is(removeErr, fs.ErrNotExist) {
		err = errors.Join(err, removeErr)
	}
	return err
}
