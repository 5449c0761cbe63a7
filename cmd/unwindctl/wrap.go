package main

import (
	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/install"
)

func wrapCommand() *cobra.Command {
	return rewriteCommand(&cobra.Command{
		Use:   "wrap FILE",
		Short: "Make unwind the only plugin of a conflist, with the original as its chain",
		Long: "Make unwind the only plugin of a conflist, and print the result. The original\n" +
			"file becomes the value of \"chain\" in unwind's entry, byte for byte; unwindctl\n" +
			"unwrap restores it. A single-plugin .conf file becomes a list.\n\n" +
			"wrap refuses a file that unwind or the runtime would refuse. It also refuses a list\n" +
			"if a directory next to FILE is named after the network and contains plugins, because\n" +
			"a runtime also runs those. With --in-place, it refuses a file with which no pod could\n" +
			"start: the chainFile of unwind's conflist, or a file in a runtime's conflist directory\n" +
			"while the runtime's plugin directories contain no plugin unwind. If FILE is already\n" +
			"wrapped and an installer has added plugins next to unwind, wrap moves them into the\n" +
			"chain. If FILE is -, wrap reads the standard input.",
		Example: "  unwindctl wrap --in-place /etc/cni/net.d/10-podnet.conflist",
	}, install.Rewrite{Change: install.Inline, Unchanged: "already wrapped", Refuse: install.NotUsable,
		Changed: "wrapped: unwind runs the chain; the runtime needs the plugin unwind in its plugin " +
			"directory"})
}

// rewriteCommand makes cmd apply r to a conflist and print the result. With --in-place, cmd writes
// the result to the file instead.
func rewriteCommand(cmd *cobra.Command, r install.Rewrite) *cobra.Command {
	cmd.Args = term.OneArg
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if r.InPlace && args[0] == "-" {
			return term.Usage("--in-place needs a file, not stdin")
		}
		r.Streams = streams(cmd)
		return r.Run(args[0])
	}
	cmd.Flags().BoolVar(&r.InPlace, "in-place", false, "replace the file, keeping its owner and mode")
	return cmd
}

func unwrapCommand() *cobra.Command {
	return rewriteCommand(&cobra.Command{
		Use:   "unwrap FILE",
		Short: "Restore the conflist that wrap put into unwind's entry",
		Long: "Restore the conflist that unwindctl wrap put into unwind's entry: print the value\n" +
			"of \"chain\", byte for byte, with any change made since wrap. unwrap drops everything\n" +
			"else in FILE. It does not change a file that is not wrapped. If FILE is -, unwrap\n" +
			"reads the standard input.",
		Example: "  unwindctl unwrap --in-place /etc/cni/net.d/10-podnet.conflist\n" +
			"  unwindctl unwrap wrapped.conflist | diff - /etc/cni/net.d/10-podnet.conflist",
	}, install.Rewrite{Change: install.Restore, Unchanged: "not wrapped",
		Changed: "unwrapped: it no longer runs unwind"})
}
