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
// that has unwind in it) and the state directory that unwind's conflist names.
func (w *Directories) Resolve() (err error) {
	dirs := []string{w.ConfDir}
	if w.ConfDir == "" {
		dirs = nil
		found, _ := Find("/") // what of it cannot be read is told by doctor
		for _, r := range found {
			dirs = append(dirs, r.ConfDir)
		}
		dirs = append(dirs, DefaultConfDir)
	}
	named := ""
	w.ConfDir = dirs[0]
	for _, dir := range dirs {
		if c := installedIn(dir); c != nil {
			w.ConfDir, named = dir, c.Unwind.StateDir
			break
		}
	}
	w.StateDir, err = filepath.Abs(cmp.Or(w.StateDir, named, netconf.DefaultStateDir))
	return err
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
