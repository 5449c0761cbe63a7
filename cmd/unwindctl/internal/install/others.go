package install

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/plugin/netconf"
)

// repaired is the change to another program's file. Its text names the file and its plugins,
// afterwards and before.
const repaired = "changed"

// repairs returns the changes that remove unwind from the directory's other files, and that move
// plugins out of our file. Installers that copy or edit the directory's first file cause both,
// because that file is ours.
//
//  1. A file that an installer has made from ours gets the plugins of unwind's chain in place of
//     unwind (netconf.ReadProvider).
//  2. A copy of our file is removed: the runtime would load it once ours is gone.
//  3. Plugins that an installer has added to our file, where unwind does not run them, go to the
//     end of the provider's file. The caller then writes or removes ours. A crash in between leaves
//     them in both files, so they run twice rather than not at all.
//
// An error names the files that cannot be changed; the other changes are valid.
func (s Setup) repairs() (all []*Change, err error) {
	paths, err := netconf.Conflists(s.ConfDir)
	own, source := s.addedTo()
	if own != nil && !slices.Contains(paths, source) {
		paths = append(paths, source)
	}
	for _, path := range paths {
		was, _ := netconf.ReadConflist(path)
		if s.isCopy(path) {
			one := remove(path, "")
			one.What, one.path = fmt.Sprintf("%s (a copy of %s)", path, s.Path()), path
			all = append(all, one)
			continue
		}
		if path == s.Path() || path != source && !madeFromOurs(was) {
			continue
		}
		is, readErr := s.readOther(path)
		if readErr == nil && filepath.Ext(path) != ".conflist" {
			readErr = fmt.Errorf("only a .conflist file can contain %s", strings.Join(is.Types, " → "))
		}
		if readErr != nil {
			if path == source {
				readErr = fmt.Errorf("cannot move %s there from %s: %w", strings.Join(own.Types[1:], ", "),
					own.Path, readErr)
			}
			err = errors.Join(err, term.WithHint("replace that file with the provider's conflist", "%s: %w",
				path, readErr))
			continue
		}
		text := fmt.Sprintf("%s: %s", path, strings.Join(is.Types, " → "))
		if was != nil {
			text += fmt.Sprintf(" (previously %s)", strings.Join(was.Types, " → "))
		}
		if path == source {
			text += fmt.Sprintf(", with %s from %s", strings.Join(own.Types[1:], ", "), own.Path)
		}
		all = append(all, &Change{Change: repaired, What: text, path: path, apply: func(*Change) error {
			like, err := os.Stat(path)
			if err != nil || was != nil && sameJSON(was.Data, is.Data) {
				return err
			}
			return durable.ReplaceLike(path, bytes.NewReader(is.Data), like)
		}})
	}
	return all, err
}

// addedTo returns our file if another program has added plugins to it, and the path of the
// provider's file, where they belong.
func (s Setup) addedTo() (own *netconf.Conflist, source string) {
	own, _ = netconf.ReadConflist(s.Path())
	if !ours(own) || len(own.Types) == 1 {
		return nil, ""
	}
	source, _ = filepath.Abs(cmp.Or(s.Source, s.firstOther()))
	return own, source
}

// readOther reads another program's conflist as it is after the repairs.
func (s Setup) readOther(path string) (*netconf.Conflist, error) {
	c, _, err := netconf.ReadProvider(path)
	own, source := s.addedTo()
	if err == nil && own != nil && path == source {
		c, own.Path = own.ReplaceUnwind(c), path
		c.Path = path
	}
	return c, err
}

// madeFromOurs reports whether another program has made a file from ours: with plugins of its own,
// or in place of the provider's file.
func madeFromOurs(c *netconf.Conflist) bool {
	return c != nil && c.Unwind != nil && c.Unwind.ChainFile != "" &&
		(len(c.Types) > 1 || namesItself(c))
}

// keepCopy keeps a copy of the provider's file, for a chainFile that an installer has replaced by a
// file made from ours. A crash leaves the previous copy.
func (s Setup) keepCopy(source *netconf.Conflist) error {
	path := (&netconf.Conf{Name: source.Name, StateDir: s.stateDir()}).Copy()
	if kept, err := netconf.ReadFile(path); err == nil && bytes.Equal(kept, source.Data) {
		return nil
	}
	return durable.Replace(path, bytes.NewReader(source.Data), 0o600)
}
