package main

import (
	"github.com/spf13/cobra"

	"cni-unwind/cmd/unwindctl/internal/install"
)

func installCommand() *cobra.Command {
	var flags install.Options
	cmd := &cobra.Command{
		Use:   "install",
		Short: "Put unwind in front of this node's network",
		Long: "Put unwind in front of this node's network: its binary among the plugins, and a\n" +
			"file of its own that sorts first and names the provider's as its chain. install\n" +
			"does not touch the provider's file, whose changes count from the next pod on,\n" +
			"except that a plugin that a mesh has put behind unwind goes to its end.\n\n" +
			"The file is 00-unwind.json, the configuration of one plugin, which meshes leave\n" +
			"alone; without a runtime of CRI it is 00-unwind.conflist, a list, which podman\n" +
			"needs. unwindctl itself goes into --program-dir.\n\n" +
			"The directories are those of the runtime's configuration: containerd (also\n" +
			"GKE's), CRI-O (also OpenShift's), k3s, RKE2, MicroK8s, k0s, Talos, nerdctl,\n" +
			"podman, Nomad.\n" +
			"Pods that already run are not touched. install can be repeated at any time: it\n" +
			"changes only what is not right yet, and keeps keys that were added to unwind's\n" +
			"entry.\n\n" +
			"The binary comes first and the file last, each put in place whole:\n" +
			"interrupted at any point, the node works.",
		Example: "  unwindctl install --dry-run\n" +
			"  unwindctl install\n" +
			"  unwindctl install --runtime k3s --observe",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return install.Run(cmd.Context(), streams(cmd), flags)
		},
	}
	addInstallFlags(cmd, &flags)
	addNodeFlags(cmd, &flags.ProgramDir, &flags.UnitDir, "")
	cmd.Flags().BoolVar(&flags.DryRun, "dry-run", false, "say what would be done, and do nothing")
	return cmd
}
