package main

import (
	"go/scanner"
	"go/token"
	"io/fs"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// repository contains the documents, and everything in the repository that documents may name.
type repository struct {
	documents map[string]string          // text by path, without fenced blocks
	files     []string                   // all Go files
	tests     map[string][]string        // names by directory
	packages  map[string]map[string]bool // identifiers by the directory's name
	words     map[string]bool            // all identifiers, and the words of strings and of values.yaml
}

var (
	fenced  = regexp.MustCompile("(?ms)^ *```.*?^ *```")
	declare = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Benchmark)\w+)\(`)
	heading = regexp.MustCompile(`(?m)^#+ (.*)$`)
	anchor  = regexp.MustCompile(`<a id="([^"]+)">`)
	notSlug = regexp.MustCompile(`[^\p{L}\p{N} _-]`)

	// outer matches links to other sites, and references: "[text]" without a path.
	outer  = regexp.MustCompile(`\[[^\][]*\](?:\(https?:[^)]*\)|[^(]|$)|https?://\S+`)
	link   = regexp.MustCompile(`\]\(([^)# ]*)(?:#([^) ]*))?\)`)
	runs   = regexp.MustCompile("go test (?:\\./)?([\\w/.-]+) -run '?([^' `]+)'?")
	test   = regexp.MustCompile(`\b(?:Test|Fuzz|Benchmark)[A-Z]\w*`)
	goFile = regexp.MustCompile(`[\w./-]*\w\.go\b`)
	inside = regexp.MustCompile("`((?:cmd|ipam|journal|plugin|scripts|testdata)/[\\w./-]+)`")
	camel  = regexp.MustCompile("`([A-Za-z][a-z]+[A-Z]\\w*)`")
	word   = regexp.MustCompile(`\w+`)
	member = regexp.MustCompile("`(\\w+)\\.([A-Z][\\w.]*)`")
)

// TestNames: each link in a document leads to an existing file and heading. Documents name only
// paths, Go files, tests and package members that exist.
func TestNames(t *testing.T) {
	t.Parallel()
	r := readRepository(t, "../..")
	for name, text := range r.documents {
		text = outer.ReplaceAllString(text, "")
		for _, problem := range slices.Concat(r.badLinks(name, text), r.badTests(text), r.badCode(name, text)) {
			t.Errorf("%s names %s", name, problem)
		}
	}
	if len(r.documents) < 15 || len(r.files) < 150 {
		t.Errorf("%d documents, %d files", len(r.documents), len(r.files))
	}
}

func readRepository(t *testing.T, root string) repository {
	t.Helper()
	r := repository{map[string]string{}, nil, map[string][]string{}, map[string]map[string]bool{},
		map[string]bool{}}
	tree := os.DirFS(root)
	err := fs.WalkDir(tree, ".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && strings.HasPrefix(d.Name(), ".") && name != "." && name != ".github":
			return fs.SkipDir
		case d.Type().IsRegular() && path.Ext(name) == ".md":
			text, err := fs.ReadFile(tree, name)
			r.documents[name] = fenced.ReplaceAllString(string(text), "")
			return err
		case d.Name() == "values.yaml": // documents name the chart's values
			text, err := fs.ReadFile(tree, name)
			for _, w := range word.FindAllString(string(text), -1) {
				r.words[w] = true
			}
			return err
		case d.Type().IsRegular() && path.Ext(name) == ".go":
			text, err := fs.ReadFile(tree, name)
			r.addCode(name, text)
			return err
		}
		return nil
	})
	check(t, err)
	return r
}

// addCode adds the tests of a Go file, its identifiers, and the words in its strings.
func (r *repository) addCode(name string, text []byte) {
	dir := path.Dir(name)
	r.files = append(r.files, name)
	for _, m := range declare.FindAllSubmatch(text, -1) {
		r.tests[dir] = append(r.tests[dir], string(m[1]))
	}
	identifiers := r.packages[path.Base(dir)]
	if identifiers == nil {
		identifiers = map[string]bool{}
		r.packages[path.Base(dir)] = identifiers
	}
	var s scanner.Scanner
	s.Init(token.NewFileSet().AddFile(name, -1, len(text)), text, nil, 0)
	for _, tok, literal := s.Scan(); tok != token.EOF; _, tok, literal = s.Scan() {
		switch tok {
		case token.IDENT:
			identifiers[literal], r.words[literal] = true, true
		case token.STRING:
			for _, w := range word.FindAllString(literal, -1) {
				r.words[w] = true
			}
		}
	}
}

// badLinks returns the links to files or headings that do not exist.
func (r *repository) badLinks(name, text string) (bad []string) {
	for _, m := range link.FindAllStringSubmatch(text, -1) {
		to := name
		if m[1] != "" {
			to = path.Join(path.Dir(name), m[1])
		}
		if _, err := os.Stat(path.Join("../..", to)); err != nil {
			bad = append(bad, "the file "+m[1])
		}
		if m[2] != "" && !slices.Contains(anchors(r.documents[to]), m[2]) {
			bad = append(bad, "the heading "+m[1]+"#"+m[2])
		}
	}
	return bad
}

// anchors returns the anchors of a document, as GitHub generates them.
func anchors(text string) (all []string) {
	for _, m := range heading.FindAllStringSubmatch(text, -1) {
		slug := notSlug.ReplaceAllString(strings.ToLower(m[1]), "")
		all = append(all, strings.ReplaceAll(slug, " ", "-"))
	}
	for _, m := range anchor.FindAllStringSubmatch(text, -1) {
		all = append(all, m[1])
	}
	return all
}

// badTests returns the tests that a text names, but that do not exist. It also returns the parts of
// -run patterns that match no test of the command's package.
func (r *repository) badTests(text string) (bad []string) {
	for _, m := range runs.FindAllStringSubmatch(text, -1) {
		for pattern := range strings.SplitSeq(m[2], "|") {
			if !slices.ContainsFunc(r.tests[path.Clean(m[1])], regexp.MustCompile(pattern).MatchString) {
				bad = append(bad, "-run "+pattern+" in "+m[1])
			}
		}
	}
	for _, name := range test.FindAllString(runs.ReplaceAllString(text, ""), -1) {
		if !r.words[name] { // r.words includes words in strings, such as names of containerd's tests
			bad = append(bad, "the test "+name)
		}
	}
	return bad
}

// badCode returns the Go files, paths and package members that a document names, but that do not
// exist. For a README.md, it also returns names in camel case that do not occur in the code.
func (r *repository) badCode(document, text string) (bad []string) {
	for _, name := range goFile.FindAllString(text, -1) {
		end := "/" + strings.TrimLeft(name, "./")
		if !slices.ContainsFunc(r.files, func(f string) bool { return strings.HasSuffix("/"+f, end) }) {
			bad = append(bad, "the file "+name)
		}
	}
	for _, m := range inside.FindAllStringSubmatch(text, -1) {
		if _, err := os.Stat(path.Join("../..", m[1])); err != nil {
			bad = append(bad, "the path "+m[1])
		}
	}
	for _, m := range camel.FindAllStringSubmatch(text, -1) {
		if path.Base(document) == "README.md" && !r.words[m[1]] { // other documents use providers' names
			bad = append(bad, "`"+m[1]+"`")
		}
	}
	for _, m := range member.FindAllStringSubmatch(text, -1) {
		identifiers := r.packages[m[1]]
		for name := range strings.SplitSeq(m[2], ".") {
			if identifiers != nil && !identifiers[name] {
				bad = append(bad, "`"+m[1]+"."+m[2]+"`")
			}
		}
	}
	return bad
}
