package main

import (
	"fmt"
	"io/fs"
	"testing"

	"github.com/spf13/cobra"
)

// TestRewriteHint has one who may not read or write a configuration not told about the journal. Scripts run as root.
func TestRewriteHint(t *testing.T) {
	cmd := rewriteCommand(&cobra.Command{Use: "rewrite FILE"}, "", func(source) ([]byte, error) {
		return nil, fmt.Errorf("open: %w", fs.ErrPermission)
	})
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	cmd.SetArgs([]string{"../../testdata/conflists/cilium.conflist"})
	err := cmd.Execute()
	if err == nil || hintFor(err) != "run this as root" {
		t.Errorf("%v: hint %q", err, hintFor(err))
	}
}
