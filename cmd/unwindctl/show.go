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
		Short:      "Show an attachment: its resources, why it is kept, and how to release it",
		Long: "Show an attachment: its resources, its pending DELs and why they fail, the evidence\n" +
			"for its verdict, and how to release it. show is read-only and takes no locks.\n\n" +
			"Name the attachment by NETWORK/CONTAINER/IFNAME, container ID, pod\n" +
			"(NAMESPACE/NAME, or NAME), or address. A prefix of a container ID is enough.",
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
