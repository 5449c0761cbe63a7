package main

import (
	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/inspect"
)

func showCommand() *cobra.Command {
	var o term.Output
	var flags inspect.Scope
	cmd := &cobra.Command{
		Use:        "show ATTACHMENT|POD|ADDRESS",
		SuggestFor: []string{"get", "describe", "inspect"},
		Short:      "Show an attachment: what it holds, why it is kept, and what would release it",
		Long: "Show an attachment: what it holds, its pending DELs and why they fail, on what\n" +
			"evidence it is judged, and what would release it. Nothing is changed, and\n" +
			"nothing is locked while it prints.\n\n" +
			"It is named by NETWORK/CONTAINER/IFNAME, a container ID, a pod (NAMESPACE/NAME,\n" +
			"or the name), or an address. Of a container ID the beginning is enough.",
		Example: "  unwindctl show 10.22.0.5\n  unwindctl show default/web-0\n  unwindctl show " +
			"4ac0",
		Args:              term.OneArg,
		ValidArgsFunction: completeNames(&flags.Directories, true),
		RunE: func(cmd *cobra.Command, args []string) error {
			return inspect.Show(cmd.Context(), streams(cmd), args[0], flags, &o)
		},
	}
	o.AddFlags(cmd, cmd.Flags(), "attachments", lookFormats...)
	term.AddWatch(cmd)
	addScopeFlags(cmd, &flags)
	return cmd
}
