package node

import (
	"cmp"
	"path/filepath"

	"cni-unwind/plugin/netconf"
)

// Directories are those of the conflists and of the journal. Before Resolve they are as given, ""
// for the default.
type Directories struct{ ConfDir, StateDir string }

// Resolve fills in what was not given: the runtime's directory of conflists (of several, the one
// that has unwind in it) and the state directory that unwind's conflist names. The runtimes are
// asked only if unwind is in none of the directories of their configuration: an answer of
// containerd 2 includes a STATUS, which sweeps.
func (w *Directories) Resolve() error { return w.resolve("/") }

func (w *Directories) resolve(root string) (err error) {
	var ours *netconf.Conflist
	if w.ConfDir != "" {
		ours = installedIn(w.ConfDir)
	} else if w.ConfDir, ours = firstInstalled(root, read); ours == nil {
		w.ConfDir, ours = firstInstalled(root, Find)
	}
	named := ""
	if ours != nil {
		named = ours.Unwind.StateDir
	}
	w.StateDir, err = filepath.Abs(cmp.Or(w.StateDir, named, netconf.DefaultStateDir))
	return err
}

// firstInstalled returns the first runtime's directory of conflists that has unwind in it, with that
// conflist, or else the first directory. What of the runtimes cannot be read is told by doctor.
func firstInstalled(root string, find func(string) ([]Runtime, error)) (
	dir string, ours *netconf.Conflist,
) {
	found, _ := find(root)
	found = append(found, Runtime{ConfDir: DefaultConfDir})
	for _, r := range found {
		if ours = installedIn(filepath.Join(root, r.ConfDir)); ours != nil {
			return r.ConfDir, ours
		}
	}
	return found[0].ConfDir, nil
}

// installedIn returns the first conflist of a directory that has unwind in it, or nil.
func installedIn(dir string) *netconf.Conflist {
	paths, _ := netconf.Conflists(dir)
	for _, path := range paths {
		if c, _ := netconf.ReadConflist(path); c != nil && c.Unwind != nil {
			return c
		}
	}
	return nil
}
