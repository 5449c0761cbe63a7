package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// updateEnv has TestCommands write what it else compares with: make docs.
const updateEnv = "UNWIND_UPDATE"

// manualEnv names the directory in which TestManual leaves the man pages: make man.
const manualEnv = "UNWIND_MANUAL"

// commands returns the program and its commands, of which documents speak.
func commands() (root *cobra.Command, all []*cobra.Command) {
	root = rootCommand()
	root.DisableAutoGenTag = true
	root.CompletionOptions.HiddenDefaultCmd = true
	all = []*cobra.Command{root}
	for _, cmd := range root.Commands() {
		if cmd.IsAvailableCommand() {
			all = append(all, cmd)
		}
	}
	for _, cmd := range all { // indented lines stay lines
		cmd.Long = strings.TrimSpace(indented.ReplaceAllStringFunc(cmd.Long, func(lines string) string {
			return "\n    " + strings.ReplaceAll(strings.TrimSuffix(lines, "\n"), "\n", "\n    ") + "\n"
		}))
	}
	return root, all
}

var indented = regexp.MustCompile(`(?m)(^  .*(\n|$))+`)

// TestCommands: COMMANDS.md is what the commands say of themselves.
func TestCommands(t *testing.T) {
	const file = "COMMANDS.md"
	_, all := commands()
	var text bytes.Buffer
	text.WriteString("<!-- make docs writes this from the commands' own words -->\n\n")
	link := func(name string) string {
		return "#" + strings.ReplaceAll(strings.TrimSuffix(name, ".md"), "_", "-")
	}
	for _, cmd := range all {
		if !strings.Contains(cmd.Example, cmd.Name()) {
			t.Errorf("%s has no example", cmd.CommandPath())
		}
		if err := doc.GenMarkdownCustom(cmd, &text, link); err != nil {
			t.Fatal(err)
		}
	}
	if os.Getenv(updateEnv) != "" {
		if err := os.WriteFile(file, text.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if there, err := os.ReadFile(file); err != nil || !bytes.Equal(there, text.Bytes()) {
		t.Errorf("%s is not what the commands say; run make docs (%v)", file, err)
	}
}

// TestManual: each command has a man page, with its examples.
func TestManual(t *testing.T) {
	dir := os.Getenv(manualEnv)
	if dir == "" {
		dir = t.TempDir()
	}
	root, all := commands()
	header := &doc.GenManHeader{Section: "8", Source: "unwind", Manual: "unwind"}
	if err := errors.Join(os.MkdirAll(dir, 0o755), doc.GenManTree(root, header, dir)); err != nil {
		t.Fatal(err)
	}
	for _, cmd := range all {
		page, err := os.ReadFile(filepath.Join(dir, strings.ReplaceAll(cmd.CommandPath(), " ", "-")+".8"))
		if err != nil || !bytes.Contains(page, []byte(".SH EXAMPLE")) {
			t.Errorf("%s: %v\n%s", cmd.CommandPath(), err, page)
		}
	}
}
