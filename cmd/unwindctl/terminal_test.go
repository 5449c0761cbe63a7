package main

import (
	"context"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/journal/journaltest"
	"cni-unwind/plugin/plugintest/nodetest"
)

// age is a cell that differs a second later.
var age = regexp.MustCompile(` +[0-9]+[sm] +`)

// TestColours: on a terminal doctor has its severities in colours, which NO_COLOR turns off, and a
// look again begins in the same place. What is piped has neither.
func TestColours(t *testing.T) {
	t.Parallel()
	n := newMachine(t)
	run := func(env string, args ...string) string {
		term, stdout := nodetest.NewTerminal(t, 0)
		cmd := n.unwindctl(append([]string{"doctor", "-v", "--conf-dir", n.dir + "/none", "--cni-bin-dir", n.dir, "--state-dir", n.state}, args...)...)
		cmd.Env = append(cmd.Environ(), "TERM=xterm", env)
		cmd.Stdout = stdout
		check(t, cmd.Start())
		lines := 1 + 2*len(args)
		eventually(t, "the last line", func() bool { return strings.Count(term.String(), "1 error, ") >= lines })
		_ = cmd.Process.Signal(unix.SIGINT)
		_ = cmd.Wait()
		return term.String()
	}
	const coloured = "\x1b[31merror\x1b[0m  network "
	if text := run("NO_COLOR="); !strings.Contains(text, coloured) || !strings.Contains(text, "\x1b[32mok\x1b[0m     ") {
		t.Errorf("on a terminal: %q", text)
	}
	if text := run("NO_COLOR=1"); strings.Contains(text, "\x1b") {
		t.Errorf("with NO_COLOR: %q", text)
	}
	if text := run("NO_COLOR=1", "--watch"); strings.Count(text, "\x1b[H\x1b[2J") < 3 || !strings.HasPrefix(text, "\x1b[H\x1b[2J") {
		t.Errorf("with --watch: %q", text)
	}
	if out := n.run(n.unwindctl("doctor", "--conf-dir", n.dir+"/none", "--cni-bin-dir", n.dir)); strings.Contains(out.stdout, "\x1b") {
		t.Errorf("piped: %q", out.stdout)
	}
}

// dead adds attachments that are dead, and whose DEL goes so.
func (n *machine) dead(many int, mode string) {
	n.Helper()
	n.netns("d")
	n.add(home, "d", n.pin("d"))
	e, d := n.entry("d"), n.entry("d")
	err := n.store.Update(context.Background(), func(tx *journal.Tx) error {
		e.Added.Host.BootID = "earlier"
		for i := range many {
			e.ContainerID, e.Number, e.Undo.State = fmt.Sprintf("d-%d", i), 0, journal.Live
			if err := journaltest.PutIn(tx, e); err != nil {
				return err
			}
		}
		return tx.Delete(d)
	})
	check(n, err)
	n.plan(map[string]string{"DEL": mode})
}

// TestTables: on a terminal each table fits its width, with the names that other commands take.
// What is piped is whole, and so is -o wide.
func TestTables(t *testing.T) {
	t.Parallel()
	n := newMachine(t)
	n.dead(3, "fail")
	confDir := n.crowd(2)
	for _, tt := range []struct {
		width int
		whole string // is not cut
		args  []string
	}{
		{80, "faulty (tried 1×, code", []string{"list"}}, {80, "faulty: p ADD refused\n", []string{"history"}},
		{120, "faulty: p ADD refused\n", []string{"history"}}, {80, "", []string{"sweep", "--dry-run"}},
		{80, "", []string{"doctor", "--cni-bin-dir", n.dir}},
		{80, "", []string{"list", "-o", "wide"}},
	} {
		args, width := tt.args, tt.width
		piped := n.run(n.ctl(confDir, args...)).stdout
		term, stdout := nodetest.NewTerminal(t, uint16(width))
		cmd := n.ctl(confDir, args...)
		cmd.Env, cmd.Stdout = append(cmd.Environ(), "NO_COLOR=1"), stdout
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
			line = strings.TrimSpace(line)
			if chars := utf8.RuneCountInString(line); chars > width && !strings.HasSuffix(line, ".") { // no sentence
				t.Errorf("%v: %d characters on %d columns: %s", args, chars, width, line)
			}
		}
		if !strings.Contains(shown, tt.whole) {
			t.Errorf("%v on %d columns: no %q in\n%s", args, width, tt.whole, shown)
		}
		if !strings.Contains(shown, "is cut to fit") && args[0] != "doctor" { // whose texts are wrapped
			t.Errorf("%v: nothing is cut:\n%s\npiped:\n%s", args, shown, piped)
		}
	}
}

// onTerminal returns what a command prints on a terminal.
func (n *machine) onTerminal(width uint16, cmd *exec.Cmd) string {
	n.Helper()
	term, stdout := nodetest.NewTerminal(n, width)
	cmd.Env, cmd.Stdout, cmd.Stderr = append(cmd.Environ(), "TERM=xterm", "NO_COLOR=", "LC_ALL=C"), stdout, stdout
	_ = cmd.Run()
	_, err := stdout.WriteString("the end")
	check(n, err)
	eventually(n, "the end", func() bool { return strings.HasSuffix(term.String(), "the end") })
	return strings.ReplaceAll(strings.TrimSuffix(term.String(), "the end"), "\r\n", "\n")
}

var colour = regexp.MustCompile("\x1b\\[[0-9]+m")

// TestLines: on a terminal no text is wider than 80 columns and no word is broken, in the help of each
// command too. States have colours.
func TestLines(t *testing.T) {
	t.Parallel()
	n := newMachine(t)
	confDir := n.crowd(1)
	commands := [][]string{
		{"ipam", "\x1b[31m1 leaked\x1b[0m"}, {"ipam", "-o", "wide", "  \x1b[31mleaked\x1b[0m  "}, {"list", "  \x1b[32mlive\x1b[0m "}, {"list", "  \x1b[33mrolling-back\x1b[0m "},
		{"show", "many", "\x1b[32mlive\x1b[0m: its"}, {"show", "stuck", "\x1b[33mrolling-back\x1b[0m for "}, {"show", "stuck", "\x1b[31mdead\x1b[0m: "},
		{"off", "--dry-run", "--conf-dir", confDir, "--cni-bin-dir", n.dir, ""}, {"uninstall", "--dry-run", "--conf-dir", confDir, "--cni-bin-dir", n.dir, ""},
		{"--help", ""}, {"show", "no/such/attachment/at/all", "hint: "},
	}
	for _, cmd := range rootCommand().Commands() {
		commands = append(commands, []string{cmd.Name(), "--help", "Usage:"})
	}
	for _, args := range commands {
		args, want := args[:len(args)-1], args[len(args)-1]
		cmd := n.unwindctl(args...)
		if !slices.Contains(args, "--help") {
			cmd = n.ctl(confDir, args...)
		}
		shown := n.onTerminal(80, cmd)
		if !strings.Contains(shown, want) {
			t.Errorf("%v: no %q in %q", args, want, shown)
		}
		if slices.Contains(args, "wide") {
			continue
		}
		for line := range strings.Lines(shown) {
			line = strings.TrimSpace(colour.ReplaceAllString(line, ""))
			if chars := utf8.RuneCountInString(line); chars > 80 && strings.Contains(line, " ") {
				t.Errorf("%v: %d characters: %s", args, chars, line)
			}
		}
	}
}
