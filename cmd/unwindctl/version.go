package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
)

// version is set by the linker.
var version = "dev"

func versionCommand() *cobra.Command {
	var o term.Output
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "Print the version of this program",
		Example: "  unwindctl version\n  unwindctl version -o json",
		Args:    term.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.IsObject() {
				return o.PrintObject(cmd.OutOrStdout(), "build", version)
			}
			_, err := fmt.Fprintln(cmd.OutOrStdout(), "unwindctl", version)
			return err
		},
	}
	o.AddFlags(cmd, cmd.Flags(), "build", term.Plain, term.JSON)
	return cmd
}
