// Words prints all texts of unwind's programs that a user may read (errors, log lines, help texts,
// reasons and messages) for a reviewer, one per line, each with its file and line. The test in this
// directory rejects phrases that no native speaker uses.
package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

type text struct {
	place string // file:line
	words string
}

// programs are the directories of the programs' code, relative to the root of the repository.
var programs = []string{"cmd", "ipam", "journal", "plugin"}

func main() {
	dirs := os.Args[1:]
	if len(dirs) == 0 {
		dirs = programs
	}
	for _, dir := range dirs {
		texts, err := read(dir)
		if err != nil {
			fmt.Fprintln(os.Stderr, "error:", err)
			os.Exit(1)
		}
		for _, t := range texts {
			fmt.Printf("%s\t%s\n", t.place, strings.ReplaceAll(t.words, "\n", `\n`))
		}
	}
}

// read returns the texts in the Go files below a directory, file by file. It skips tests.
func read(dir string) ([]text, error) {
	var texts []text
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && d.Name() == "testdata":
			return fs.SkipDir
		case d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go"):
			return nil
		}
		found, err := parse(path)
		texts = append(texts, found...)
		return err
	})
	return texts, err
}

// parse returns the texts of one file.
func parse(path string) ([]text, error) {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, path, nil, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	var texts []text
	var find func(n ast.Node) bool
	find = func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.ImportSpec:
			return false
		case *ast.Field:
			n.Tag = nil // not a text
		case *ast.BasicLit, *ast.BinaryExpr:
			words, rest, ok := join(n.(ast.Expr))
			if !ok {
				return true
			}
			if severalWords.MatchString(words) {
				at := files.Position(n.Pos())
				texts = append(texts, text{fmt.Sprintf("%s:%d", at.Filename, at.Line), words})
			}
			for _, e := range rest {
				ast.Inspect(e, find)
			}
			return false
		}
		return true
	}
	ast.Inspect(file, find)
	return texts, nil
}

// severalWords distinguishes a text from a name, a key or a path.
var severalWords = regexp.MustCompile(`\pL\S* +\S*[\pL%]`)

// join returns the text of a string literal, or of a sum that contains one. In a sum, "…" stands
// for each operand without a text, and rest contains these operands. For any other expression, ok
// is false.
func join(e ast.Expr) (words string, rest []ast.Expr, ok bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		words, err := strconv.Unquote(e.Value)
		return words, nil, e.Kind == token.STRING && err == nil
	case *ast.BinaryExpr:
		left, leftRest, isLeft := join(e.X)
		right, rightRest, isRight := join(e.Y)
		if e.Op != token.ADD || !isLeft && !isRight {
			return "", nil, false
		}
		if !isLeft {
			left, leftRest = "…", []ast.Expr{e.X}
		}
		if !isRight {
			right, rightRest = "…", []ast.Expr{e.Y}
		}
		return left + right, append(leftRest, rightRest...), true
	}
	return "", nil, false
}
