package node

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"cni-unwind/cmd/internal/term"
)

// Find returns the runtimes whose configuration, state directory or socket is on this machine below
// root ("/" but in tests). Their directories are those that they tell over CRI, else those of their
// configuration. A configuration that would be needed and cannot be read is an error beside the
// others.
func Find(root string) ([]Runtime, error) { return find(root, (*Runtime).ask) }

// read returns the runtimes as their configuration describes them, and asks none.
func read(root string) ([]Runtime, error) {
	return find(root, func(*Runtime, string) bool { return false })
}

// find returns the runtimes of a machine. Another one is a function in a file of its own, and a
// name in this list.
func find(root string, ask func(*Runtime, string) bool) ([]Runtime, error) {
	var found []Runtime
	var errs []error
	for _, look := range []func(string) (*Runtime, error){
		findContainerd, findCRIO, findK3s, findRKE2, findMicroK8s, findK0s, findTalos, findNerdctl,
		findPodman, findNomad,
	} {
		r, err := look(root)
		if r != nil && ask(r, root) {
			err = nil
		}
		errs = append(errs, err)
		if r != nil {
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
	if name != "" {
		for _, r := range found {
			if r.Name == name {
				return r, nil
			}
		}
		return Runtime{}, term.Usage("runtime %q is not on this machine; found: %s", name,
			term.OrDash(namesOf(found)))
	}
	if len(found) == 0 {
		return Runtime{ConfDir: DefaultConfDir, BinDirs: []string{DefaultBinDir}, MaxConfs: 1}, nil
	}
	for _, r := range found[1:] {
		if r.ConfDir != found[0].ConfDir || r.BinDirs[0] != found[0].BinDirs[0] {
			return Runtime{}, severalError(found)
		}
	}
	one := found[0]
	for _, r := range found[1:] {
		one.Problems = append(slices.Clone(one.Problems), r.Problems...)
		one.Notes = append(slices.Clone(one.Notes), r.Notes...)
	}
	return one, nil
}

func namesOf(found []Runtime) string {
	var names []string
	for _, r := range found {
		names = append(names, r.Name)
	}
	return strings.Join(names, ", ")
}

// severalError returns the error for runtimes between which somebody has to choose.
func severalError(found []Runtime) error {
	var text strings.Builder
	fmt.Fprintf(&text, "this machine has several runtimes with different directories:")
	for _, r := range found {
		fmt.Fprintf(&text, "\n  %s: conflists in %s, plugins in %s", r.Name, r.ConfDir,
			strings.Join(r.BinDirs, ", "))
	}
	return term.WithHint("choose one with --runtime "+found[0].Name, "%s", &text)
}
