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
		Short: "Switch unwind off on this node, until it is switched on",
		Long: "Switch unwind off on this node: write the file off into the state directory, and\n" +
			"remove unwind's conflist. From the next pod on the runtime takes the provider's\n" +
			"own, also to release the pods that were added through unwind. Nothing else is\n" +
			"removed.\n\n" +
			"As long as the file is there no agent installs, whether an agent, the node or the\n" +
			"DaemonSet is started anew. doctor and the metrics show since when, and by whom.\n" +
			"An agent that sees unwind's conflist removed by hand writes the file, too.",
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
		"the journal is in `DIR` (default: as unwind's conflist has it)")
	user := cmp.Or(os.Getenv("SUDO_USER"), os.Getenv("USER"), "root")
	cmd.Flags().StringVar(&flags.By, "by", "unwindctl of "+user, "`WHO` wants it, for the record")
	cmd.Flags().Lookup("by").DefValue = ""
	flags.Output.AddFlags(cmd, cmd.Flags(), "changes", term.Plain, term.JSON)
}

func onCommand() *cobra.Command {
	var flags install.Options
	var o term.Output
	cmd := &cobra.Command{
		Use:   "on",
		Short: "Switch unwind on again on this node",
		Long: "Switch unwind on again: remove the file that switched it off, and unwind's conflist\n" +
			"as cilium has renamed it. Where an agent runs, wait until that has installed;\n" +
			"elsewhere install, as unwindctl install does with these flags.",
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
