package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/google/licensecheck"
)

// repository is the directory with the binaries' go.mod. make runs this program in its own
// directory.
const repository = "../.."

// legal matches the files that must be distributed with a module's binaries. license matches the
// licenses among them.
var (
	legal   = regexp.MustCompile(`(?i)^(licen[cs]e|copying|copyright|notice|patents)([-.].*)?$`)
	license = regexp.MustCompile(`(?i)^(licen[cs]e|copying)`)
)

// licenses maps a library's PATH@VERSION to the SPDX identifiers of its licenses.
type licenses map[string][]string

// copyLicenses copies the legal texts of all modules that are linked into the binaries, and of the
// standard library, to DIR/PATH@VERSION. A module without a known license is an error.
func copyLicenses(dir string, binaries []binary) (licenses, error) {
	found := licenses{}
	var paths []string
	for _, b := range binaries {
		for _, c := range moduleComponents(b.info) {
			if _, is := found[c.Name+"@"+c.Version]; !is && c.Name != stdlib {
				paths = append(paths, c.Name)
			}
			found[c.Name+"@"+c.Version] = nil
		}
	}
	root, err := goCommand("env", "GOROOT", "GOVERSION")
	if err != nil {
		return nil, err
	}
	goroot, version, _ := strings.Cut(strings.TrimSpace(root), "\n")
	sources := stdlib + "@" + strings.TrimPrefix(version, "go") + " " + goroot + "\n"
	if len(paths) > 0 {
		listed, err := goCommand(append([]string{"list", "-m", "-f", "{{.Path}}@{{.Version}} {{.Dir}}"},
			paths...)...)
		if err != nil {
			return nil, err
		}
		sources += listed
	}
	for line := range strings.Lines(sources) {
		name, source, _ := strings.Cut(strings.TrimSpace(line), " ")
		if _, is := found[name]; !is {
			continue
		}
		if found[name], err = copyTexts(filepath.Join(dir, name), source, name); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	for name, ids := range found {
		if ids == nil {
			return nil, fmt.Errorf("%s: found no known license, or go list reports another version", name)
		}
	}
	return found, nil
}

// copyTexts copies the legal texts of a module, from all of its directories, and returns the
// licenses.
func copyTexts(to, from, name string) (ids []string, err error) {
	if from == "" {
		return nil, errors.New("its source is not on this machine")
	}
	err = filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		switch base := filepath.Base(path); {
		case err != nil:
			return err
		case d.IsDir() && path != from && (base == "testdata" || base == "vendor" ||
			strings.HasPrefix(name, stdlib+"@")): // the standard library's texts are all in GOROOT itself
			return fs.SkipDir
		case d.IsDir() || !legal.MatchString(base) || filepath.Ext(base) == ".go":
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if license.MatchString(filepath.Base(path)) {
			for _, m := range licensecheck.Scan(text).Match {
				if !m.IsURL {
					ids = append(ids, m.ID)
				}
			}
		}
		copied := filepath.Join(to, strings.TrimPrefix(path, from))
		return errors.Join(os.MkdirAll(filepath.Dir(copied), 0o755), os.WriteFile(copied, text, 0o644))
	})
	slices.Sort(ids)
	return slices.Compact(ids), err
}

// goCommand runs a go command in the repository.
func goCommand(args ...string) (string, error) {
	cmd := exec.Command("go", args...)
	cmd.Dir, cmd.Stderr = repository, os.Stderr
	out, err := cmd.Output()
	return string(out), err
}
