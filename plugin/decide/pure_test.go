package decide

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestPure: decisions do no I/O and read no clock, so the model of the protocol can run them
// unchanged. The test checks what this package imports, and which imported names it uses.
func TestPure(t *testing.T) {
	t.Parallel()
	imports := []string{"cmp", "encoding/json", "errors", "fmt", "math", "net/netip", "slices", "strings", "time",
		"cni-unwind/journal", "cni-unwind/plugin/known"}
	// Of these packages, decisions may use only the listed names.
	used := map[string][]string{"time": {"Duration", "Nanosecond", "Millisecond", "Second", "Minute", "Hour"},
		"fmt": {"Sprintf", "Errorf"}}
	// Of this package, decisions may use all names except the listed ones.
	denied := map[string][]string{"journal": {"Store", "Tx", "Lock", "BootNanos", "Now"}}
	files, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if !strings.HasSuffix(f.Name(), ".go") || strings.HasSuffix(f.Name(), "_test.go") {
			continue
		}
		set := token.NewFileSet()
		parsed, err := parser.ParseFile(set, f.Name(), nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, spec := range parsed.Imports {
			if path, _ := strconv.Unquote(spec.Path.Value); !slices.Contains(imports, path) || spec.Name != nil {
				t.Errorf("%s imports %s", f.Name(), spec.Path.Value)
			}
		}
		ast.Inspect(parsed, func(n ast.Node) bool {
			s, is := n.(*ast.SelectorExpr)
			if !is {
				return true
			}
			if of, is := s.X.(*ast.Ident); is && (used[of.Name] != nil && !slices.Contains(used[of.Name], s.Sel.Name) ||
				slices.Contains(denied[of.Name], s.Sel.Name) || strings.HasPrefix(s.Sel.Name, "Open")) {
				t.Errorf("%s: %s.%s", set.Position(s.Pos()), of.Name, s.Sel.Name)
			}
			return true
		})
	}
}
