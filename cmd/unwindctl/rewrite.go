package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"cni-unwind/plugin"
)

// source is a configuration that is to be rewritten.
type source struct {
	*plugin.Conflist
	arg string // as a runtime would find it, or "-" for the standard input
	bad error  // what is wrong with unwind's own entry
}

// rewriteCommand makes a command that prints what change makes of a configuration, or puts it in its place. change returns nil
// if there is nothing to change, and asItIs says why.
func rewriteCommand(cmd *cobra.Command, asItIs string, change func(source) ([]byte, error)) *cobra.Command {
	var inPlace bool
	cmd.Args = oneFile
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		r := rewriting{cmd: cmd, asItIs: asItIs, change: change}
		do := r.print
		if inPlace {
			do = r.replace
		}
		if inPlace && args[0] == "-" {
			return usageError{errors.New("--in-place needs a file")}
		}
		err := do(args[0])
		if err != nil {
			err = fmt.Errorf("%s: %w", display(args[0]), err)
		}
		if errors.Is(err, fs.ErrPermission) {
			err = hintedError{err, "run this as root"}
		}
		return err
	}
	cmd.Flags().BoolVar(&inPlace, "in-place", false, "replace the file; its owner and mode stay")
	return cmd
}

func display(arg string) string {
	if arg == "-" {
		return "stdin"
	}
	return arg
}

func oneFile(cmd *cobra.Command, args []string) error {
	if err := cobra.ExactArgs(1)(cmd, args); err != nil {
		return usageError{err}
	}
	return nil
}

// rewriting is one run of such a command.
type rewriting struct {
	cmd    *cobra.Command
	asItIs string
	change func(source) ([]byte, error)
}

// result returns what becomes of a configuration, or nil if it stays as it is.
func (r rewriting) result(src source) ([]byte, error) {
	result, err := r.change(src)
	if result == nil && err == nil {
		fmt.Fprintf(r.cmd.ErrOrStderr(), "%s: %s; nothing to change\n", display(src.arg), r.asItIs)
	}
	return result, err
}

func (r rewriting) print(arg string) error {
	src := source{arg: arg}
	var err error
	if arg == "-" {
		src.Conflist, err = plugin.ReadConflistFrom(r.cmd.InOrStdin())
	} else {
		_, src.Conflist, err = readThrough(arg)
	}
	if src.Conflist == nil {
		return err
	}
	src.bad = err
	result, err := r.result(src)
	if err != nil {
		return err
	}
	if result == nil {
		result = src.Data
	}
	_, err = r.cmd.OutOrStdout().Write(result)
	return err
}

// replace puts the result in the place of the file itself, past links. Without a result nothing is written.
func (r rewriting) replace(arg string) error {
	src := source{arg: arg}
	var path string
	path, src.Conflist, src.bad = readThrough(arg)
	if src.Conflist == nil {
		return src.bad
	}
	result, err := r.result(src)
	if result == nil || err != nil {
		return err
	}
	if err := fits(arg, result); err != nil {
		return err
	}
	like, err := os.Stat(path)
	if err != nil {
		return err
	}
	return replaceFile(path, bytes.NewReader(result), like)
}

// readThrough reads a file, and returns the path to which links lead.
func readThrough(arg string) (string, *plugin.Conflist, error) {
	path, err := followLinks(arg)
	if err != nil {
		return "", nil, err
	}
	list, err := plugin.ReadConflist(path)
	return path, list, err
}

// followLinks returns the path of the file that a path leads to. As the plugin, it follows no link in a folder that others can
// write to: whoever made that link would choose the file that is replaced.
func followLinks(path string) (string, error) {
	for range 40 { // as the kernel, path_resolution(7)
		target, err := os.Readlink(path)
		if err != nil {
			return path, nil //nolint:nilerr // no link; or not there, which reading it tells
		}
		dir, err := filepath.EvalSymlinks(filepath.Dir(path))
		if err != nil {
			return "", err
		}
		if info, err := os.Stat(dir); err != nil || info.Mode().Perm()&0o022 != 0 {
			return "", errors.Join(err, errors.New("it is a link in a folder that others can write to; name the file that it leads to"))
		}
		if path = target; !filepath.IsAbs(target) {
			path = filepath.Join(dir, target)
		}
	}
	return "", errors.New("too many links")
}

// hintedError is an error with a hint.
type hintedError struct {
	error
	hint string
}

func (e hintedError) Unwrap() error { return e.error }
func (e hintedError) Hint() string  { return e.hint }

// fits returns an error if a runtime would not read the text in a file of that name: as one plugin where it is a list, or the
// other way round. libcni goes by the extension (LoadNetworkConf), and so do its callers.
func fits(path string, text []byte) error {
	ext, single := filepath.Ext(path), isSingle(text)
	var named struct {
		Name string `json:"name"`
	}
	switch {
	case json.Unmarshal(text, &named) == nil && named.Name == "":
		return errors.New(`the result has no "name", without which a runtime reads nothing; write the network's into "chain"`)
	case single && ext == ".conflist":
		return hintedError{errors.New("a runtime reads a .conflist as a list of plugins, and the result is the configuration of one"),
			"leave out --in-place, write the output to NAME.conf, and remove the .conflist"}
	case !single && ext != ".conflist":
		return hintedError{fmt.Errorf("a runtime reads a file with the extension %q as one plugin, and the result is a list", ext),
			"leave out --in-place, write the output to NAME.conflist, and remove this file"}
	}
	return nil
}
