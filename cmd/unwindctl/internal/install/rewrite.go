package install

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/plugin/netconf"
)

type Source struct {
	*netconf.Conflist
	arg string // the file's path, not following links, or "-" for the standard input
	bad error  // the problem with unwind's own entry, or nil
}

// Rewrite applies a change to a configuration, and prints the result or replaces the file.
type Rewrite struct {
	Change    func(Source) ([]byte, error) // returns nil if there is nothing to change
	Unchanged string                       // the reason why there is nothing to change
	Changed   string                       // what happened to a file that was replaced
	InPlace   bool                         // write changed files, at the targets of links
	Streams   term.Streams
}

func (r Rewrite) Run(arg string) error {
	shown := arg
	if arg == "-" {
		shown = "stdin"
	}
	err := r.rewrite(arg, shown)
	if err != nil {
		err = fmt.Errorf("%s: %w", shown, err)
	}
	if errors.Is(err, fs.ErrPermission) {
		err = term.WithHint("run this as root", "%w", err)
	}
	return err
}

func (r Rewrite) rewrite(arg, shown string) error {
	path, data, err := r.read(arg)
	if err != nil {
		return err
	}
	src := Source{arg: arg}
	if src.Conflist, src.bad = netconf.ParseConflist(data); src.Conflist == nil {
		return src.bad
	}
	result, err := r.Change(src)
	if err != nil {
		return err
	}
	changed := result != nil
	if !changed {
		fmt.Fprintf(r.Streams.Err, "%s: %s; nothing to change\n", shown, r.Unchanged)
		result = data
	}
	switch {
	case !r.InPlace:
		_, err = r.Streams.Out.Write(result)
	case changed:
		if err = replace(arg, path, result); err == nil {
			_, err = fmt.Fprintf(r.Streams.Out, "%s: %s\n", shown, r.Changed)
		}
	}
	return err
}

func replace(arg, path string, text []byte) error {
	if err := fits(arg, text); err != nil {
		return err
	}
	like, err := os.Stat(path)
	if err != nil {
		return err
	}
	return durable.ReplaceLike(path, bytes.NewReader(text), like)
}

// read returns the text of a file, and its path after following links. For "-" it returns the text
// of the standard input.
func (r Rewrite) read(arg string) (path string, data []byte, err error) {
	if arg == "-" {
		data, err = netconf.ReadAll(r.Streams.In)
	} else if path, err = followLinks(arg); err == nil {
		data, err = netconf.ReadFile(path)
	}
	return path, data, err
}

// followLinks returns the path of a file after following symbolic links. Like the plugin, it
// doesn't follow links in a directory that others can write to: they could choose which file is
// replaced.
func followLinks(path string) (string, error) {
	for range 40 { // the kernel's limit, path_resolution(7)
		target, err := os.Readlink(path)
		if err != nil {
			return path, nil //nolint:nilerr // not a link, or missing: reading it reports that
		}
		dir, err := filepath.EvalSymlinks(filepath.Dir(path))
		if err != nil {
			return "", err
		}
		if info, err := os.Stat(dir); err != nil || info.Mode().Perm()&0o022 != 0 {
			return "", errors.Join(err,
				errors.New("symbolic link in a directory that other users can write to; pass its target"))
		}
		if path = target; !filepath.IsAbs(target) {
			path = filepath.Join(dir, target)
		}
	}
	return "", errors.New("too many symbolic links; pass the file itself")
}

// fits returns an error if a runtime would misread the text in a file with that name: a list as one
// plugin, or one plugin as a list. libcni and its callers go by the extension (LoadNetworkConf).
func fits(path string, text []byte) error {
	var named struct {
		Name string `json:"name"`
	}
	if json.Unmarshal(text, &named) == nil && named.Name == "" {
		return errors.New(`the output has no "name", and a runtime ignores such a file; ` +
			`set the network's name in "chain"`)
	}
	ext, is, want := filepath.Ext(path), "a list of plugins", ".conflist"
	if isSingle(text) {
		is, want = "the configuration of one plugin", ".conf"
	}
	if (ext == ".conflist") == (want == ".conflist") {
		return nil
	}
	return term.WithHint("omit --in-place, write the output to NAME"+want+", and remove this file",
		"cannot replace this file: the output is %s, which a runtime does not read from a file with "+
			"the extension %q", is, ext)
}
