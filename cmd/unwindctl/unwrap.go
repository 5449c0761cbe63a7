package main

import (
	"github.com/spf13/cobra"

	"cni-unwind/cmd/unwindctl/internal/wrap"
)

func unwrapCommand() *cobra.Command {
	return rewriteCommand(&cobra.Command{
		Use:   "unwrap FILE",
		Short: "Return the conflist that wrap has put into unwind's entry",
		Long: "Return the conflist that unwindctl wrap has put into unwind's entry: print the\n" +
			"value of \"chain\", byte for byte. Later changes to the chain are kept; everything\n" +
			"else in FILE is dropped. FILE - is the standard input. A file that is not\n" +
			"wrapped is left as it is. In NetworkAttachmentDefinitions only spec.config\n" +
			"changes.",
		Example: "  unwindctl unwrap --in-place /etc/cni/net.d/10-podnet.conflist\n" +
			"  unwindctl unwrap wrapped.conflist | diff - /etc/cni/net.d/10-podnet.conflist",
	}, "not wrapped", wrap.Restore)
}
