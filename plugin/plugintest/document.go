package plugintest

import (
	"os"
	"strings"
	"testing"
)

// updateEnv is the environment variable that makes Table write the table instead of comparing it.
// `make docs` sets it.
const updateEnv = "UNWIND_UPDATE"

// Table compares a document's table with want. In the document, the table is between
// "<!-- NAME: make docs writes this table -->" and "<!-- end -->".
func Table(t *testing.T, path, name, want string) {
	t.Helper()
	begin, end := "<!-- "+name+": make docs writes this table -->\n", "<!-- end -->\n"
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := strings.Cut(string(text), begin)
	got, after, closed := strings.Cut(rest, end)
	switch {
	case !found || !closed:
		t.Errorf("%s has no place for the table %s:\n%s", path, name, want)
	case got == want:
	case os.Getenv(updateEnv) == "":
		t.Errorf("%s: %s is out of date; run make docs. It is\n%swant\n%s", path, name, got, want)
	default:
		if err := os.WriteFile(path, []byte(before+begin+want+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
