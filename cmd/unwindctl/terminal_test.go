package main

import (
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// age is a cell that differs a second later.
var age = regexp.MustCompile(` +[0-9]+[sm] +`)

// TestTables: on a terminal each table fits its width, with the names that other commands take.
// What is piped is whole, and so is -o wide.
func TestTables(t *testing.T) {
	t.Parallel()
	n := newMachine(t)
	n.dead(3, "fail")
	confDir := n.crowd(2)
	for _, args := range [][]string{{"list"}, {"history"}, {"sweep", "--dry-run"}, {"list", "-o", "wide"}} {
		piped := n.run(n.ctl(confDir, args...)).stdout
		const width = 80
		term, stdout := newTerminal(t)
		if err := unix.IoctlSetWinsize(int(stdout.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: width}); err != nil {
			t.Fatal(err)
		}
		cmd := n.ctl(confDir, args...)
		cmd.Stdout = stdout
		_ = cmd.Run()
		lines := strings.Count(piped, "\n")
		eventually(t, "the table", func() bool { return strings.Count(term.String(), "\n") >= lines })
		shown := strings.ReplaceAll(term.String(), "\r\n", "\n")
		if slices.Contains(args, "wide") {
			if age.ReplaceAllString(shown, "") != age.ReplaceAllString(piped, "") {
				t.Errorf("%v: on a terminal\n%s\npiped\n%s", args, shown, piped)
			}
			continue
		}
		for line := range strings.Lines(shown) {
			if chars := utf8.RuneCountInString(strings.TrimSpace(line)); chars > width {
				t.Errorf("%v: %d characters on %d columns: %s", args, chars, width, line)
			}
		}
		if len(shown) >= len(piped) {
			t.Errorf("%v: nothing is cut:\n%s\npiped:\n%s", args, shown, piped)
		}
	}
}
