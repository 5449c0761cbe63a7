package main

import (
	"cmp"
	"os"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/install"
)

func offCommand() *cobra.Command {
	flags := install.UninstallOptions{OffOnly: true}
	cmd := &cobra.Command{
		Use:   "off",
		Short: "Switch unwind off on this node until it is switched on again",
		Long: "Switch unwind off on this node: write the file \"off\" into the state directory and\n" +
			"remove unwind's conflist. From the next pod on, the runtime uses the provider's\n" +
			"conflist, also to release the pods that were added through unwind. Nothing else\n" +
			"is removed.\n\n" +
			"The file keeps agents from installing unwind, even after the agent, the node or\n" +
			"the DaemonSet restarts. doctor and the metrics show who switched it off, and when.\n" +
			"An agent also writes the file when it sees that somebody removed unwind's\n" +
			"conflist.",
		Example: "  unwindctl off\n" +
			"  kubectl unwind off --nodes worker-2",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return install.Uninstall(cmd.Context(), cmd.OutOrStdout(), flags)
		},
	}
	addOffFlags(cmd, &flags)
	return cmd
}

// addOffFlags adds the flags of off and uninstall.
func addOffFlags(cmd *cobra.Command, flags *install.UninstallOptions) {
	addPlaceFlags(cmd, &flags.Target)
	cmd.Flags().StringVar(&flags.StateDir, "state-dir", "",
		"use the journal in `DIR` (default: from unwind's conflist)")
	user := cmp.Or(os.Getenv("SUDO_USER"), os.Getenv("USER"), "root")
	cmd.Flags().StringVar(&flags.By, "by", "unwindctl as "+user, "record that `WHO` switched it off")
	cmd.Flags().Lookup("by").DefValue = ""
	flags.Output.AddFlags(cmd, cmd.Flags(), "changes", term.Plain, term.JSON)
}

func onCommand() *cobra.Command {
	var flags install.Options
	var o term.Output
	cmd := &cobra.Command{
		Use:   "on",
		Short: "Switch unwind on again on this node",
		Long: "Switch unwind on again on this node: remove the file that switched it off, and\n" +
			"unwind's conflist if cilium has renamed it. If an agent runs, wait until it has\n" +
			"installed unwind; otherwise install it as unwindctl install does.",
		Example: "  unwindctl on\n" +
			"  kubectl unwind on",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return install.SwitchOnNode(cmd.Context(), streams(cmd), flags, &o)
		},
	}
	addInstallFlags(cmd, &flags)
	addNodeFlags(cmd, &flags.ProgramDir, &flags.UnitDir, "")
	o.AddFlags(cmd, cmd.Flags(), "changes", term.Plain, term.JSON)
	return cmd
}
