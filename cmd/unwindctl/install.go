package main

import (
	"github.com/spf13/cobra"

	"cni-unwind/cmd/unwindctl/internal/install"
)

func installCommand() *cobra.Command {
	var flags install.Options
	cmd := &cobra.Command{
		Use:   "install",
		Short: "Install unwind on this node",
		Long: "Install unwind on this node: copy its binary to the plugins, and write a file of\n" +
			"its own that sorts first and refers to the provider's file for its chain. install\n" +
			"does not change the provider's file, with one exception: it moves a plugin that a\n" +
			"mesh has added after unwind to the end of that file. Later changes to the\n" +
			"provider's file apply from the next pod on.\n\n" +
			"The file is 00-unwind.json, a single-plugin configuration, which meshes leave\n" +
			"alone. Without a CRI runtime it is 00-unwind.conflist, because podman needs a\n" +
			"list. install also copies unwindctl into --program-dir.\n\n" +
			"The directories come from the runtime's configuration: containerd (including\n" +
			"GKE), CRI-O (including OpenShift), k3s, RKE2, MicroK8s, k0s, Talos, nerdctl,\n" +
			"podman, Nomad.\n\n" +
			"Running pods are not affected. install is idempotent and keeps keys that were\n" +
			"added to unwind's entry. It writes the binary first and the file last, each\n" +
			"atomically, so the node keeps working if install is interrupted.",
		Example: "  unwindctl install --dry-run\n" +
			"  unwindctl install\n" +
			"  unwindctl install --runtime k3s --observe",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return install.Run(cmd.Context(), streams(cmd), flags)
		},
	}
	addInstallFlags(cmd, &flags)
	addNodeFlags(cmd, &flags.ProgramDir, &flags.UnitDir, "")
	cmd.Flags().BoolVar(&flags.DryRun, "dry-run", false, "print the changes without making them")
	return cmd
}
