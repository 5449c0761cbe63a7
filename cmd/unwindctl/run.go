package main

import (
	"cmp"
	"net"
	"strings"
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
		Short:      "Run the agent: keep unwind installed on this node, and sweep",
		Long: "Run the node's agent: install unwind as unwindctl install does, update its\n" +
			"conflist when the provider's file changes, sweep every minute with the runtime's\n" +
			"list of pods, and serve /metrics, /healthz and /readyz.\n\n" +
			"If the provider's file is missing for more than a few seconds, the agent uses the\n" +
			"next conflist in the directory. While there is none, it removes unwind's conflist.\n" +
			"It removes nothing when it exits, because pods are still attached through unwind.\n" +
			"unwindctl off, or removing unwind's conflist by hand, switches unwind off until\n" +
			"unwindctl on; the agent continues to sweep.\n\n" +
			"The agent replaces the installed plugin with its own version, even if the\n" +
			"installed one is newer. If the agent's version cannot read the journal, the agent\n" +
			"installs nothing.\n\n" +
			"In a container, use unwindctl --host run: the agent can judge attachments only from\n" +
			"the host's namespaces. With --observe, which is recommended for the first week, the\n" +
			"agent does not sweep, but logs what a sweep would release.",
		Example: "  unwindctl run\n" +
			"  unwindctl --host run --observe\n" +
			"  unwindctl run --no-install --interval 5m",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if options.LogFormat != "text" && options.LogFormat != "json" {
				return term.Usage("--log-format %s: must be text or json", options.LogFormat)
			}
			if options.Interval < time.Second {
				return term.Usage("--interval %s: must be at least 1s", options.Interval)
			}
			if _, _, err := net.SplitHostPort(options.Listen); err != nil && options.Listen != "" {
				return term.Usage("--listen: %v", err)
			}
			return agent.Run(cmd.Context(), cmd.ErrOrStderr(), options)
		},
	}
	addInstallFlags(cmd, &options.Options)
	addCRIFlag(cmd, &options.CRI)
	cmd.Flags().StringVar(&options.LogFormat, "log-format", "text", "log in this `FORMAT`: text, json")
	levels := []string{"debug", "info", "warn", "error"}
	cmd.Flags().Func("log-level", "log messages of at least this `LEVEL`: "+strings.Join(levels, ", "),
		func(text string) error {
			return cmp.Or(term.OneOf(text, levels), options.LogLevel.UnmarshalText([]byte(text)))
		})
	cmd.Flags().Lookup("log-level").DefValue = "info" // slog.Level's zero value
	_ = cmd.RegisterFlagCompletionFunc("log-level", cobra.FixedCompletions(levels,
		cobra.ShellCompDirectiveNoFileComp))
	cmd.Flags().StringVar(&options.Listen, "listen", agent.DefaultListen,
		"serve /metrics, /healthz and /readyz at `ADDRESS`; if empty, serve none of them")
	cmd.Flags().DurationVar(&options.Interval, "interval", time.Minute, "sweep every `DURATION`")
	cmd.Flags().BoolVar(&options.NoInstall, "no-install", false,
		"only sweep: do not install unwind or write its conflist")
	cmd.Flags().BoolVar(&options.Off, "off", false,
		"switch unwind off until an agent starts without this flag or, while no agent runs, somebody "+
			"runs \"unwindctl on\"")
	cmd.Flags().StringVar(&options.ProgramDir, "install-dir", programDir,
		"copy unwindctl and the plugin to `DIR`; if empty, copy neither")
	return cmd
}
