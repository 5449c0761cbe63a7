package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"cni-unwind/journal"
	"cni-unwind/plugin"
)

// ownFile is the default name of our conflist: it sorts first, and the runtime takes the first.
const ownFile = "00-unwind.conflist"

// installation is unwind put in front of a runtime's network: its binary, and a conflist that sorts first and names the
// provider's as its chain. The provider's file is never written to.
type installation struct {
	ConfDir, BinDir string // of the runtime
	Source          string // the provider's conflist, "" = the first of ConfDir that is not ours
	File            string // our conflist's name, default 00-unwind.conflist
	Binary          string // the plugin to install, default: `unwind` beside this program; may be a /proc/self/fd/N path
	StateDir        string // "" = plugin's default, or what our conflist has
	Observe         bool   // journal only: no sweep on STATUS, and GC does nothing
}

// path is that of our conflist.
func (i installation) path() string { return filepath.Join(i.ConfDir, cmp.Or(i.File, ownFile)) }

// refusal is an error that leaves everything as it was, with what to do about it.
type refusal struct {
	error
	hint string
}

func (r *refusal) Hint() string  { return r.hint }
func (r *refusal) Unwrap() error { return r.error }

func refuse(hint, format string, args ...any) error {
	return &refusal{fmt.Errorf(format, args...), hint}
}

// wrapping is what our conflist is to be.
type wrapping struct {
	path     string           // of our conflist
	source   *plugin.Conflist // the provider's
	chain    *plugin.Chain
	content  []byte
	changed  bool        // from what is there
	there    fs.FileInfo // of what is there, nil if nothing
	warnings []string
}

// wrap computes our conflist from the provider's as both are now. Nothing is written.
func (i installation) wrap() (*wrapping, error) {
	w := &wrapping{path: i.path()}
	old, err := w.readOwn()
	if err != nil {
		return nil, err
	}
	if err := i.checkFolder(w); err != nil {
		return nil, err
	}
	if err := i.readSource(w); err != nil {
		return nil, err
	}
	w.content, err = i.conflist(w, old)
	if err != nil {
		return nil, err
	}
	w.changed = old == nil || !sameJSON(old.Data, w.content)
	return w, nil
}

// writeConflist puts our conflist into place, whole, with which unwind is in use. If it is there and means the same, nothing
// is done.
func (i installation) writeConflist() (changed bool, err error) {
	w, err := i.wrap()
	if err != nil || !w.changed {
		return false, err
	}
	if err := i.prepareState(); err != nil {
		return false, err
	}
	return true, replaceFile(w.path, bytes.NewReader(w.content), nil)
}

// prepareState makes the state folder, so that one that cannot be is told now and not by each pod. A journal that has attachments
// is not left for another one: nobody would release them.
func (i installation) prepareState() error {
	is := i.stateDir()
	dir := cmp.Or(i.StateDir, is)
	if dir != is && exists(i.path()) {
		attachments, err := readJournal(context.Background(), &journal.Store{Dir: is})
		if err != nil || len(attachments) > 0 {
			return refuse("leave it there, or wait until unwindctl list --state-dir "+is+" is empty", "the journal in %s has %s: with another state folder nobody would release them",
				is, attachmentsOf(len(attachments)))
		}
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return refuse("give another with --state-dir", "the state folder: %w", err)
	}
	return nil
}

// remove removes our conflist, with which unwind is not in use any more. None is no error.
func (i installation) remove() error {
	w := &wrapping{path: i.path()}
	c, err := w.readOwn()
	if err != nil || c == nil {
		return err
	}
	return removeFile(w.path)
}

// readOwn reads our conflist, nil if there is none. What is in its place and not recognisably ours is somebody's.
func (w *wrapping) readOwn() (*plugin.Conflist, error) {
	var err error
	if w.there, err = os.Lstat(w.path); errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	c, err := plugin.ReadConflist(w.path)
	switch {
	case c != nil && len(c.Types) > 1 && c.Types[0] == plugin.Name && c.Unwind.ChainFile != "":
		return nil, refuse(fmt.Sprintf("remove it, and have that program write to %s; istio-cni does with cniConfFileName", c.Unwind.ChainFile),
			"%s is unwind's, but another program has put %s behind it", w.path, strings.Join(c.Types[1:], ", "))
	case c == nil || !ours(c):
		return nil, refuse("move it away, or choose another name with --file", "%s is not a conflist that unwindctl wrote: left alone", w.path)
	case err != nil:
		return nil, refuse("mend it; to switch unwind off at once: rm "+w.path, "%s: %w", w.path, err)
	}
	return c, nil
}

// ours says whether a conflist is one that unwindctl wrote: unwind alone in it, with somebody else's file as its chain.
func ours(c *plugin.Conflist) bool {
	return len(c.Types) == 1 && c.Types[0] == plugin.Name && c.Unwind != nil && c.Unwind.ChainFile != ""
}

// checkFolder sees that our conflist will be the one that the runtime takes, and the only one of unwind's.
func (i installation) checkFolder(w *wrapping) error {
	dir, err := os.Stat(i.ConfDir)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !dir.IsDir() {
		return refuse("give the runtime's with --conf-dir; a provider that is still to come makes it", "there is no folder %s of conflists", i.ConfDir)
	} else if err != nil {
		return err
	}
	w.warnWritable(i.ConfDir, dir)
	paths, err := plugin.Conflists(i.ConfDir)
	if err != nil {
		return err
	}
	for _, path := range paths {
		if path == w.path {
			continue
		}
		if c, _ := plugin.ReadConflist(path); c != nil && c.Unwind != nil {
			if ours(c) {
				return refuse("unwindctl uninstall --file "+filepath.Base(path), "unwind is installed already, by %s", path)
			}
			return refuse("put the provider's conflist back in its place first", "%s runs unwind already", path)
		}
		if filepath.Base(path) < filepath.Base(w.path) {
			return refuse(nameBefore(filepath.Base(path)), "%s would not be the first conflist: the runtime would still take %s",
				filepath.Base(w.path), path)
		}
	}
	return nil
}

// nameBefore advises a name of our conflist that sorts before a given one. Multus takes the first conflist for the cluster's
// network, except those that begin with 00-multus (multus pkg/server/config/generator.go findMasterPlugin): ours must not be
// what it calls.
func nameBefore(other string) string {
	candidates := []string{ownFile, "00--unwind.conflist", "0--unwind.conflist", "+unwind.conflist"}
	if strings.HasPrefix(other, "00-multus") {
		candidates = []string{"00-multus-unwind.conflist"}
	}
	for _, name := range candidates {
		if name < other {
			return "--file " + name + " sorts before it"
		}
	}
	return "rename it, so that a --file sorts before it"
}

// readSource reads the provider's conflist, and the chain in it as unwind would.
func (i installation) readSource(w *wrapping) error {
	path := i.Source
	if path == "" {
		paths, err := plugin.Conflists(i.ConfDir)
		if err != nil {
			return err
		}
		paths = slices.DeleteFunc(paths, func(p string) bool { return p == w.path })
		if len(paths) == 0 {
			return refuse("install again when the network's provider has written one", "no conflist in %s to wrap", i.ConfDir)
		}
		path = paths[0]
	}
	path, err := filepath.Abs(path)
	if err != nil {
		return err
	}
	const half = "if its provider is just writing it, try again; else mend it: the runtime cannot use it either"
	if w.source, err = plugin.ReadConflist(path); err != nil && (w.source == nil || w.source.Unwind == nil) {
		return refuse(half, "%s: %w", path, err)
	}
	switch {
	case path == w.path || w.source.Unwind != nil || names(w.source.Data, w.path):
		return refuse("wrap the conflist of the network's provider", "%s runs unwind itself", path)
	case w.source.Name == "":
		return refuse(half, "%s: key \"name\" is missing", path)
	}
	if w.chain, err = (&plugin.Conf{Name: w.source.Name, ChainFile: path}).LoadChain(); err != nil {
		return refuse("unwind cannot run this chain; nothing was changed", "%w", err)
	}
	if info, err := os.Stat(path); err == nil {
		w.warnWritable(path, info)
	}
	w.warnProviders()
	return nil
}

// names says whether there is unwind, or our conflist, somewhere in a configuration: multus has its delegates inside its own
// ("delegates"), or the path of one ("clusterNetwork"), and would call unwind from within it.
func names(data []byte, own string) bool {
	var value any
	if json.Unmarshal(data, &value) != nil {
		return false
	}
	var in func(any) bool
	in = func(value any) bool {
		switch v := value.(type) {
		case map[string]any:
			network, _ := v["clusterNetwork"].(string)
			if v["type"] == plugin.Name || own != "" && filepath.Base(network) == filepath.Base(own) {
				return true
			}
			return slices.ContainsFunc(slices.Collect(maps.Values(v)), in)
		case []any:
			return slices.ContainsFunc(v, in)
		}
		return false
	}
	return in(value)
}

// warnWritable warns of what others than root can write to: the runtime runs as root what it says.
func (w *wrapping) warnWritable(path string, info fs.FileInfo) {
	if info.Mode().Perm()&0o022 != 0 {
		w.warnings = append(w.warnings, fmt.Sprintf("%s can be written to by others than root (mode %04o), who decide so what runs as root: "+
			"chmod go-w %s", path, info.Mode().Perm(), path))
	}
}

// warnProviders warns of providers that do not leave other conflists alone.
func (w *wrapping) warnProviders() {
	for _, d := range w.chain.Delegates {
		switch d.Type {
		case "cilium-cni":
			w.warnings = append(w.warnings, "cilium renames the other conflists of the folder, unwind's too, unless it is installed with cni.exclusive=false")
		case "multus", "multus-shim":
			w.warnings = append(w.warnings, "multus may take unwind's conflist for the cluster's network, and call itself through it: name that "+
				"network's file in its multusMasterCNI or --multus-master-cni-file-name")
		}
	}
}
