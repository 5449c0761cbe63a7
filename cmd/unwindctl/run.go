package main

import (
	"log/slog"
	"time"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/agent"
)

func runCommand() *cobra.Command {
	options := agent.Options{Version: version}
	cmd := &cobra.Command{
		Use:        "run",
		SuggestFor: []string{"agent"},
		Short:      "Keep unwind installed on this node, and sweep",
		Long: "Run the node's agent: install unwind as unwindctl install does, update its\n" +
			"conflist when the provider's file changes, sweep every minute with the runtime's\n" +
			"list of pods, and serve /metrics and /healthz.\n\n" +
			"The provider's file is the first of the directory, or that of --conf. If it is\n" +
			"gone for longer than some seconds, the agent removes unwind's conflist, and\n" +
			"writes it again for the next file. When the agent ends it removes nothing: pods\n" +
			"are still attached through unwind.\n\n" +
			"unwindctl off, or removing unwind's conflist by hand, switches unwind off although\n" +
			"the agent runs. The agent goes on to sweep, and installs again only after unwindctl\n" +
			"on, also if it is started anew.\n\n" +
			"The plugin that is installed follows the one of the agent. One that is newer stays\n" +
			"as it is without --allow-downgrade.\n\n" +
			"In a container, use unwindctl --host run: only the host's namespaces show what\n" +
			"is gone. With --observe the agent sweeps nothing, and logs what a sweep would\n" +
			"release: for the first week.\n\n" +
			"With --events the agent of a pod posts Events about pods to Kubernetes: an ADD that\n" +
			"failed and was undone, with what failed, and a DEL that is pending. Its service\n" +
			"account needs the right to create events.",
		Example: "  unwindctl run\n" +
			"  unwindctl --host run --observe\n" +
			"  unwindctl run --no-install --interval 5m",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if options.LogFormat != "text" && options.LogFormat != "json" {
				return term.Usage("--log-format %s is none of text, json", options.LogFormat)
			}
			if options.Interval < time.Second {
				return term.Usage("--interval %s is less than a second", options.Interval)
			}
			return agent.Run(cmd.Context(), cmd.ErrOrStderr(), options)
		},
	}
	addInstallFlags(cmd, &options.Options)
	cmd.Flags().StringVar(&options.CRI, "cri", "auto",
		"the runtime's `SOCKET`; auto finds it, none asks no runtime")
	cmd.Flags().StringVar(&options.LogFormat, "log-format", "text", "log in this `FORMAT`: text, json")
	cmd.Flags().TextVar(&options.LogLevel, "log-level", slog.LevelInfo,
		"log what is of this `LEVEL` at least: debug, info, warn, error")
	cmd.Flags().StringVar(&options.Listen, "listen", agent.DefaultListen,
		"serve /metrics and /healthz at `ADDRESS`; an empty one for not at all")
	cmd.Flags().DurationVar(&options.Interval, "interval", time.Minute, "sweep each `DURATION`")
	cmd.Flags().BoolVar(&options.NoInstall, "no-install", false,
		"install nothing and write no conflist: only sweep")
	cmd.Flags().BoolVar(&options.Downgrade, "allow-downgrade", false,
		"put this agent's plugin in the place of a newer one, too")
	cmd.Flags().BoolVar(&options.Off, "off", false,
		"be switched off, as by unwindctl off, until an agent is started without this")
	cmd.Flags().StringVar(&options.ProgramDir, "program-dir", programDir,
		"unwindctl, with the plugin to install beside it, goes to `DIR`; an empty one for nowhere")
	cmd.Flags().BoolVar(&options.Events, "events", false,
		"in a pod: post Events to Kubernetes about failed ADDs and pending DELs")
	return cmd
}
