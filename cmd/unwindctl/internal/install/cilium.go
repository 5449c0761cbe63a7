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

// Copy is a conflist that cilium's agent makes at each of its starts, if it has a
// cni-chaining-target: the first file of that network's name in the directory, with cilium-cni at
// its end (cilium daemon/cmd/cni/config.go findCNINetwork). Ours has that name and comes first.
type Copy struct {
	file   *netconf.Conflist // cilium's
	target *netconf.Conflist // the provider's, which it copies without ours; nil if it is not there
}

// CiliumCopy returns the conflist in the directory that cilium seems to have copied, or nil: it is
// of the same network as another file, and cilium-cni is at its end.
func (s Setup) CiliumCopy() *Copy {
	files, _ := netconf.Conflists(s.ConfDir)
	aside, _ := filepath.Glob(filepath.Join(s.ConfDir, "*"+renamedBy)) // cilium reads them too
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

// OfOurs reports whether cilium has copied our file: unwind is in it, where it may call itself.
func (c *Copy) OfOurs() bool { return ours(c.file) }

// Chosen reports whether our file names cilium's as its chain, as only --provider-conf makes it do.
func (c *Copy) Chosen(by Setup) bool { return !c.OfOurs() && by.Entry().ChainFile == c.file.Path }

func (c *Copy) Obstacle() *Obstacle {
	const remedy = "give cilium its own conflist (cni.customConf) instead of cni.chainingTarget, " +
		"or do not use unwind: scripts/providers/cilium.md"
	if c.OfOurs() {
		return NewObstacle(CiliumChaining, "unwindctl uninstall; then "+remedy,
			"cilium copied unwind's file to %s, for its cni-chaining-target: "+
				"unwind would run inside itself, or cilium would not run", c.file.Path)
	}
	return NewObstacle(CiliumChaining, remedy+"; if it is such a conflist: --provider-conf "+
		c.file.Path, "cilium seems to copy the first file of network %q into %s on every start, for its "+
		"cni-chaining-target: unwind's file would be the first", c.file.Name, c.file.Path)
}

// renamedBy is what cilium adds to the names of other files if it has cni.exclusive.
const renamedBy = ".cilium_bak"

// renamed returns the path of our file if cilium has renamed it and there is no new one, else "".
func (s Setup) renamed() string {
	for _, path := range []string{s.Path(), s.otherForm()} {
		c, _ := netconf.ReadConflist(path + renamedBy)
		if ours(c) && !durable.Exists(s.Path()) {
			return path + renamedBy
		}
	}
	return ""
}

// takeOut makes cilium's file a copy of the provider's, and returns a sentence about that.
func (c *Copy) takeOut() (string, error) {
	if c.target == nil {
		return "", fmt.Errorf("unwind is left in %s: restart cilium's agent on this node",
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
	return fmt.Sprintf("%s is again a copy of %s with cilium-cni at its end", c.file.Path,
		c.target.Path), err
}

// asList is splitList that makes a list of the configuration of one plugin, as cilium does.
func asList(c *netconf.Conflist) (
	list map[string]json.RawMessage, plugins []json.RawMessage, err error,
) {
	if list = netconf.ObjectOf(c.Data); list["plugins"] != nil {
		return splitList(c)
	}
	list = map[string]json.RawMessage{"name": raw(c.Name), "cniVersion": raw(c.CNIVersion)}
	return list, []json.RawMessage{c.Data}, nil
}
