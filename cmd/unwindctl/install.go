package main

import (
	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/install"
)

func installCommand() *cobra.Command {
	var flags install.Options
	cmd := &cobra.Command{
		Use:   "install",
		Short: "Install unwind on this node",
		Long: "Install unwind on this node: copy its plugin to the plugin directory, and write\n" +
			"unwind's own conflist, which sorts first and names the provider's conflist as its\n" +
			"chain. install also copies unwindctl and the plugin to --install-dir.\n\n" +
			"install leaves other conflists alone, with one exception: if another program has\n" +
			"copied unwind's conflist or added plugins to it, install removes the copy, or moves\n" +
			"the plugins to the provider's conflist.\n\n" +
			"install finds the directories of containerd (including GKE), CRI-O (including\n" +
			"OpenShift), k3s, RKE2, MicroK8s, k0s and Talos. For nerdctl, podman and Nomad, set\n" +
			"--conf-dir, --cni-bin-dir, --provider-conf and --unwind-file 00-unwind.conflist.\n\n" +
			"Running pods are not affected. install is idempotent. It keeps the name and format\n" +
			"of unwind's conflist, and any keys that you added to unwind's entry. If install is\n" +
			"interrupted, the node keeps working.",
		Example: "  unwindctl install --dry-run\n" +
			"  unwindctl install\n" +
			"  unwindctl install --runtime k3s --observe",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return install.Run(cmd.Context(), streams(cmd), flags)
		},
	}
	addInstallFlags(cmd, &flags)
	addNodeFlags(cmd, &flags.ProgramDir, &flags.UnitDir, "")
	addDryRun(cmd, &flags.DryRun)
	flags.Output.AddFlags(cmd, cmd.Flags(), "changes, dryRun", term.Plain, term.JSON)
	return cmd
}

func offCommand() *cobra.Command {
	flags := install.Options{OffOnly: true}
	cmd := &cobra.Command{
		Use:   "off",
		Short: "Switch unwind off on this node until it is switched on again",
		Long: "Switch unwind off on this node: rename unwind's conflist to NAME.off, which no\n" +
			"runtime loads, and write the file \"off\" into the state directory, so that no agent\n" +
			"installs unwind. From then on, the runtime uses the provider's conflist, even to\n" +
			"release pods that were added through unwind. Exceptions: CRI-O and podman release\n" +
			"a pod with the conflist that it was started with, and so does Nomad until its\n" +
			"client restarts.\n\n" +
			"off works without a running runtime. Last, it prints the file that the runtime\n" +
			"loads next, and fails if there is none or if that file runs unwind.\n\n" +
			describeExits("off"),
		Example: "  unwindctl off\n" +
			"  kubectl unwind exec --nodes worker-2 -- off",
		RunE: func(cmd *cobra.Command, _ []string) error {
			flags.StateDirFlag = cmd.Flags().Changed("state-dir")
			return install.Uninstall(cmd.Context(), cmd.OutOrStdout(), flags)
		},
	}
	addOffFlags(cmd, &flags)
	return cmd
}

func addDryRun(cmd *cobra.Command, dryRun *bool) {
	cmd.Flags().BoolVar(dryRun, "dry-run", false, "print the changes without making them")
}

func addOffFlags(cmd *cobra.Command, flags *install.Options) {
	addPlaceFlags(cmd, &flags.Target)
	checkDirs(cmd, "conf-dir", "cni-bin-dir")
	cmd.Flags().StringVar(&flags.StateDir, "state-dir", "",
		"use the journal in `DIR` (default: the one that unwind's conflist names)")
	cmd.Flags().StringVar(&flags.By, "by", install.User(),
		"record `WHO` as the user who ran this command")
	cmd.Flags().Lookup("by").DefValue = ""
	addDryRun(cmd, &flags.DryRun)
	flags.Output.AddFlags(cmd, cmd.Flags(), "changes, dryRun", term.Plain, term.JSON)
}

func onCommand() *cobra.Command {
	var flags install.Options
	cmd := &cobra.Command{
		Use:   "on",
		Short: "Switch unwind back on for this node",
		Long: "Switch unwind back on for this node. on removes the file \"off\" and, if cilium has\n" +
			"renamed unwind's conflist, the renamed file. If an agent is running, on waits until\n" +
			"the agent has installed unwind. Otherwise, on installs unwind itself, with the\n" +
			"configuration that unwindctl off has kept. While an agent with --off runs, on and\n" +
			"install change nothing, and fail.",
		Example: "  unwindctl on\n" +
			"  kubectl unwind exec -- on",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return install.SwitchOnNode(cmd.Context(), streams(cmd), flags)
		},
	}
	addInstallFlags(cmd, &flags)
	addDryRun(cmd, &flags.DryRun)
	flags.Output.AddFlags(cmd, cmd.Flags(), "changes, dryRun", term.Plain, term.JSON)
	return cmd
}

func uninstallCommand() *cobra.Command {
	var flags install.Options
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Remove unwind from this node",
		Example: "  unwindctl uninstall\n" +
			"  kubectl unwind exec --nodes worker-2 -- uninstall",
		Long: "Remove unwind from this node: switch it off as unwindctl off does, and remove its\n" +
			"plugin once nothing refers to it. From then on, the runtime uses the provider's\n" +
			"conflist, even to release pods that were added through unwind. Exceptions: CRI-O\n" +
			"and podman release a pod with the conflist that it was started with, and so does\n" +
			"Nomad until its client restarts. So the plugin stays while such pods run.\n" +
			"unwindctl and the systemd units stay while the journal is not empty. The state\n" +
			"directory stays.\n\n" +
			describeExits("uninstall"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return install.Uninstall(cmd.Context(), cmd.OutOrStdout(), flags)
		},
	}
	addOffFlags(cmd, &flags)
	addNodeFlags(cmd, &flags.ProgramDir, &flags.UnitDir, install.DefaultUnitDir)
	cmd.Flags().Lookup("install-dir").Usage = "remove unwindctl and the plugin from `DIR`; " +
		"if empty, keep both"
	cmd.Flags().Lookup("systemd").Usage = "remove the systemd units for sweeps and the agent from " +
		"`DIR`"
	cmd.Flags().StringVar(&flags.CacheDir, "cache-dir", "/var/lib/cni",
		"find the runtime's libcni cache in `DIR`; "+noCache+" if the runtime has no cache")
	checkDirs(cmd, "cache-dir")
	return cmd
}
