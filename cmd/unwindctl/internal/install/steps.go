package install

import (
	"bytes"
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

	"golang.org/x/sys/unix"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
)

// Step is a part of install, on, off or uninstall. It inspects the node, and returns the changes to
// make. It changes nothing itself: Make applies the changes before it calls the next step.
type Step func(context.Context) ([]*Change, error)

// Change is one change to the node, or something that stays as it is.
type Change struct {
	Change string `json:"change"` // a key of infinitives, or unchanged, kept, pending, next, still on
	What   string `json:"what"`   // "" if the change is not printed

	path    string              // of a repaired file
	content string              // of a written file; only a dry run prints it
	again   bool                // an earlier command made this change
	apply   func(*Change) error // nil if there is nothing to do; may change Change and What
}

// infinitives contains the verbs that a dry run prints, by the kind of change.
var infinitives = map[string]string{"written": "write", "changed": "change",
	"renamed": "rename", "removed": "remove", "off": "switch unwind off:", "on": "switch unwind on;"}

// Changes lists the changes that were made or, in a dry run, would be made.
type Changes struct {
	DryRun bool
	List   []*Change
}

// Make runs the steps in order, up to the first error.
func (c *Changes) Make(ctx context.Context, steps ...Step) error { return c.take(ctx, true, steps) }

// try runs all steps in order, even after an error, and returns all errors.
func (c *Changes) try(ctx context.Context, steps ...Step) error { return c.take(ctx, false, steps) }

func (c *Changes) take(ctx context.Context, stops bool, steps []Step) (err error) {
	for _, step := range steps {
		changes, stepErr := step(ctx)
		err = errors.Join(err, stepErr)
		for _, one := range changes {
			if stops && err != nil {
				break
			}
			err = errors.Join(err, c.apply(one))
		}
		if stops && err != nil {
			return err
		}
	}
	return err
}

func (c *Changes) apply(one *Change) error {
	if one.apply != nil && !c.DryRun {
		if err := one.apply(one); err != nil {
			return err
		}
	}
	if one.What != "" {
		c.List = append(c.List, one)
	}
	return nil
}

// Find returns the texts (What) of all changes of a kind, such as "written".
func (c *Changes) Find(change string) (what []string) {
	for _, one := range c.List {
		if one.Change == change {
			what = append(what, one.What)
		}
	}
	return what
}

// none reports whether everything stays as it is.
func (c *Changes) none() bool {
	return !slices.ContainsFunc(c.List, func(one *Change) bool { return one.Change != "unchanged" })
}

// Record adds an event to the history if a change was made. The event contains the command's error
// (why), unless it is nil.
func (c *Changes) Record(stateDir string, kind journal.EventKind, by string, why error) {
	if c.DryRun || !slices.ContainsFunc(c.List, func(one *Change) bool {
		return one.apply != nil && !one.again && infinitives[one.Change] != ""
	}) {
		return
	}
	if why != nil && why.Error() != "" {
		by += "; " + term.OneLine(why.Error())
	}
	Record(stateDir, kind, by)
}

// Record adds an event to the history, if the state directory exists. It ignores errors, so that no
// command fails just because the history cannot be written, as on a full disk.
func Record(stateDir string, kind journal.EventKind, by string) {
	dir, err := filepath.Abs(stateDir)
	if err == nil && durable.Exists(dir) {
		_ = (&journal.Store{Dir: dir}).Record(journal.Event{Kind: kind, Reason: "by " + by})
	}
}

// User names this program and the user who runs it, for the history.
func User() string {
	return "unwindctl as " + cmp.Or(os.Getenv("SUDO_USER"), os.Getenv("USER"), "root")
}

// String returns a line for each change.
func (c *Changes) String() (text string) {
	for _, one := range c.List {
		if infinitive := infinitives[one.Change]; c.DryRun && one.apply != nil && infinitive != "" {
			text += fmt.Sprintf("would %s %s\n%s", infinitive, one.What, one.content)
		} else {
			text += fmt.Sprintf("%-10s %s\n", one.Change+":", one.What)
		}
	}
	return text
}

func (c *Changes) print(out io.Writer, o *term.Output) error {
	if o.IsObject() {
		return o.PrintObject(out, "changes", append([]*Change{}, c.List...), "dryRun", c.DryRun)
	}
	return term.Print(out, c.String())
}

// WriteConflist returns the step that writes unwind's conflist atomically, as planned. If the
// existing conflist is equivalent to the planned one, the step omits 3 and 4.
//
//  1. Copy the provider's file. If that fails, set p.CopyErr, and continue without a copy.
//  2. Repair other programs' files.
//  3. Write unwind's conflist. From then on, unwind is in use.
//  4. Remove the conflist named *.off. If a crash leaves it, the next unwindctl off replaces it.
func (s Setup) WriteConflist(p *Plan) Step {
	return func(ctx context.Context) ([]*Change, error) {
		file := &Change{Change: "unchanged", What: fmt.Sprintf("%s (network %s, chain %s of %s)", p.path,
			p.Source.Name, strings.Join(p.Source.Types, " → "), p.Source.Path)}
		dir, err := s.checkState(ctx)
		if err != nil {
			return nil, err
		}
		changes := append([]*Change{{apply: func(*Change) error {
			if err := os.MkdirAll(dir, 0o700); err != nil { // an ADD could not create it either
				return term.WithHint("choose another directory with --state-dir",
					"cannot create the state directory: %w", err)
			}
			p.CopyErr = s.keepCopy(p.Source)
			return nil
		}}}, p.repairs...)
		if !p.changed {
			return append(changes, file), nil
		}
		file.Change, file.content = "written", string(p.content)
		file.apply = func(*Change) error {
			err := durable.Replace(p.path, bytes.NewReader(p.content), 0o644)
			if err == nil {
				for _, c := range s.own() {
					if isKept(c) {
						err = errors.Join(err, durable.Remove(c.Path))
					}
				}
			}
			return err
		}
		return append(changes, file), nil
	}
}

// checkState returns the state directory. If unwind's conflist names another one, whose journal
// contains attachments or cannot be read, that is an error: no sweep would find those attachments.
func (s Setup) checkState(ctx context.Context) (string, error) {
	old := s.Entry()
	dir, is := s.stateDir(), cmp.Or(old.StateDir, netconf.DefaultStateDir)
	if dir == is || old.ChainFile == "" {
		return dir, nil
	}
	attachments, err := inspect.ReadJournal(ctx, &journal.Store{Dir: is})
	if err != nil {
		return "", term.WithHint("install with --state-dir "+is+" to keep that journal; unwindctl "+
			"doctor --state-dir "+is+" reports how to repair it", "changing the state directory could lose "+
			"the attachments in %s, because its journal cannot be read: %w", is, err)
	}
	if len(attachments) > 0 {
		return "", term.WithHint("keep that state directory, or change it once unwindctl list "+
			"--state-dir "+is+" shows no attachments",
			"the journal in %s contains %s, which no sweep would find if you changed the state "+
				"directory",
			is, term.Attachments(len(attachments)))
	}
	return dir, nil
}

func (s Setup) repair(context.Context) ([]*Change, error) { return s.repairs() }

// takeOut is the step that takes unwind's conflist out of use, even if other programs have added
// plugins to it. It renames the file, so that the next install finds the file's configuration. If
// the rename fails, for example on a full disk, it removes the file.
func (s Setup) takeOut(context.Context) (changes []*Change, err error) {
	_, missing := os.Lstat(s.Path())
	at, _ := netconf.ReadConflist(s.Path())
	if Broken(s.Path()) {
		changes = append(changes, remove(s.Path(), ""))
	} else if !ours(at) && !errors.Is(missing, fs.ErrNotExist) {
		hint := "rename it, or choose another name with --unwind-file"
		if at != nil && at.Unwind != nil {
			hint = takeOutHint(at)
		}
		return nil, term.WithHint(hint, "%s was not written by unwindctl, so unwindctl does "+
			"not change it", s.Path())
	}
	stuck := func(err error) error {
		return term.WithHint("unwind is still in use; run this again once "+s.ConfDir+" is writable",
			"%w", err)
	}
	if err := unix.Access(s.ConfDir, unix.W_OK); at != nil && err != nil {
		return nil, stuck(fmt.Errorf("%s: %w", s.ConfDir, err))
	}
	kept := ""
	for _, c := range s.own() {
		off := c.Path + node.OffSuffix
		if isKept(c) {
			kept += "; unwindctl on restores it from " + c.Path
			continue
		}
		changes = append(changes, &Change{Change: "renamed", What: c.Path + " to " + off,
			apply: func(done *Change) error {
				if durable.Rename(c.Path, off) == nil {
					return nil
				}
				done.Change, done.What = "removed", c.Path
				if err := durable.Remove(c.Path); err != nil {
					return stuck(err)
				}
				return nil
			}})
	}
	if changes == nil {
		changes = []*Change{{Change: "off", What: "unwind is not in use: there is no " + s.Path() + kept}}
	}
	return changes, nil
}

// takeBack is the step that replaces cilium's suffix with OffSuffix, if cilium has renamed unwind's
// conflist. Otherwise, in chaining mode, cilium may copy the renamed file, and the copy would run
// unwind.
func (s Setup) takeBack(context.Context) ([]*Change, error) {
	path := s.renamed()
	if path == "" {
		return nil, nil
	}
	off := strings.TrimSuffix(path, renamedBy) + node.OffSuffix
	return []*Change{{Change: "renamed", What: path + " to " + off,
		apply: func(*Change) error { return durable.Rename(path, off) }}}, nil
}

// Remove takes unwind out of use. If it cannot repair other programs' files, it still takes
// unwind's conflist out of use, and returns the error.
func (s Setup) Remove(ctx context.Context, done *Changes) error {
	err := done.try(ctx, s.repair)
	return errors.Join(err, done.Make(ctx, s.takeOut))
}
