package main

import (
	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/wrap"
)

func wrapCommand() *cobra.Command {
	return rewriteCommand(&cobra.Command{
		Use:   "wrap FILE",
		Short: "Put the chain of a conflist, or of NetworkAttachmentDefinitions, into unwind's entry",
		Long: "Put the chain of a conflist into unwind's entry, and print the result. The file\n" +
			"becomes the value of \"chain\", byte for byte; unwindctl unwrap returns it.\n" +
			"Plugins that a runtime would add from the directory beside FILE that has the\n" +
			"network's name join the chain. The .conf of one plugin becomes a list. FILE - is\n" +
			"the standard input, which has no such directory. A file that unwind or the\n" +
			"runtime would refuse is refused, and one that is already wrapped is left as it\n" +
			"is.\n\n" +
			"FILE may also have NetworkAttachmentDefinitions of Multus, in YAML or JSON, also\n" +
			"as a List or in several documents. Their spec.config is wrapped, and nothing else\n" +
			"changes. If one of them is refused, nothing is printed.",
		Example: "  unwindctl wrap --in-place /etc/cni/net.d/10-podnet.conflist\n" +
			"  kubectl get net-attach-def -o yaml | unwindctl wrap - | kubectl apply -f -",
	}, "already wrapped", wrap.Inline)
}

// rewriteCommand returns a command that prints what a change makes of a file, or puts it in its
// place.
func rewriteCommand(cmd *cobra.Command, unchanged string,
	change func(wrap.Source) ([]byte, error)) *cobra.Command {
	var inPlace bool
	cmd.Args = term.OneArg
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if inPlace && args[0] == "-" {
			return term.Usage("--in-place needs a file")
		}
		return wrap.Rewrite{Change: change, Unchanged: unchanged, InPlace: inPlace,
			Streams: streams(cmd)}.Run(args[0])
	}
	cmd.Flags().BoolVar(&inPlace, "in-place", false, "replace the file; its owner and mode stay")
	return cmd
}
