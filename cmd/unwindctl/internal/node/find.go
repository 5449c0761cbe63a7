package node

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"cni-unwind/cmd/internal/term"
)

// Find returns the runtimes with a configuration, state directory or socket on this machine below
// root, which is "/" outside tests. Their directories are those that they report over CRI, else
// those in their configuration. The error names needed configurations that cannot be read; Find
// still returns the other runtimes.
func Find(root string) ([]Runtime, error) { return find(root, (*Runtime).ask) }

// read returns the runtimes as their configuration describes them, and asks none.
func read(root string) ([]Runtime, error) {
	return find(root, func(*Runtime, string) bool { return false })
}

// find returns the runtimes of a machine. To add a runtime, write a function in its own file, or a
// row of bundles.
func find(root string, ask func(*Runtime, string) bool) ([]Runtime, error) {
	looks := []func(string) (*Runtime, error){findContainerd, findCRIO}
	for _, b := range bundles {
		looks = append(looks, b.find)
	}
	var found []Runtime
	var errs []error
	for _, look := range append(looks, findNerdctl, findPodman, findNomad) {
		r, err := look(root)
		if r != nil && ask(r, root) {
			err = nil
		}
		errs = append(errs, err)
		if r != nil {
			if r.ByName() {
				r.Notes = append(r.Notes, r.Name+
					" finds each network by its name, in its own file: --conf selects the one to wrap")
			}
			r.settle(root)
			r.Check(root)
			found = append(found, *r)
		}
	}
	return found, errors.Join(errs...)
}

// Choose returns the runtime of that name, or the only one. Several that share their directories
// count as one.
func Choose(found []Runtime, name string) (Runtime, error) {
	var names []string
	several := "this machine has several runtimes with different directories:"
	for _, r := range found {
		if names = append(names, r.Name); r.Name == name {
			return r, nil
		}
		several += fmt.Sprintf("\n  %s: conflists in %s, plugins in %s", r.Name, r.ConfDir,
			strings.Join(r.BinDirs, ", "))
	}
	if name != "" {
		return Runtime{}, term.Usage("runtime %q is not on this machine; found: %s", name,
			term.Join(names))
	}
	if len(found) == 0 {
		return Runtime{ConfDir: DefaultConfDir, BinDirs: []string{DefaultBinDir}, MaxConfs: 1}, nil
	}
	one := found[0]
	for _, r := range found[1:] {
		if r.ConfDir != one.ConfDir || r.BinDirs[0] != one.BinDirs[0] {
			return Runtime{}, term.WithHint("choose one with --runtime "+one.Name, "%s", several)
		}
		one.Problems = append(slices.Clone(one.Problems), r.Problems...)
		one.Notes = append(slices.Clone(one.Notes), r.Notes...)
	}
	return one, nil
}
