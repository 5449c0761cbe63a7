package node

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
)

// Directories are the directories of the conflists and of the journal. Until Resolve is called, the
// fields contain the values of the flags, or "" for a flag that is not set.
type Directories struct{ ConfDir, StateDir string }

// Resolve sets each directory that is "". ConfDir becomes the runtimes' first conflist directory
// that contains unwind's conflist, or else their first one. StateDir becomes the one in unwind's
// conflist, or else the default. Resolve queries the runtimes only if none of their usual
// directories contains unwind's conflist: a query makes containerd 2 run STATUS, which sweeps. If
// no directory was set, Resolve returns an error in a container that has no runtime, no conflist
// and no journal, because that container does not show the state of the node.
func (w *Directories) Resolve(ctx context.Context) error {
	given := *w != Directories{}
	if err := w.resolve(ctx, "/"); err != nil || given || !w.empty() || !inContainer() {
		return err
	}
	if found, _ := Read("/"); len(found) > 0 {
		return nil
	}
	return term.WithHint("run this on the node, or as unwindctl --host in a pod with hostPID: true "+
		"and privileged: true", "this container has neither a conflist in %s nor a journal in %s, "+
		"so it does not show the state of the node", w.ConfDir, w.StateDir)
}

func (w *Directories) resolve(ctx context.Context, root string) (err error) {
	var ours []*netconf.Conflist
	if w.ConfDir != "" {
		ours, _ = installedIn(w.ConfDir)
	} else {
		found, _ := Read(root)
		if w.ConfDir, ours = firstInstalled(found, root); ours == nil {
			found, _ = Find(ctx, root)
			w.ConfDir, ours = firstInstalled(found, root)
		}
	}
	named := ""
	if ours != nil {
		named = ours[0].Unwind.StateDir
	}
	w.StateDir, err = filepath.Abs(cmp.Or(w.StateDir, named, netconf.DefaultStateDir))
	return err
}

// firstInstalled returns the runtimes' first directory that contains conflists with unwind, and
// these conflists. If there is none, it returns the first directory and nil.
func firstInstalled(found []Runtime, root string) (dir string, ours []*netconf.Conflist) {
	dirs := confDirs(found)
	for _, dir := range dirs {
		if ours, _ = installedIn(filepath.Join(root, dir)); ours != nil {
			return dir, ours
		}
	}
	return dirs[0], nil
}

// confDirs returns the conflist directories of runtimes, and the default one.
func confDirs(found []Runtime) (dirs []string) {
	for _, r := range append(found, Runtime{ConfDir: DefaultConfDir}) {
		if !slices.Contains(dirs, r.ConfDir) {
			dirs = append(dirs, r.ConfDir)
		}
	}
	return dirs
}

// All returns ConfDir, followed by the other runtimes' conflist directories and the default one. If
// ConfDir is neither a runtime's directory nor the default one, All returns only ConfDir.
func (w *Directories) All() []string {
	found, _ := Read("/")
	all := confDirs(found)
	at := slices.Index(all, w.ConfDir)
	if at < 0 {
		return []string{w.ConfDir}
	}
	return slices.Insert(slices.Delete(all, at, at+1), 0, w.ConfDir)
}

func (w *Directories) empty() bool {
	for _, dir := range w.All() {
		if paths, err := netconf.Conflists(dir); len(paths) > 0 || err != nil {
			return false
		}
	}
	_, err := os.Lstat((&journal.Store{Dir: w.StateDir}).Path())
	return errors.Is(err, fs.ErrNotExist)
}

// OnHost reports whether this process is in the mount and network namespaces of process 1. It also
// returns true if it lacks permission to check.
func OnHost() bool {
	for _, kind := range []string{"mnt", "net"} {
		ours, err := os.Readlink("/proc/self/ns/" + kind)
		first, firstErr := os.Readlink("/proc/1/ns/" + kind)
		if err == nil && firstErr == nil && ours != first {
			return false
		}
	}
	return true
}

// firstPIDNS is the kernel's first PID namespace (PROC_PID_INIT_INO in include/linux/proc_ns.h).
const firstPIDNS = "pid:[4026531836]"

// inContainer reports whether this process is outside the machine's first PID namespace, or outside
// the namespaces of process 1 (see OnHost).
func inContainer() bool {
	own, _ := os.Readlink("/proc/self/ns/pid")
	return own != firstPIDNS || !OnHost()
}

// BinPath returns the plugin directories of all runtimes, and DefaultBinDir, in CNI_PATH's format.
func BinPath(ctx context.Context) string {
	found, _ := Find(ctx, "/")
	dirs := BinDirs(append(found, Runtime{BinDirs: []string{DefaultBinDir}}))
	return strings.Join(dirs, string(filepath.ListSeparator))
}

// BinDirs returns the plugin directories of runtimes.
func BinDirs(found []Runtime) (dirs []string) {
	for _, r := range found {
		for _, dir := range r.BinDirs {
			if !slices.Contains(dirs, dir) {
				dirs = append(dirs, dir)
			}
		}
	}
	return dirs
}

// OffSuffix is the suffix that unwindctl off appends to the name of unwind's conflist, so that no
// runtime loads the file.
const OffSuffix = ".off"

// OffName is the file in the state directory that switches unwind off (see install.OffName).
const OffName = "off"

// Installed returns the conflists that run unwind, in dir and in the usual directories of all
// runtimes. In each directory, conflists that unwindctl off has renamed come last.
func Installed(dir string) (found []*netconf.Conflist, err error) {
	runtimes, _ := Read("/")
	dirs := append(confDirs(runtimes), dir)
	slices.Sort(dirs)
	for _, dir := range slices.Compact(dirs) {
		more, readErr := installedIn(dir)
		found, err = append(found, more...), errors.Join(err, readErr)
	}
	return found, err
}

func installedIn(dir string) (found []*netconf.Conflist, err error) {
	paths, err := netconf.Conflists(dir)
	off, _ := filepath.Glob(filepath.Join(dir, "*"+OffSuffix))
	for _, path := range slices.Concat(paths, off) {
		if c, _ := netconf.ReadConflist(path); c != nil && c.Unwind != nil {
			found = append(found, c)
		}
	}
	return found, err
}
