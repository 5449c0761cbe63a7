package install

import (
	"fmt"
	"path/filepath"
	"slices"

	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/netconf"
)

// Mesh is the plugin of a mesh on a node. Its installer adds it to conflists of the directory, at
// its start and whenever one changes.
type Mesh struct {
	Name string
	file string // ours
}

// Meshes returns the meshes whose plugin is in a conflist of the directory or among the plugins.
func Meshes(s Setup, binDirs []string) (found []Mesh) {
	paths, _ := netconf.Conflists(s.ConfDir)
	for _, name := range known.Names(func(p *known.Plugin) bool { return p.IsMesh }) {
		if slices.ContainsFunc(paths, func(path string) bool {
			c, _ := netconf.ReadConflist(path)
			return c != nil && slices.Contains(c.Types, name)
		}) || slices.ContainsFunc(binDirs, func(dir string) bool {
			return durable.Exists(filepath.Join(dir, name))
		}) {
			found = append(found, Mesh{name, filepath.Base(s.Path())})
		}
	}
	return found
}

// Patches reports whether the installer may take our file for the provider's.
func (m Mesh) Patches() bool { return filepath.Ext(m.file) == ".conflist" }

// String returns a sentence about it.
func (m Mesh) String() string {
	if m.Patches() {
		return fmt.Sprintf("%s is on this node: its installer may put it behind unwind in %s, and "+
			"does not see a --file that ends in .json", m.Name, m.file)
	}
	return fmt.Sprintf("%s is on this node: its installer does not see %s, and patches the "+
		"provider's file, whose chain unwind runs", m.Name, m.file)
}
