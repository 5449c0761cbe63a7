package main

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// updateEnv has TestCommands write what it else compares with: make docs.
const updateEnv = "UNWIND_UPDATE"

// TestCommands: COMMANDS.md is what the commands say of themselves.
func TestCommands(t *testing.T) {
	const file = "COMMANDS.md"
	root := rootCommand()
	root.DisableAutoGenTag = true
	root.CompletionOptions.HiddenDefaultCmd = true
	var text bytes.Buffer
	text.WriteString("<!-- make docs writes this from the commands' own words -->\n\n")
	link := func(name string) string {
		return "#" + strings.ReplaceAll(strings.TrimSuffix(name, ".md"), "_", "-")
	}
	for _, cmd := range append([]*cobra.Command{root}, root.Commands()...) {
		if cmd.IsAvailableCommand() || cmd == root {
			if err := doc.GenMarkdownCustom(cmd, &text, link); err != nil {
				t.Fatal(err)
			}
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
