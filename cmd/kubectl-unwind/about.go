package main

import (
	"fmt"

	"github.com/spf13/cobra"
)

// agentVersion is what unwindctl version prints on a node.
type agentVersion struct{ Build string }

func versionCommand(o *options) *cobra.Command {
	v := &view{
		words: []string{"answered"}, report: func() report { return &agentVersion{} },
		unwindctl: []string{"version"}, columns: []string{"AGENT"},
	}
	cmd := v.command(o, &cobra.Command{
		Use:   "version",
		Short: "Print the version of this program and of each node's agent",
		Long: "Print the version of this program and of each node's agent. kubectl unwind doctor\n" +
			"shows the versions of the plugins.",
		Example: "  kubectl unwind version",
	})
	ask := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if !o.output.IsObject() {
			fmt.Fprintln(cmd.OutOrStdout(), "kubectl-unwind", version)
		}
		return ask(cmd, args)
	}
	return cmd
}

func (a *agentVersion) count() map[string]int { return map[string]int{"answered": 1} }
func (a *agentVersion) rows(bool) []row       { return []row{{0, []string{a.Build}}} }

func completionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "completion",
		Short: "Print the script that completes kubectl unwind",
		Long: "Print the script that completes kubectl unwind in shells with kubectl completion.\n" +
			"kubectl 1.26 and later run it if it is in PATH as kubectl_complete-unwind.",
		Example: "  kubectl unwind completion >~/.local/bin/kubectl_complete-unwind\n" +
			"  chmod +x ~/.local/bin/kubectl_complete-unwind",
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprint(cmd.OutOrStdout(), "#!/bin/sh\nexec kubectl unwind __complete \"$@\"\n")
			return err
		},
	}
}
