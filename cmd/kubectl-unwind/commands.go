package main

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
)

func listCommand(o *options) *cobra.Command {
	v := &view{
		unwindctl: []string{"list"}, key: "attachments",
		words: []string{"live", "adding", "rolling-back", "deleting", "pending DELs", "waiting"},
		none:  "no attachments", first: "FIRST ERROR",
		wide: []string{"NETWORK", "CONTAINER", "IFNAME", "STATE", "CREATED", "POD", "ADDRESSES",
			"PENDING DELS", "REASON"},
	}
	return term.AddWatch(v.command(o, &cobra.Command{
		Use:   "list",
		Short: "Count the attachments in each node's journal by state",
		Long: "Count the attachments in each node's journal by state, and their pending DELs. The\n" +
			"nodes with the most pending DELs come first. A DEL waits if it depends on something other\n" +
			"than its plugin, such as a new owner of its address. -o wide shows every attachment.",
		Example: "  kubectl unwind list\n" +
			"  kubectl unwind list -o wide --nodes worker-2",
	}))
}

func showCommand(o *options) *cobra.Command {
	v := &view{
		unwindctl: []string{"show", "--cri", "auto"}, key: "attachments",
		fine:  func(code int, r report) bool { return code == term.ExitError && len(r.count()) == 0 },
		words: []string{"live", "dead", "unknown", "other-machine"},
		none:  "no such attachment", quiet: true, needed: true,
		columns: []string{"ATTACHMENT", "POD", "ADDRESSES", "STATE", "VERDICT", "REASON"},
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
		words: []string{"rolled-back", "swept", "released", "waiting", "superseded",
			"forgotten", "untaken", "no-op"},
		none: "no events", quiet: true,
		columns: []string{"AGE", "EVENT", "POD", "PLUGINS", "REASON"},
		wide: []string{"TIME", "EVENT", "NETWORK", "CONTAINER", "IFNAME", "POD", "ADDRESSES", "PLUGINS",
			"REASON"},
		flags: handedOn{{"since", "only events of the last `DURATION`, such as 2h"},
			{"last", "only the last `N` events of each node"},
			{"network", "only events of this `NETWORK`"},
			{"kind", "only events of these `KINDS`; unwindctl history --help lists them"}},
	}
	return v.command(o, &cobra.Command{
		Use:   "history [ATTACHMENT|POD|ADDRESS]",
		Short: "Show unusual events on all nodes",
		Long: "Show unusual events on all nodes, newest last. Nodes without events are left\n" +
			"out. unwindctl history --help explains the events.",
		Example: "  kubectl unwind history --since 2h\n  kubectl unwind history default/web-0",
		Args:    term.OneArg,
	})
}

func sweepCommand(o *options) *cobra.Command {
	v := &view{
		unwindctl: []string{"sweep", "--cri", "auto"}, key: "findings",
		words: []string{"released", "pending", "waits", "kept", "unknown", "busy", "recent", "live"},
		none:  "nothing to release", first: "FIRST REASON", exits: true, timeout: 10 * time.Minute,
		wide: []string{"NETWORK", "CONTAINER", "IFNAME", "ADDRESS", "POD", "STATE", "RESULT", "REASON"},
	}
	var dryRun, yes bool
	cmd := v.command(o, &cobra.Command{
		Use:   "sweep --dry-run|--yes",
		Short: "Release dead attachments on all nodes, or show what would be released",
		Long: "Run unwindctl sweep with the runtime's list of pods on each node. --dry-run shows\n" +
			"what it would release and keep; --yes releases it. The nodes with the most to release\n" +
			"or keep come first. -o wide shows every attachment that is not live, and why. EXIT is\n" +
			"the exit code of unwindctl sweep on the node. unwindctl sweep --help explains the exit\n" +
			"codes and the results.\n\n" +
			"The agents sweep every minute. With --yes, the default --timeout is 10 minutes. A\n" +
			"sweep that has started on a node finishes there, even if kubectl unwind ends first.",
		Example: "  kubectl unwind sweep --dry-run\n" +
			"  kubectl unwind sweep --dry-run -o wide --nodes worker-2\n" +
			"  kubectl unwind sweep --yes -l pool=batch --at-once 5",
	})
	atOnce := 0
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "print what would be released, and release nothing")
	cmd.Flags().BoolVar(&yes, "yes", false, "release the dead attachments")
	cmd.Flags().IntVar(&atOnce, "at-once", 10, "with --yes, sweep at most `N` nodes at the same time")
	run := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		switch {
		case dryRun == yes:
			return term.Usage("sweep requires either --dry-run or --yes")
		case atOnce < 1:
			return term.Usage("--at-once %d: must be positive", atOnce)
		case dryRun:
			v.unwindctl = append(v.unwindctl, "--dry-run")
			v.words, v.timeout = slices.Replace(v.words, 0, 2, "to be released"), 0
		default:
			v.atOnce = atOnce
		}
		return run(cmd, args)
	}
	return cmd
}

func switchCommand(o *options, verb string) *cobra.Command {
	help := map[string][2]string{
		"off": {"Switch unwind off on each node until it is switched on again",
			"Switch unwind off on each node: new pods get the provider's own chain. unwind stays\n" +
				"off across restarts, until you run kubectl unwind on."},
		"on": {"Switch unwind on again on each node",
			"Switch unwind on again on each node: the agents install it within seconds."},
		"uninstall": {"Remove unwind from each node once nothing needs it",
			"Switch unwind off on each node, and remove the plugin once nothing needs it. Rows\n" +
				"with \"kept\" show what remains on a node; run uninstall again later. The agents stay\n" +
				"until you delete the DaemonSet."},
	}
	v := &view{
		unwindctl: []string{verb}, key: "changes",
		words:   []string{"renamed", "removed", "released", "returned", "kept", "off", "on"},
		none:    "nothing to do",
		columns: []string{"CHANGE", "ITEM"},
	}
	if verb != "on" {
		v.unwindctl = append(v.unwindctl, "--by", "kubectl unwind "+verb+" as "+operator())
	}
	return v.command(o, &cobra.Command{
		Use: verb, Short: help[verb][0],
		Long:    help[verb][1] + "\n\nThe default is all nodes; --nodes or -l selects some of them.",
		Example: "  kubectl unwind " + verb + " --nodes worker-2\n  kubectl unwind " + verb,
	})
}

// operator returns the user who runs this program. unwind records who switched it off.
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
		Short: "Print a shell completion script for kubectl unwind",
		Long: "Print a shell completion script for kubectl unwind. kubectl's own completion (1.26 or\n" +
			"later) runs the script if it is in PATH under the name kubectl_complete-unwind.",
		Example: "  kubectl unwind completion >~/.local/bin/kubectl_complete-unwind\n" +
			"  chmod +x ~/.local/bin/kubectl_complete-unwind",
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprint(cmd.OutOrStdout(), "#!/bin/sh\nexec kubectl unwind __complete \"$@\"\n")
			return err
		},
	}
}
