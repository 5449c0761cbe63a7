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

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/journal"
)

// Step is a part of install, off, on or uninstall. When its turn comes, it looks at the node and
// returns the changes that it would make. It changes nothing itself.
type Step func(context.Context) ([]*Change, error)

// Change is one change to the node, or something that stays as it is.
type Change struct {
	Change string `json:"change"` // a key of infinitives, or unchanged, kept, pending, next
	What   string `json:"what"`   // "" to not print the change

	path    string              // of a repaired file
	content string              // of a written file; only a dry run prints it
	again   bool                // it was made before
	apply   func(*Change) error // nil if there is nothing to do; it may change the texts
}

// infinitives are the words of a dry run for the changes that are made.
var infinitives = map[string]string{"written": "write", "changed": "change",
	"renamed": "rename", "removed": "remove", "off": "switch unwind off:", "on": "switch unwind on;"}

// Changes lists the changes that were made or, in a dry run, would be made.
type Changes struct {
	DryRun bool
	List   []*Change
}

// Make takes the steps in order, up to the first error.
func (c *Changes) Make(ctx context.Context, steps ...Step) error { return c.take(ctx, true, steps) }

// try takes all steps in order, and returns their errors.
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

// Of returns what was changed in this way.
func (c *Changes) Of(change string) (what []string) {
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

// Record adds an event to the history if a change was made. why is the error with which the command
// ended, or nil.
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

// Record adds an event to the history, if the state directory exists. No command fails because of
// it: a disk that is full has no history.
func Record(stateDir string, kind journal.EventKind, by string) {
	dir, err := filepath.Abs(stateDir)
	if err == nil && durable.Exists(dir) {
		_ = (&journal.Store{Dir: dir}).Record(journal.Event{Kind: kind, Reason: "by " + by})
	}
}

// User returns the name of this program with the user who runs it.
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
