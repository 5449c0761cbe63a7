package main

import (
	"cmp"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
)

func listCommand(o *options) *cobra.Command {
	v := &view{
		unwindctl: []string{"list"}, key: "attachments",
		words: []string{"live", "adding", "unwinding", "removing", "pending DELs", "unproven"},
		none:  "no attachments", first: "FIRST ERROR",
		wide: []string{"NETWORK", "CONTAINER", "IFNAME", "STATE", "CREATED", "POD", "ADDRESSES",
			"PENDING DELS", "WHY"},
	}
	return term.AddWatch(v.command(o, &cobra.Command{
		Use:   "list",
		Short: "Count the attachments in each node's journal by state",
		Long: "Count the attachments in each node's journal by state, and their pending DELs. The\n" +
			"nodes with the most pending DELs come first. A DEL is unproven if it succeeded but its\n" +
			"address may still be in use. -o wide shows every attachment.",
		Example: "  kubectl unwind list\n" +
			"  kubectl unwind list -o wide --nodes worker-2",
	}))
}

func showCommand(o *options) *cobra.Command {
	v := &view{
		unwindctl: []string{"show", "--cri", "auto"}, key: "attachments",
		fine:  func(code int, r report) bool { return code == term.ExitError && len(r.count()) == 0 },
		words: []string{"live", "dead", "unknown", "foreign"},
		none:  "no such attachment", quiet: true, needed: true,
		columns: []string{"ATTACHMENT", "POD", "ADDRESSES", "STATE", "VERDICT", "WHY"},
		wide:    []string{"ATTACHMENT", "STATE", "VERDICT", "SUMMARY"},
	}
	return v.command(o, &cobra.Command{
		Use:   "show ATTACHMENT|POD|ADDRESS",
		Short: "Show which node has an attachment and why it is kept",
		Long: "Find the attachments of a pod (NAMESPACE/NAME, or NAME), address, container ID or\n" +
			"NETWORK/CONTAINER/IFNAME on all nodes, and show why they are kept. -o wide shows all\n" +
			"details of unwindctl show.",
		Example: "  kubectl unwind show default/web-0\n  kubectl unwind show 10.22.0.5 -o wide",
		Args:    term.OneArg,
	})
}

func historyCommand(o *options) *cobra.Command {
	v := &view{
		unwindctl: []string{"history"}, key: "events",
		words: []string{"rolled-back", "swept", "released", "parked", "unproven", "superseded",
			"forgotten", "untaken", "no-op"},
		none: "no events", quiet: true,
		columns: []string{"TIME", "WHAT", "NETWORK", "POD", "PLUGINS", "WHY"},
		wide: []string{"TIME", "WHAT", "NETWORK", "CONTAINER", "IFNAME", "POD", "ADDRESSES", "PLUGINS",
			"WHY"},
		flags: handedOn{{"since", "only events of the last `DURATION`, such as 2h"},
			{"last", "only the last `N` events of each node"},
			{"network", "only events of this `NETWORK`"},
			{"kind", "only events of these `KINDS`; unwindctl history --help lists them"}},
	}
	return v.command(o, &cobra.Command{
		Use:   "history [ATTACHMENT|POD|ADDRESS]",
		Short: "Show unusual events on all nodes",
		Long: "Show unusual events on all nodes, the newest last. Nodes without events are left\n" +
			"out. unwindctl history --help explains the events.",
		Example: "  kubectl unwind history --since 2h\n  kubectl unwind history default/web-0",
		Args:    term.OneArg,
	})
}

func sweepCommand(o *options) *cobra.Command {
	v := &view{
		unwindctl: []string{"sweep", "--dry-run", "--cri", "auto"}, key: "findings",
		words: []string{"to be released", "waits", "kept", "unknown", "busy", "live", "left"},
		none:  "nothing to release", first: "FIRST REASON",
		wide: []string{"NETWORK", "CONTAINER", "IFNAME", "ADDRESS", "POD", "STATE", "RESULT", "WHY"},
	}
	var dryRun bool
	cmd := v.command(o, &cobra.Command{
		Use:   "sweep --dry-run",
		Short: "Show what a sweep would release on each node",
		Long: "Show what a sweep with the runtime's list of pods would release on each node, and what\n" +
			"it would keep. The nodes with the most to release or keep come first. -o wide shows\n" +
			"every attachment that is not live, and why. unwindctl sweep --help explains the\n" +
			"results.\n\n" +
			"Only a dry run is available for all nodes at once. The agents sweep every minute.",
		Example: "  kubectl unwind sweep --dry-run\n" +
			"  kubectl unwind sweep --dry-run -o wide --nodes worker-2",
	})
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "print what would be released; required")
	run := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if !dryRun {
			return term.WithHint("the agents sweep every minute; to sweep one node now: kubectl -n "+
				o.namespace+" exec POD -c "+container+" -- /unwindctl --host sweep",
				"%w", term.Usage("sweep requires --dry-run"))
		}
		return run(cmd, args)
	}
	return cmd
}

func switchCommand(o *options, verb string) *cobra.Command {
	help := map[string][2]string{
		"off": {"Switch unwind off on each node until it is switched on again",
			"Switch unwind off on each node: new pods get the provider's own chain. unwind stays\n" +
				"off across restarts, until kubectl unwind on."},
		"on": {"Switch unwind on again on each node",
			"Switch unwind on again on each node: the agents install it within seconds."},
		"uninstall": {"Remove unwind from each node once nothing needs it",
			"Switch unwind off on each node, and remove the plugin once nothing needs it. Rows\n" +
				"with \"kept\" show what remains: run uninstall again later. The agents stay until you\n" +
				"delete the DaemonSet."},
	}
	v := &view{
		unwindctl: []string{verb}, key: "changes",
		words:   []string{"removed", "returned", "kept", "off", "on"},
		none:    "nothing to do",
		columns: []string{"CHANGE", "WHAT"},
	}
	if verb != "on" {
		v.unwindctl = append(v.unwindctl, "--by", "kubectl unwind "+verb+" as "+operator())
	}
	return v.command(o, &cobra.Command{
		Use: verb, Short: help[verb][0],
		Long:    help[verb][1] + "\n\nThe default is all nodes; --nodes selects some.",
		Example: "  kubectl unwind " + verb + " --nodes worker-2\n  kubectl unwind " + verb,
	})
}

// operator returns the user who runs this program, for the record.
func operator() string {
	host, _ := os.Hostname()
	return cmp.Or(os.Getenv("USER"), os.Getenv("USERNAME"), "somebody") + "@" + cmp.Or(host, "?")
}

func versionCommand(o *options) *cobra.Command {
	v := &view{
		unwindctl: []string{"version"}, words: []string{"answered"}, columns: []string{"AGENT"},
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
