package main

import (
	"github.com/spf13/cobra"

	"cni-unwind/cmd/unwindctl/internal/install"
)

func uninstallCommand() *cobra.Command {
	var flags install.UninstallOptions
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Take unwind out of this node's network",
		Example: "  unwindctl uninstall\n" +
			"  kubectl unwind uninstall --nodes worker-2",
		Long: "Take unwind out of this node's network: switch it off as unwindctl off does, and\n" +
			"remove its binary once nothing names it any more. From then on the runtime takes the " +
			"provider's\n" +
			"conflist, also to release the pods that were added through unwind. CRI-O\n" +
			"releases a pod with the conflist of its start, so the binary stays while such\n" +
			"pods run: run uninstall again then.\n\n" +
			"The journal stays, and unwindctl sweep runs the DELs that are pending in it. Once\n" +
			"it is empty, uninstall removes unwindctl and its units for systemd too, and with\n" +
			"--purge the state directory.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return install.Uninstall(cmd.Context(), cmd.OutOrStdout(), flags)
		},
	}
	addOffFlags(cmd, &flags)
	addNodeFlags(cmd, &flags.ProgramDir, &flags.UnitDir, install.DefaultUnitDir)
	cmd.Flags().BoolVar(&flags.Purge, "purge", false,
		"remove the state directory too; refused while the journal has attachments")
	cmd.Flags().StringVar(&flags.CacheDir, "cache-dir", "/var/lib/cni",
		"the runtime's cache of libcni is in `DIR`")
	return cmd
}
