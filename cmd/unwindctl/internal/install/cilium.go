package install

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/plugin/netconf"
)

const cilium = "cilium-cni"

// Copy is a conflist that cilium's agent writes each time it starts, if cni-chaining-target is set.
// It is a copy of the directory's first file for that network, with cilium-cni appended (cilium
// daemon/cmd/cni/config.go findCNINetwork). Our file is for that network and comes first.
type Copy struct {
	file   *netconf.Conflist // cilium's file
	target *netconf.Conflist // the provider's, which cilium would copy without ours; nil if missing
}

// CiliumCopy returns the conflist that cilium seems to have made as a copy, or nil. Such a conflist
// is for the same network as another file, and cilium-cni is its last plugin.
func (s Setup) CiliumCopy() *Copy {
	files, _ := netconf.Conflists(s.ConfDir)
	aside, _ := filepath.Glob(filepath.Join(s.ConfDir, "*"+renamedBy)) // cilium also reads these
	var copied *Copy
	var others []*netconf.Conflist
	for _, path := range slices.Concat(files, aside) {
		c, _ := netconf.ReadConflist(path)
		switch {
		case c == nil:
		case slices.Index(c.Types, cilium) > 0 && copied == nil:
			copied = &Copy{file: c}
		case c.Unwind == nil && !slices.Contains(c.Types, cilium):
			others = append(others, c)
		}
	}
	if copied == nil {
		return nil
	}
	if i := slices.IndexFunc(others, func(c *netconf.Conflist) bool {
		return c.Name == copied.file.Name
	}); i >= 0 {
		copied.target = others[i]
	}
	if copied.target == nil && !copied.OfOurs() {
		return nil
	}
	return copied
}

// OfOurs reports whether cilium has copied our file. unwind is then in the copy, and may call
// itself.
func (c *Copy) OfOurs() bool { return ours(c.file) }

// Chosen reports whether our file names cilium's file as its chain, which needs --provider-conf.
func (c *Copy) Chosen(by Setup) bool { return !c.OfOurs() && by.Entry().ChainFile == c.file.Path }

func (c *Copy) Obstacle() *Obstacle {
	const remedy = "give cilium its own conflist (cni.customConf) instead of cni.chainingTarget, " +
		"or do not use unwind; see scripts/providers/cilium.md"
	if c.OfOurs() {
		return NewObstacle(CiliumChaining, "run unwindctl uninstall, then "+remedy,
			"cilium copied unwind's file to %s, because cni-chaining-target is set: "+
				"unwind would run inside itself, or cilium would not run", c.file.Path)
	}
	return NewObstacle(CiliumChaining, remedy+"; if that file is cilium's own conflist, set "+
		"--provider-conf "+c.file.Path, "cni-chaining-target is set, so cilium seems to copy the first "+
		"conflist of network %q into %s at every start; after an install, it would copy unwind's "+
		"conflist", c.file.Name, c.file.Path)
}

// renamedBy is the suffix that cilium adds to the names of other files if cni.exclusive is set.
const renamedBy = ".cilium_bak"

// renamed returns the path of our file if cilium has renamed it and there is no new one, else "".
func (s Setup) renamed() string {
	paths, _ := filepath.Glob(filepath.Join(s.ConfDir, "*"+renamedBy))
	for _, path := range paths {
		if c, _ := netconf.ReadConflist(path); ours(c) && !durable.Exists(s.Path()) {
			return path
		}
	}
	return ""
}

// takeOut replaces cilium's file with a copy of the provider's file, and returns a sentence about
// it.
func (c *Copy) takeOut() (string, error) {
	if c.target == nil {
		return "", fmt.Errorf("%s still contains unwind: restart cilium's agent on this node",
			c.file.Path)
	}
	list, plugins, err := asList(c.target)
	if err != nil {
		return "", err
	}
	_, own, err := asList(c.file)
	if err != nil {
		return "", err
	}
	for i, plugin := range own {
		if c.file.Types[i] == cilium {
			plugins = append(plugins, plugin)
		}
	}
	list["plugins"] = raw(plugins)
	like, err := os.Lstat(c.file.Path)
	if err == nil {
		err = durable.ReplaceLike(c.file.Path, bytes.NewReader(raw(list)), like)
	}
	return fmt.Sprintf("restored %s as a copy of %s with cilium-cni at its end", c.file.Path,
		c.target.Path), err
}

// asList is like splitList, but first makes a list of a single plugin's configuration, as cilium
// does.
func asList(c *netconf.Conflist) (
	list map[string]json.RawMessage, plugins []json.RawMessage, err error,
) {
	if list = netconf.ObjectOf(c.Data); list["plugins"] != nil {
		return splitList(c)
	}
	list = map[string]json.RawMessage{"name": raw(c.Name), "cniVersion": raw(c.CNIVersion)}
	return list, []json.RawMessage{c.Data}, nil
}
