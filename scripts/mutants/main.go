// Command mutants runs a package's own tests on mutants, which are copies of the package with one
// changed operator. If the tests still pass, they don't cover that operator: the mutant survives.
// The command prints the survivors, and fails if the tests detect fewer than 95 % of the mutants.
//
//	go run ./scripts/mutants plugin/netconf plugin/known
//
// Gremlins and similar tools don't suffice: they change only code in the blocks of a coverage
// profile, and the conditions of switch statements are in none of these blocks.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	wanted = 95 // percent
	// slow matches tests that take too long to run for each mutant.
	slow = "^Test(Protocol|Guards|DecideAll)"
)

// operators maps an operator to its replacements, which are tried in turn.
var operators = map[token.Token][]token.Token{
	token.EQL: {token.NEQ}, token.NEQ: {token.EQL}, token.LAND: {token.LOR}, token.LOR: {token.LAND},
	token.LSS: {token.LEQ, token.GEQ}, token.LEQ: {token.LSS, token.GTR},
	token.GTR: {token.GEQ, token.LEQ}, token.GEQ: {token.GTR, token.LSS},
	token.ADD: {token.SUB}, token.SUB: {token.ADD}, token.MUL: {token.QUO}, token.QUO: {token.MUL}, token.REM: {token.MUL},
	token.INC: {token.DEC}, token.DEC: {token.INC},
}

// mutant is a source file with one operator changed.
type mutant struct {
	file     string
	at       token.Position
	from, to token.Token
	line     string
	lived    bool
	viable   bool
}

func main() {
	enough := true
	for _, dir := range os.Args[1:] {
		mutants, err := mutantsOf(dir)
		if err != nil {
			fmt.Fprintln(os.Stderr, "error:", err)
			os.Exit(1)
		}
		try(dir, mutants)
		enough = report(dir, mutants) && enough
	}
	if !enough {
		os.Exit(1)
	}
}

func mutantsOf(dir string) (all []*mutant, err error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*.go"))
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		files := token.NewFileSet()
		source, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		file, err := parser.ParseFile(files, path, source, 0)
		if err != nil {
			return nil, err
		}
		lines := strings.Split(string(source), "\n")
		add := func(pos token.Pos, from token.Token) {
			at := files.Position(pos)
			for _, to := range operators[from] {
				all = append(all, &mutant{file: path, at: at, from: from, to: to, line: strings.TrimSpace(lines[at.Line-1])})
			}
		}
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.BinaryExpr:
				add(n.OpPos, n.Op)
			case *ast.IncDecStmt:
				add(n.TokPos, n.Tok)
			}
			return true
		})
	}
	return all, err
}

// try runs the package's tests on each mutant, one mutant per CPU at a time.
func try(dir string, mutants []*mutant) {
	slots := make(chan bool, runtime.NumCPU())
	var all sync.WaitGroup
	for _, m := range mutants {
		slots <- true
		all.Go(func() {
			defer func() { <-slots }()
			if err := m.test(dir); err != nil {
				fmt.Fprintln(os.Stderr, "error:", err)
				m.lived, m.viable = true, true
			}
		})
	}
	all.Wait()
}

// test runs the package's tests with the mutant instead of the original file.
func (m *mutant) test(dir string) error {
	source, err := os.ReadFile(m.file)
	if err != nil {
		return err
	}
	work, err := os.MkdirTemp("", "mutant")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	changed := slices.Concat(source[:m.at.Offset], []byte(m.to.String()), source[m.at.Offset+len(m.from.String()):])
	original, err := filepath.Abs(m.file)
	if err != nil {
		return err
	}
	mutated, overlay := filepath.Join(work, "mutant.go"), filepath.Join(work, "overlay.json")
	replaces, err := json.Marshal(map[string]map[string]string{"Replace": {original: mutated}})
	if err != nil {
		return err
	}
	for path, data := range map[string][]byte{mutated: changed, overlay: replaces} {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, "go", "test", "-overlay", overlay, "-vet=off", "-short", "-skip", slow, "-failfast", "-count=1",
		"-timeout", "1m", "./"+dir).CombinedOutput()
	m.lived = err == nil
	m.viable = !bytes.Contains(out, []byte("[build failed]"))
	return nil
}

// report prints the survivors of a package, and reports whether enough mutants were killed.
func report(dir string, mutants []*mutant) (enough bool) {
	killed, lived := 0, 0
	for _, m := range mutants {
		switch {
		case !m.viable:
		case !m.lived:
			killed++
		default:
			lived++
			fmt.Printf("%s:%d:%d: %s becomes %s: %s\n", m.file, m.at.Line, m.at.Column, m.from, m.to, m.line)
		}
	}
	fmt.Printf("%s: %d of %d killed, %d lived\n", dir, killed, killed+lived, lived)
	return 100*killed >= wanted*(killed+lived)
}
