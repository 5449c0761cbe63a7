package main

import (
	"github.com/spf13/cobra"

	"cni-unwind/cmd/unwindctl/internal/install"
)

func uninstallCommand() *cobra.Command {
	var flags install.UninstallOptions
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Remove unwind from this node",
		Example: "  unwindctl uninstall\n" +
			"  kubectl unwind uninstall --nodes worker-2",
		Long: "Remove unwind from this node: switch it off as unwindctl off does, and remove its\n" +
			"binary once nothing refers to it. From then on, the runtime uses the provider's\n" +
			"conflist, also to release the pods that were added through unwind. CRI-O releases\n" +
			"a pod with the conflist it was started with, so the binary stays while such pods\n" +
			"run: run uninstall again after they have ended.\n\n" +
			"The journal stays, and unwindctl sweep runs its pending DELs. Once it is empty,\n" +
			"uninstall also removes unwindctl and its systemd units, and with --purge the state\n" +
			"directory.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return install.Uninstall(cmd.Context(), cmd.OutOrStdout(), flags)
		},
	}
	addOffFlags(cmd, &flags)
	addNodeFlags(cmd, &flags.ProgramDir, &flags.UnitDir, install.DefaultUnitDir)
	cmd.Flags().BoolVar(&flags.Purge, "purge", false,
		"also remove the state directory; refused while the journal has attachments")
	cmd.Flags().StringVar(&flags.CacheDir, "cache-dir", "/var/lib/cni",
		"use the runtime's libcni cache in `DIR`")
	return cmd
}
