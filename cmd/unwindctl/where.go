package main

import (
	"cmp"
	"path/filepath"

	"github.com/spf13/cobra"

	"cni-unwind/plugin"
)

// where says in which folders the conflists and the journal are, as given, and once it is resolved as they are.
type where struct{ confDir, stateDir string }

func (w *where) addStateFlag(cmd *cobra.Command) {
	cmd.Flags().StringVar(&w.stateDir, "state-dir", "", "the journal is in `DIR` (default: as unwind's conflist has it, else "+plugin.DefaultStateDir+")")
}

func (w *where) addFlags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&w.confDir, "conf-dir", "", "the conflists, which name the pools of host-local, are in `DIR` (default: the runtime's)")
	w.addStateFlag(cmd)
}

// resolve finds what was not given: the runtime's folder of conflists, of several the one in which unwind is, and the state
// folder that unwind's conflist there names.
func (w *where) resolve() (err error) {
	dirs := []string{w.confDir}
	if w.confDir == "" {
		dirs = nil
		found, _ := findRuntimes("/") // what of it cannot be read is told by doctor
		for _, r := range found {
			dirs = append(dirs, r.ConfDir)
		}
		dirs = append(dirs, defaultConfDir)
	}
	named := ""
	w.confDir = dirs[0]
	for _, dir := range dirs {
		if c := installedIn(dir); c != nil {
			w.confDir, named = dir, c.Unwind.StateDir
			break
		}
	}
	w.stateDir, err = filepath.Abs(cmp.Or(w.stateDir, named, plugin.DefaultStateDir))
	return err
}

// installedIn returns the first conflist of a folder that has unwind in it, or nil.
func installedIn(dir string) *plugin.Conflist {
	paths, _ := plugin.Conflists(dir)
	for _, path := range paths {
		if c, _ := plugin.ReadConflist(path); c != nil && c.Unwind != nil {
			return c
		}
	}
	return nil
}
